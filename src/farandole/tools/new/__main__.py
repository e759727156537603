# `python -m farandole.tools.new`.
# Touches the command alone.
"""Runs the command line."""

import sys

from farandole.tools.new import main

if __name__ == "__main__":
    sys.exit(main())
