# The compiled operations: built at first use for the installed TensorFlow, loaded, and connected to an engine.
# Touches TensorFlow, base.config, bindings.compiled and engine.native.
"""Call `prepare()` after init. `library()` is TensorFlow's module of operations, or None if callbacks are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...base.config import Config
from ...bindings.compiled import Operations, built
from ...engine.native import NativeEngine
from ..framework import tf

SOURCE = Path(__file__).with_name("farandole_ops.cc")

_library: Any = None  # TensorFlow's module, once loaded


def _load(config: Config) -> Path:
    global _library
    flags, links = tf.sysconfig.get_compile_flags(), tf.sysconfig.get_link_flags()
    path = built(config, "tensorflow", tf.__version__, SOURCE, flags, links)
    _library = tf.load_op_library(str(path))
    return path


_operations = Operations("tensorflow", _load, NativeEngine.serve, tf.errors.OpError)
prepare = _operations.prepare


def library() -> Any:
    """TensorFlow's module of our operations; None if callbacks are used."""
    return _library if _operations.ready() else None
