"""Measurements that ship with the package: `python -m farandole.tools.bench allreduce` and `idle`.
command starts the ranks and prints; worker measures inside them; report makes the tables; mpi is the same for MPI."""

from __future__ import annotations

from collections.abc import Sequence


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command line (None: this process's); the exit code."""
    from .command import main  # the workers import this package as well and need none of it

    return main(words)
