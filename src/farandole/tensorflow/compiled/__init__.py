# The compiled operations: built at first use for the installed TensorFlow, loaded, and connected to an engine.
# Touches TensorFlow, farandole.bindings.compiled, native and runtime.
"""Call `prepare()` after init. `library()` is TensorFlow's module of operations, or None if callbacks are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...bindings.compiled import FAILURES, agreed, built
from ...engine.native import NativeEngine
from ...world.runtime import runtime
from ...world.world import World
from ..framework import tf

SOURCE = Path(__file__).with_name("farandole_ops.cc")

_loaded: dict[str, Any] = {}  # TensorFlow's module and the path of the library, once loaded
_served: Any = None  # the world whose engine the operations use


def library() -> Any:
    """TensorFlow's module of our operations; None if callbacks are used."""
    return _loaded.get("module") if _served is not None and runtime.initialized and runtime.world is _served else None


def prepare() -> None:
    """After init: builds or finds the operations; all ranks agree whether to use them or callbacks."""
    world = runtime.world
    if _served is world:
        return
    wanted = world.config.tensorflow_ops
    if wanted == "auto" and world.engine.size == 1 and not world.config.elastic:
        return  # with one rank callbacks are sufficient, and compiling is not needed
    if agreed(world, "tensorflow", wanted, lambda: _load(world)):
        _serve(world)


def _serve(world: World) -> None:
    global _served
    assert isinstance(world.engine, NativeEngine)
    world.engine.serve(_loaded["path"])
    _served = world


def _load(world: World) -> str:
    """Loads the library. Gives "" or the reason for a failure."""
    if _loaded:
        return ""
    try:
        flags, links = tf.sysconfig.get_compile_flags(), tf.sysconfig.get_link_flags()
        path = built(world, "tensorflow", tf.__version__, SOURCE, flags, links)
        _loaded["module"] = tf.load_op_library(str(path))
        _loaded["path"] = str(path)
    except (*FAILURES, tf.errors.OpError) as error:
        return str(error)
    return ""
