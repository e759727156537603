# The compiled calls: built at first use for the installed jaxlib, registered with XLA, and connected to an engine.
# Touches JAX, farandole.bindings.compiled, native and runtime.
"""Call `prepare()` after init. `ready()` says whether traced functions use the calls, or callbacks."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import jaxlib.version

from ...bindings.compiled import FAILURES, agreed, built
from ...engine.native import NativeEngine
from ...world.runtime import runtime
from ...world.world import World
from ..framework import jax

SOURCE = Path(__file__).with_name("farandole_calls.cc")
TARGET = "farandole_collective"

_loaded: dict[str, Any] = {}  # the library and its path, after registration with XLA
_lent: Any = None  # the world whose engine the calls use


def ready() -> bool:
    """Whether the calls use the engine of the current world."""
    return _lent is not None and runtime.initialized and runtime.world is _lent


def prepare() -> None:
    """After init: builds or finds the calls; all ranks agree whether to use them or callbacks."""
    global _lent
    world = runtime.world
    if _lent is world:
        return
    wanted = world.config.jax_ops
    if wanted == "auto" and world.engine.size == 1 and not world.config.elastic:
        return  # with one rank callbacks are sufficient, and compiling is not needed
    if agreed(world, "jax", wanted, lambda: _load(world)):
        assert isinstance(world.engine, NativeEngine)
        world.engine.lend(_loaded["path"])
        _lent = world


def _load(world: World) -> str:
    """Loads the library. Gives "" or the reason for a failure."""
    if _loaded:
        return ""
    try:
        version = jaxlib.version.__version__
        path = built(world, "jax", version, SOURCE, ["-std=c++17", f"-I{jax.ffi.include_dir()}"], [])
        library = ctypes.CDLL(str(path))
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.farandole_collective), platform="cpu")
        _loaded.update(library=library, path=str(path))
    except FAILURES as error:
        return str(error)
    return ""
