# The Lightning integration's face: strategies for Trainer and Fabric, and the callback for elastic training.
# Re-exports alone, each when it is asked for: importing this imports no Lightning.
"""`Trainer(strategy=FarandoleStrategy())`, or `Trainer(strategy="farandole")` without any import of ours.

`FarandoleStrategy` belongs to the tree of Lightning that the script has imported: `lightning.pytorch`, or
`pytorch_lightning` where that is the only one. `trees.strategy(tree)` gives the one of a tree by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..autoload import allowed
from .registration import watch

if TYPE_CHECKING:  # classes that are made at run time, for one tree or the other
    ElasticCallback: Any
    FabricStrategy: Any
    FarandoleEnvironment: Any
    FarandoleStrategy: Any
    HorovodStrategy: Any

__all__ = ["ElasticCallback", "FabricStrategy", "FarandoleEnvironment", "FarandoleStrategy", "HorovodStrategy"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import trees

    return trees.of_script(name)


if allowed():
    watch()
