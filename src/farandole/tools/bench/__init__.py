"""Measurements that ship with the package: `python -m farandole.tools.bench`, or `farandole bench`.
command runs them; measure, steps, life and hosts are the parts; pools starts and asks ranks; inside/ runs in them."""

from __future__ import annotations

from collections.abc import Sequence


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command line (None: this process's); the exit code."""
    from .command import main  # inside/ is part of this package and needs none of it

    return main(words)
