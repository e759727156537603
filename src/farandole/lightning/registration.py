# Lets Lightning know our strategies by their names, as soon as a script imports Lightning itself.
# Touches the import system, for four modules of Lightning, and their registries. Imports neither Lightning nor torch.
"""`watch()` is called when torch is imported (see autoload.py): it waits, and never raises."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

# The module that makes a registry, its name there, and the kind of strategy that it holds.
REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "FarandoleStrategy"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "FarandoleStrategy"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "FabricStrategy"),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "FabricStrategy"),
}
NAMES = ("farandole", "horovod")


def watch() -> None:
    """Registers where Lightning is imported already, and else when it will be; again is once."""
    for name in REGISTRIES:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, REGISTRIES[name][0]):
            _register(module)
    if not any(isinstance(finder, Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, Watcher())


class Watcher(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: it lets the others find Lightning's module, and registers when that has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the next finders give, with one call after the module's own code."""
        if fullname not in REGISTRIES:
            return None
        try:
            spec = _found(fullname, path, target)
        except Exception:
            return None  # another finder's trouble: the import system asks it again, and says so
        if spec is not None:
            try:
                _then_register(spec.loader)
            except Exception as error:  # a loader that lets nobody in
                _warn(fullname, error)
        return spec


def _found(name: str, path: Sequence[str] | None, target: ModuleType | None) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        if isinstance(finder, Watcher) or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(name, path, target)
        if spec is not None:
            return spec
    return None


def _then_register(loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        if module.__name__ in REGISTRIES:  # some loaders load many modules
            _register(module)

    loader.exec_module = exec_module


def _register(module: ModuleType) -> None:
    attribute, kind = REGISTRIES[module.__name__]
    try:
        registry = getattr(module, attribute)
        for name in NAMES:
            if name not in registry:  # somebody else's stays
                make = functools.partial(_make, module.__name__.rpartition(".")[0], kind)
                registry.register(name, make, description="Gradients of all ranks, averaged by Farandole")
    except Exception as error:
        _warn(module.__name__, error)


def _warn(name: str, error: Exception) -> None:
    """An import of Lightning must not fail because of us."""
    warnings.warn(f'strategy="farandole" is not available in {name}: {error}', stacklevel=3)


def _make(tree: str, kind: str, **options: Any) -> Any:
    from . import trees

    return trees.build(tree, kind)(**options)
