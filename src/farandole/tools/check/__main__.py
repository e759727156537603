# `python -m farandole.tools.check`.
# Touches command alone.
"""Runs the command line."""

import sys

from farandole.tools.check.command import main

if __name__ == "__main__":
    sys.exit(main())
