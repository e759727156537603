# The classes that need a base class of Lightning, made once for each of its trees.
# Touches private and Lightning, in either tree: `lightning.pytorch` or `pytorch_lightning`, each with its Fabric.
"""Lightning comes under two names whose classes know nothing of each other: so ours are made for each of them."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ..private.lightning_names import look

OLDEST = (2, 6)
TRAINERS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
BY_NAME = {tree.replace(".", "_"): tree for pair in TRAINERS.items() for tree in pair}
_made: dict[str, Any] = {}


def strategy(tree: str) -> Any:
    """The strategy for the Trainer of "lightning.pytorch" or "pytorch_lightning"."""
    return build(tree, "FarandoleStrategy")


def of_script(name: str) -> Any:
    """The class of this name for the tree that the script has imported."""
    alone = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    tree = "pytorch_lightning" if alone else "lightning.pytorch"
    if name in ("FabricStrategy", "FarandoleEnvironment"):
        alone = "lightning_fabric" in sys.modules and "lightning.fabric" not in sys.modules
        tree = "lightning_fabric" if alone else "lightning.fabric"
    return build(tree, name)


def build(tree: str, name: str) -> Any:
    """The class of this name for a tree; made once, so that it can be pickled by its name."""
    key = f"{name}_of_{tree.replace('.', '_')}"
    if key not in _made:
        base, ours = _bases(tree, name)
        # pickle finds it by these two: see __getattr__.
        place = {"__module__": __name__, "__qualname__": key, "__doc__": ours.__doc__, "tree": tree}
        _made[key] = type(name.removeprefix("Lightning"), (ours, base), place)
    return _made[key]


def __getattr__(name: str) -> Any:
    kind, _, tree = name.partition("_of_")
    if tree in BY_NAME:
        return build(BY_NAME[tree], kind)
    if name in ("ElasticCallback", "FabricStrategy", "FarandoleEnvironment", "FarandoleStrategy", "HorovodStrategy"):
        return of_script(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _bases(tree: str, name: str) -> tuple[Any, Any]:
    """Lightning's class and ours, which comes before it."""
    package = _package(tree)
    look(tree)
    if name == "FarandoleEnvironment":
        from .environment import Environment

        return importlib.import_module(f"{tree}.plugins.environments").ClusterEnvironment, Environment
    if name == "FabricStrategy":
        from .fabric import FabricRanks

        return importlib.import_module(f"{tree}.strategies").ParallelStrategy, FabricRanks
    if name == "ElasticCallback":
        from .elastic import Elastic

        return package.Callback, Elastic
    from .trainer import HorovodRanks, TrainerRanks

    base = importlib.import_module(f"{tree}.strategies").ParallelStrategy
    return base, HorovodRanks if name == "LightningHorovodStrategy" else TrainerRanks


def _package(tree: str) -> Any:
    try:
        package = importlib.import_module(tree)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != tree.partition(".")[0]:
            raise  # Lightning is there, and misses something else
        raise ModuleNotFoundError(
            f"farandole.lightning needs {tree}, which is not installed: pip install 'farandole[lightning]'",
            name=error.name,
        ) from None
    version = getattr(package, "__version__", None) or importlib.import_module(tree.partition(".")[0]).__version__
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise ImportError(f"{tree} is version {version}; farandole.lightning needs {wanted} or newer: pip install -U")
    return package


def fabric_of(tree: str) -> str:
    """The name of the tree's Fabric."""
    return TRAINERS.get(tree, tree)
