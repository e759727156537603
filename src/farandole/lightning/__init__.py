# The public names of the Lightning integration: strategies for Trainer and Fabric, and the callback for elastic jobs.
# Only re-exports names, each at its first use. This import does not import Lightning.
"""`Trainer(strategy=FarandoleStrategy())`, or `Trainer(strategy="farandole")` without importing Farandole.

`FarandoleStrategy` is for the package of Lightning that the script has imported: `lightning.pytorch`, or
`pytorch_lightning` if it is the only one. `trees.strategy(tree)` returns the class for a package by its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..autoload import patching_allowed
from .registration import watch

if TYPE_CHECKING:  # these classes are made at run time, for one of the two packages
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


if patching_allowed():
    watch()
