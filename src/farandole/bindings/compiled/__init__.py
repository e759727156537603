# Shared by the compiled operations of frameworks: builds them once per version, ranks agree, errors become text.
# Touches a compiler and the user's cache directory; the rooms base, engine, operations and world.
"""`Operations` loads and connects them, `built(...)` gives a library's path, `error_of(text)` an operation's error."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...base import errors
from ...base.config import Config, cache_directory
from ...engine.library import LIBRARY
from ...engine.native import NativeEngine
from ...operations import ops
from ...operations.reductions import Min
from ...world import basics
from ...world.runtime import runtime
from ...world.world import World

HERE = Path(__file__).resolve().parent
HEADERS = (LIBRARY.parent, HERE.parents[3] / "core" / "api")
COMPILE_S = 600.0
FAILURES = (OSError, RuntimeError, subprocess.SubprocessError)  # what can be raised while a library is built or loaded

_answers: weakref.WeakKeyDictionary[World, dict[str, bool]] = weakref.WeakKeyDictionary()  # for each framework
_log = logging.getLogger("farandole")


def agreed(world: World, framework: str, wanted: str, load: Callable[[], str]) -> bool:
    """Whether compiled operations are used; `load` gives "" or the reason why this rank cannot use them.

    `wanted` is the setting: auto, compiled or callback. All ranks choose the same way. In an elastic job, where ranks
    join while others train, each rank uses what is possible for it; both ways send the engine the same requests.
    """
    known = _answers.setdefault(world, {})
    if framework in known:
        return known[framework]  # other ranks may not take part in another exchange
    variable = f"FARANDOLE_{framework.upper()}_OPS"
    if wanted == "callback":
        failure = f"{variable}=callback"
    elif not isinstance(world.engine, NativeEngine):
        failure = "the engine is the one in Python"
    else:
        failure = load()
    able = not failure
    if world.engine.size > 1 and not world.config.elastic:
        able = bool(ops.allreduce(np.array([able], dtype=np.int32), op=Min, name=f"{framework}.ops")[0])
    known[framework] = able
    reason = failure or "another rank has none"
    if not able and wanted == "compiled":
        raise RuntimeError(f"{variable}=compiled, but the compiled operations cannot be used: {reason}")
    if not able and wanted == "auto":
        _log.info("%s uses callbacks of Python instead of compiled operations: %s", framework, reason)
    return able


class Operations:
    """The compiled operations of one framework: loaded once in a process, and connected to the engine of one world."""

    def __init__(
        self,
        framework: str,
        load: Callable[[Config], Path],
        connect: Callable[[NativeEngine, str], None],
        *more: type[Exception],
    ) -> None:
        """`load` gives the library's path. `more`: what it raises besides FAILURES."""
        self._framework = framework
        self._load = load
        self._connect = connect
        self._failures: tuple[type[Exception], ...] = (*FAILURES, *more)
        self._path = ""
        self._world: World | None = None

    def ready(self) -> bool:
        """Whether the operations use the engine of the current world."""
        return self._world is not None and runtime.initialized and runtime.world is self._world

    def prepare(self) -> None:
        """After init: builds or finds the operations; all ranks agree whether to use them or callbacks."""
        wanted = getattr(runtime.config, f"{self._framework}_ops")
        if runtime.waiting:
            if wanted != "callback":
                self._failure(runtime.config)  # compiles before the others wait for this rank
            return
        world = runtime.world
        if self._world is world:
            return
        if wanted == "auto" and world.engine.size == 1 and not world.config.elastic:
            return  # with one rank callbacks are sufficient, and compiling is not needed
        if agreed(world, self._framework, wanted, lambda: self._failure(world.config)):
            assert isinstance(world.engine, NativeEngine)
            self._connect(world.engine, self._path)
            self._world = world

    def _failure(self, config: Config) -> str:
        """Loads the library. Gives "" or the reason for a failure."""
        if not self._path:
            try:
                self._path = str(self._load(config))
            except self._failures as error:
                return str(error)
        return ""


def join(prepare: Callable[[], object], comm: Any, process_sets: Any) -> None:
    """Joins the job. If `prepare`, which makes the operations ready, fails, leaves the job again."""
    basics.init(comm, process_sets)
    try:
        prepare()
    except BaseException:
        basics.shutdown()
        raise


def built(
    config: Config, framework: str, version: str, source: Path, flags: Sequence[str], links: Sequence[str]
) -> Path:
    """The library for this version. The first process of a host compiles it; the others wait for it."""
    header = next((folder for folder in HEADERS if (folder / "farandole.h").exists()), None)
    if header is None:
        raise RuntimeError("farandole.h is missing")
    directory = cache_directory(config)
    number = f"-DFARANDOLE_INTERFACE=0x{_interface(header / 'farandole.h')}"
    options = [number, *flags, "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w", f"-I{header}", f"-I{HERE}"]
    texts = [path.read_text() for path in (source, header / "farandole.h", HERE / "farandole_words.h")]
    digest = hashlib.sha256("\0".join([platform.machine(), version, *options, *links, *texts]).encode()).hexdigest()[
        :16
    ]
    path = Path(directory, f"{framework}-{version}-{digest}.so")
    if not path.exists():  # nothing is written if it exists, because the directory may be read-only
        os.makedirs(directory, mode=0o700, exist_ok=True)
        _refuse_strangers(path.parent)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                compiler = shutil.which("c++") or shutil.which("g++")
                if compiler is None:
                    raise RuntimeError("there is no C++ compiler (c++ or g++)")
                _log.info("compiling the operations of %s, once for version %s", framework, version)
                _compile([compiler, *options, str(source)], links, path)
    _refuse_strangers(path.parent)
    _refuse_strangers(path)
    return path


def _interface(header: Path) -> str:
    """The number of the C interface, computed as in CMakeLists.txt."""
    return hashlib.sha256(hashlib.sha256(header.read_bytes()).hexdigest().encode()).hexdigest()[:16]


def _compile(command: list[str], links: Sequence[str], path: Path) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        done = subprocess.run(
            [*command, "-o", str(temporary), *links], capture_output=True, text=True, timeout=COMPILE_S, check=False
        )
        if done.returncode != 0:
            last = [line for line in done.stderr.splitlines() if "error" in line][:1]
            raise RuntimeError(f"the compiler failed: {(last or ['no message'])[0]}")
        temporary.chmod(0o700)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def _refuse_strangers(path: Path) -> None:
    """RuntimeError for files that another user could have written. The files of a container image belong to root."""
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()) or stat.S_IMODE(found.st_mode) & 0o022:
        raise RuntimeError(f"{path} can be written by others than this user and root")


# Frameworks change the class of errors but keep the text (of farandole_words.h, or of Python in a callback's
# traceback).
_KINDS = (
    errors.PeerLost,
    errors.Revoked,
    errors.ShutDown,
    errors.Mismatch,
    errors.NoRows,
    errors.FarandoleTimeout,
    errors.NotInitialized,
    errors.HorovodInternalError,
    ValueError,
    TypeError,
)
_BY_NAME: dict[str, type[Exception]] = {kind.__name__: kind for kind in _KINDS}
_WORDS = re.compile(rf"(?:^|[\s.])({'|'.join(_BY_NAME)}): (.*)$", re.MULTILINE)


def error_of(text: str) -> Exception | None:
    """The error of our operation that a framework reports with this text; None if the error has another source."""
    found = _WORDS.search(text)
    if found is None:
        return None
    kind, message = _BY_NAME[found[1]], found[2]
    return errors.NotInitialized() if kind is errors.NotInitialized else kind(message)
