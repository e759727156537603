# The compiled operations: built on first use against the TensorFlow that is installed, kept, loaded, given an engine.
# Touches TensorFlow, a compiler, the user's cache directory, native and runtime.
"""`prepare()` after init; `library()` is TensorFlow's module of operations, or None where callbacks serve."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from ... import native, ops
from ...config import cache_directory
from ...reductions import Min
from ...runtime import World, runtime
from ..framework import tf

SOURCE = Path(__file__).with_name("farandole_ops.cc")
HEADERS = (native.LIBRARY.parent, Path(__file__).resolve().parents[4] / "core" / "api")
COMPILE_S = 600.0

_log = logging.getLogger("farandole")
_loaded: dict[str, Any] = {}  # TensorFlow's module and the path of the library, once loaded
_served: Any = None  # the world whose engine the operations use


def library() -> Any:
    """TensorFlow's module of our operations; None where callbacks serve."""
    return _loaded.get("module") if _served is not None and runtime.initialized and runtime.world is _served else None


def prepare() -> None:
    """After init: builds or finds the operations, and lets all ranks agree on them or on callbacks."""
    world = runtime.world
    if _served is world:
        return
    wanted = world.config.tensorflow_ops
    if wanted == "auto" and world.engine.size == 1 and not world.config.elastic:
        return  # nobody is waited for: callbacks serve as well, and nothing need be compiled
    failure = _load(world) if wanted != "callback" else "FARANDOLE_TENSORFLOW_OPS=callback"
    able = not failure
    # Both ways ask the engine for the same: in an elastic job, where ranks come while others are in the middle of
    # their training, each chooses for itself.
    if world.engine.size > 1 and not world.config.elastic:
        able = bool(ops.allreduce(np.array([able], dtype=np.int32), op=Min, name="tensorflow.ops")[0])
    if failure and wanted == "compiled":
        raise RuntimeError(f"FARANDOLE_TENSORFLOW_OPS=compiled, but TensorFlow's operations are not there: {failure}")
    if able:
        _serve(world)
    elif wanted == "auto":
        _log.info("TensorFlow's graphs use callbacks of Python: %s", failure or "another rank has no operations")


def _serve(world: World) -> None:
    global _served
    assert isinstance(world.engine, native.NativeEngine)
    world.engine.serve(_loaded["path"])
    _served = world


def _load(world: World) -> str:
    """Loads the library; "" or the reason why not."""
    if not isinstance(world.engine, native.NativeEngine):
        return "the engine is the one in Python"
    if _loaded:
        return ""
    try:
        path = _built(cache_directory(world.config))
        _loaded["module"] = tf.load_op_library(str(path))
        _loaded["path"] = str(path)
    except (OSError, RuntimeError, subprocess.SubprocessError, tf.errors.OpError) as error:
        return str(error)
    return ""


def _built(directory: str) -> Path:
    """The library for this TensorFlow; the first process of a host compiles it, and the others wait for it."""
    header = next((place for place in HEADERS if (place / "farandole.h").exists()), None)
    compiler = shutil.which("c++") or shutil.which("g++")
    if header is None:
        raise RuntimeError("farandole.h is not there")
    flags = [*tf.sysconfig.get_compile_flags(), "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w", f"-I{header}"]
    links = [*tf.sysconfig.get_link_flags(), "-ldl"]
    words = [tf.__version__, *flags, *links, SOURCE.read_text(), (header / "farandole.h").read_text()]
    digest = hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
    os.makedirs(directory, mode=0o700, exist_ok=True)
    _refuse_strangers(Path(directory))
    path = Path(directory, f"tensorflow-{tf.__version__}-{digest}.so")
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            if compiler is None:
                raise RuntimeError("there is no C++ compiler (c++ or g++)")
            _compile([compiler, *flags, str(SOURCE)], links, path)
    _refuse_strangers(path)
    return path


def _compile(command: list[str], links: list[str], path: Path) -> None:
    fresh = path.with_suffix(f".{os.getpid()}")
    _log.info("compiling TensorFlow's operations, once for TensorFlow %s", tf.__version__)
    try:
        done = subprocess.run(
            [*command, "-o", str(fresh), *links], capture_output=True, text=True, timeout=COMPILE_S, check=False
        )
        if done.returncode != 0:
            last = [line for line in done.stderr.splitlines() if "error" in line][:1]
            raise RuntimeError(f"the compiler failed: {(last or ['no message'])[0]}")
        fresh.chmod(0o700)
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)


def _refuse_strangers(path: Path) -> None:
    """What another user could have written is not loaded."""
    found = path.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise RuntimeError(f"{path} is not this user's alone")
