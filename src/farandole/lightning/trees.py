# Makes the classes that need a base class of Lightning, once for each package of Lightning.
# Touches both packages of Lightning and their private names; every file of this room that has such a class.
"""Lightning has two packages whose classes are not related, so we make our classes for each of them."""

from __future__ import annotations

import sys
from typing import Any

from ..base.named import module_of
from ..bindings.private.lightning_names import look_up_names
from .packages import TRAINERS, fabric_of, package_of

BY_NAME = {tree.replace(".", "_"): tree for pair in TRAINERS.items() for tree in pair}
_made: dict[str, Any] = {}


def strategy(tree: str) -> Any:
    """The strategy for the Trainer of "lightning.pytorch" or "pytorch_lightning"."""
    return build(tree, "FarandoleStrategy")


def of_script(name: str) -> Any:
    """The class of this name for the package that the script has imported."""
    alone = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    tree = "pytorch_lightning" if alone else "lightning.pytorch"
    if name in ("FabricStrategy", "FarandoleEnvironment"):
        alone = "lightning_fabric" in sys.modules and "lightning.fabric" not in sys.modules
        tree = "lightning_fabric" if alone else "lightning.fabric"
    return build(tree, name)


def build(tree: str, name: str) -> Any:
    """The class of this name for a package. It is made once, so that it can be pickled by its name."""
    key = f"{name}_of_{tree.replace('.', '_')}"
    if key not in _made:
        base, ours = _bases(tree, name)
        # pickle finds the class by the first two: see __getattr__.
        attributes = {"__module__": __name__, "__qualname__": key, "__doc__": ours.__doc__, "tree": tree}
        if name not in ("ElasticCallback", "FarandoleEnvironment"):  # a strategy: it makes its own environment
            attributes["environment_class"] = build(fabric_of(tree), "FarandoleEnvironment")
        _made[key] = type(name, (ours, base), attributes)
    return _made[key]


def __getattr__(name: str) -> Any:
    kind, _, tree = name.partition("_of_")
    if tree in BY_NAME:
        return build(BY_NAME[tree], kind)
    if name in ("ElasticCallback", "FabricStrategy", "FarandoleEnvironment", "FarandoleStrategy", "HorovodStrategy"):
        return of_script(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _bases(tree: str, name: str) -> tuple[Any, Any]:
    """The base class of Lightning, and our class, which is the first base."""
    package = package_of(tree)
    look_up_names(tree)
    if name == "FarandoleEnvironment":
        from .environment import Environment

        return module_of(f"{tree}.plugins.environments").ClusterEnvironment, Environment
    if name == "FabricStrategy":
        from .fabric import FabricStrategyMixin

        return module_of(f"{tree}.strategies").ParallelStrategy, FabricStrategyMixin
    if name == "ElasticCallback":
        from .elastic import Elastic

        return package.Callback, Elastic
    from .trainer import HorovodRanks, TrainerRanks

    base = module_of(f"{tree}.strategies").ParallelStrategy
    return base, HorovodRanks if name == "HorovodStrategy" else TrainerRanks
