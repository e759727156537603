# The compiled calls: built at first use for the installed jaxlib, registered with XLA, and connected to an engine.
# Touches JAX, base.config, bindings.compiled and engine.native.
"""Call `prepare()` after init. `ready()` says whether traced functions use the calls, or callbacks."""

from __future__ import annotations

import ctypes
from pathlib import Path

import jaxlib.version

from ...base.config import Config
from ...bindings.compiled import Operations, built
from ...engine.native import NativeEngine
from ..framework import jax

SOURCE = Path(__file__).with_name("farandole_calls.cc")
TARGET = "farandole_collective"


def _load(config: Config) -> Path:
    version = jaxlib.version.__version__
    path = built(config, "jax", version, SOURCE, ["-std=c++17", f"-I{jax.ffi.include_dir()}"], [])
    function = ctypes.CDLL(str(path)).farandole_collective
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(function), platform="cpu")
    return path


_operations = Operations("jax", _load, NativeEngine.lend)
prepare = _operations.prepare
ready = _operations.ready
