# Registers our strategies with Lightning by name, as soon as a script imports Lightning.
# Touches the import system and private names of Lightning. Imports neither Lightning nor torch.
"""`watch()` is called when Lightning's first module is imported (see autoload.py). It never raises an error."""

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
from ..bindings.private.lightning_names import CONNECTORS, answer_environment
from .packages import fabric_of

# The class for each strategy name. Horovod's strategy for the Trainer multiplies learning rates, as it always did.
OF_TRAINER = {"farandole": "FarandoleStrategy", "horovod": "HorovodStrategy"}
OF_FABRIC = {"farandole": "FabricStrategy", "horovod": "FabricStrategy"}
# (module that makes a registry) -> (name of the registry in it, our strategies).
REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", OF_TRAINER),
    "pytorch_lightning.strategies": ("StrategyRegistry", OF_TRAINER),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", OF_FABRIC),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", OF_FABRIC),
}


def take_over(name: str, *more: Any) -> importlib.machinery.ModuleSpec | None:
    """Called by autoload.py at the import of Lightning's first module."""
    watch()
    return _watcher.find_spec(name, *more)


def watch() -> None:
    """Registers now if Lightning is imported already, else at its import. A second call does nothing."""
    made = {**{name: registry for name, (registry, _) in REGISTRIES.items()}, **CONNECTORS}
    for name, attribute in made.items():
        module = sys.modules.get(name)
        if module is not None and hasattr(module, attribute):
            _take_part(module)
    if _watcher not in sys.meta_path:
        if Awaiting in sys.meta_path:  # at the same index, because the import system iterates over this list now
            sys.meta_path[sys.meta_path.index(Awaiting)] = _watcher
        else:
            sys.meta_path.insert(0, _watcher)


class ImportHook(importlib.abc.MetaPathFinder):
    """Finds no modules. Other finders find Lightning's modules; it adds a call after the module's own code."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec from the other finders, with our call after the module's own code."""
        if fullname not in REGISTRIES and fullname not in CONNECTORS:
            return None
        try:
            spec = _found(fullname, path, target)
        except Exception:
            return None  # the import system asks the other finder again, and reports its error
        if spec is not None:
            try:
                _then_take_part(spec.loader)
            except Exception as error:  # a loader that cannot be changed
                _warn(fullname, error)
        return spec


_watcher = ImportHook()


def _found(name: str, path: Sequence[str] | None, target: ModuleType | None) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        if isinstance(finder, ImportHook) or not hasattr(finder, "find_spec"):
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
        if name in REGISTRIES:  # one loader may load several modules
            _register(module, name.rpartition(".")[0], *REGISTRIES[name])
        elif name in CONNECTORS:
            tree = name.partition(".trainer")[0].removesuffix(".connector")
            answer_environment(module, functools.partial(_answer, tree))
    except Exception as error:
        _warn(name, error)


def _register(module: ModuleType, tree: str, attribute: str, kinds: dict[str, str]) -> None:
    registry = getattr(module, attribute)
    for name, kind in kinds.items():
        if name not in registry:  # a strategy of another package is not replaced
            make = functools.partial(_make, tree, kind)
            registry.register(name, make, description="Gradients of all ranks, averaged by Farandole")


def _answer(tree: str, strategy: Any) -> Any:
    """Our environment, if the strategy is one of ours and is given by name. Strategy objects bring it themselves."""
    if not _is_ours(tree, strategy):
        return None
    from . import trees

    return trees.build(fabric_of(tree), "FarandoleEnvironment")()


def _is_ours(tree: str, name: Any) -> bool:
    module = f"{tree}.strategies"
    known = getattr(sys.modules.get(module), REGISTRIES[module][0], {})
    make = known[name]["strategy"] if isinstance(name, str) and name in known else None
    return isinstance(make, functools.partial) and make.func is _make


def _warn(name: str, error: Exception) -> None:
    """Warns, because an error of ours must not make the import of Lightning fail."""
    warnings.warn(f'strategy="farandole" is not available in {name}: {error}', stacklevel=3)


def _make(tree: str, kind: str, **options: Any) -> Any:
    from . import trees

    return trees.build(tree, kind)(**options)
