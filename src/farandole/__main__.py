# `python -m farandole`: the same as the `farandole` command.
# Touches launch/cli.py.
"""Runs the command line."""

from __future__ import annotations

import sys

from farandole.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
