# Where `lightning-horovod` has its strategy.
# One name; importing it imports the tree of Lightning that the script has imported, or `lightning.pytorch`.
"""`from lightning_horovod.strategy import HorovodStrategy`: learning rates grow with the number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole.lightning import trees

if TYPE_CHECKING:  # made at run time, for one tree or the other
    HorovodStrategy: Any

__all__ = ["HorovodStrategy"]


def __getattr__(name: str) -> Any:
    if name == "HorovodStrategy":
        return trees.of_script(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
