# The names of the package `lightning-horovod`, served by farandole.lightning.
# One name; importing it imports the tree of Lightning that the script has imported, or `lightning.pytorch`.
"""`from lightning_horovod import HorovodStrategy`: learning rates grow with the number of ranks, as they did there."""

from __future__ import annotations

from typing import Any

from lightning_horovod.__about__ import __version__ as __version__

from . import strategy

__all__ = ["HorovodStrategy"]


def __getattr__(name: str) -> Any:
    if name == "HorovodStrategy":
        return strategy.HorovodStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
