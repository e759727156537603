# Lets Lightning know our strategies by their names, as soon as a script imports Lightning itself.
# Touches the import system, for eight modules of Lightning, and private. Imports neither Lightning nor torch.
"""`watch()` is called when Lightning's first module is imported (see autoload.py): it waits, and never raises."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ..autoload import Awaiting
from ..private.lightning_names import CONNECTORS, answer_environment

# The module that makes a registry, its name there, and the kind of strategy that it holds.
REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "FarandoleStrategy"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "FarandoleStrategy"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "FabricStrategy"),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "FabricStrategy"),
}
NAMES = ("farandole", "horovod")


def take_over(name: str, *more: Any) -> importlib.machinery.ModuleSpec | None:
    """For autoload.py, which has waited for Lightning's first module."""
    watch()
    return _watcher.find_spec(name, *more)


def watch() -> None:
    """Registers where Lightning is imported already, and else when it will be; again is once."""
    made = {**{name: registry for name, (registry, _) in REGISTRIES.items()}, **CONNECTORS}
    for name, attribute in made.items():
        module = sys.modules.get(name)
        if module is not None and hasattr(module, attribute):
            _take_part(module)
    if _watcher not in sys.meta_path:
        if Awaiting in sys.meta_path:  # in its place: the import system is going through the list
            sys.meta_path[sys.meta_path.index(Awaiting)] = _watcher
        else:
            sys.meta_path.insert(0, _watcher)


class Watcher(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: it lets the others find Lightning's module, and takes part when that has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the next finders give, with one call after the module's own code."""
        if fullname not in REGISTRIES and fullname not in CONNECTORS:
            return None
        try:
            spec = _found(fullname, path, target)
        except Exception:
            return None  # another finder's trouble: the import system asks it again, and says so
        if spec is not None:
            try:
                _then_take_part(spec.loader)
            except Exception as error:  # a loader that lets nobody in
                _warn(fullname, error)
        return spec


_watcher = Watcher()


def _found(name: str, path: Sequence[str] | None, target: ModuleType | None) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        if isinstance(finder, Watcher) or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(name, path, target)
        if spec is not None:
            return spec
    return None


def _then_take_part(loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _take_part(module)

    loader.exec_module = exec_module


def _take_part(module: ModuleType) -> None:
    name = module.__name__
    try:
        if name in REGISTRIES:  # some loaders load many modules
            _register(module, name.rpartition(".")[0], *REGISTRIES[name])
        elif name in CONNECTORS:
            tree = name.partition(".trainer")[0].removesuffix(".connector")
            answer_environment(module, functools.partial(_answer, tree))
    except Exception as error:
        _warn(name, error)


def _register(module: ModuleType, tree: str, attribute: str, kind: str) -> None:
    registry = getattr(module, attribute)
    for name in NAMES:
        if name not in registry:  # somebody else's stays
            make = functools.partial(_make, tree, kind)
            registry.register(name, make, description="Gradients of all ranks, averaged by Farandole")


def _answer(tree: str, strategy: Any) -> Any:
    """For a strategy of ours that is given by its name ranks are as we know them, as if it were given as an object."""
    if not _is_ours(tree, strategy):
        return None
    from . import trees

    return trees.build(trees.fabric_of(tree), "FarandoleEnvironment")()


def _is_ours(tree: str, name: Any) -> bool:
    module = f"{tree}.strategies"
    known = getattr(sys.modules.get(module), REGISTRIES[module][0], {})
    make = known[name]["strategy"] if isinstance(name, str) and name in known else None
    return isinstance(make, functools.partial) and make.func is _make


def _warn(name: str, error: Exception) -> None:
    """An import of Lightning must not fail because of us."""
    warnings.warn(f'strategy="farandole" is not available in {name}: {error}', stacklevel=3)


def _make(tree: str, kind: str, **options: Any) -> Any:
    from . import trees

    return trees.build(tree, kind)(**options)
