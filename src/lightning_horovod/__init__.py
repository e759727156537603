# The names of the package `lightning-horovod`, served by farandole.lightning.
# One name; importing it imports the tree of Lightning that the script has imported, or `lightning.pytorch`.
"""`from lightning_horovod import HorovodStrategy`: learning rates grow with the number of ranks, as they did there."""

from __future__ import annotations

from typing import Any

from farandole.lightning import trees

__version__ = "0.1.0"
__all__ = ["HorovodStrategy"]


def __getattr__(name: str) -> Any:
    if name == "HorovodStrategy":
        return trees.of_script("LightningHorovodStrategy")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
