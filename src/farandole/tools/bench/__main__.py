"""`python -m farandole.tools.bench`.
Touches command alone."""

import sys

from .command import main

sys.exit(main())
