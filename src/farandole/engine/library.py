# Opens the core: the extension module (core/python/) and the native library of the same build.
# Touches base, interface and the extension.
"""`load()` returns the core, or raises an error that says why it cannot be used and what to do."""

from __future__ import annotations

import functools
from enum import IntEnum
from pathlib import Path

from ..base import errors
from ..base.config import ALGORITHMS
from ..base.version import package_version
from .interface import STORAGE, DType, Kind, ReduceOp

LIBRARY = Path(__file__).with_name("_native") / "libfarandole.so"
_FALLBACK = "FARANDOLE_ENGINE=python selects the slow engine that needs no library."


def _numbers() -> dict[str, dict[str, int]]:
    """Python's copies of the numbers of the C interface (core/api/farandole.h)."""
    names = ("OK", "IN_PROGRESS", "INVALID_ARGUMENT", "PRECONDITION", "ABORTED", "SHUT_DOWN", "PEER_LOST", "REVOKED")
    codes = {name: int(getattr(errors, name)) for name in (*names, "TIMED_OUT", "NO_MEMORY", "INTERNAL")}
    enums: tuple[type[IntEnum], ...] = (Kind, DType, ReduceOp)
    return {
        **{kind.__name__: {one.name: one.value for one in kind} for kind in enums},
        "Code": codes,
        "Algorithm": {name.upper(): number for number, name in enumerate(ALGORITHMS)},
        "bytes": {dtype.name: STORAGE[dtype].itemsize for dtype in DType},
    }


def check_numbers(compiled: dict[str, dict[str, int]]) -> None:
    """Raises ImportError if the enum values or error codes in the extension differ from those in the package; the text
    names them.
    """
    expected = _numbers()
    differ = [
        f"{table}.{name} is {expected.get(table, {}).get(name)} in the Python package and "
        f"{compiled.get(table, {}).get(name)} in the extension"
        for table in sorted({*expected, *compiled})
        for name in sorted({*expected.get(table, {}), *compiled.get(table, {})})
        if expected.get(table, {}).get(name) != compiled.get(table, {}).get(name)
    ]
    if differ:
        raise ImportError(
            f"it is from a different build than the Python package: {'; '.join(differ[:3])}. Install farandole again"
        )


try:
    from . import bridge

    check_numbers(getattr(bridge, "NUMBERS", {}))
    IMPORT_FAILURE: ImportError | None = None
except ImportError as error:  # reported when an engine is needed; the engine in Python needs no extension
    IMPORT_FAILURE = error


@functools.cache
def load(path: str | None = None) -> bridge.Library:
    """Opens the native library. LibraryMissing says what to do if there is none or if it is from another build."""
    library_path = Path(path) if path else LIBRARY
    build = "In a checkout, build it with `cmake -B build -S . && cmake --build build -j`."
    if not library_path.exists():
        raise errors.LibraryMissing(f"the native library {library_path} does not exist. {build} {_FALLBACK}")
    if IMPORT_FAILURE is not None:
        raise errors.LibraryMissing(f"the extension module cannot be used: {IMPORT_FAILURE}. {build} {_FALLBACK}")
    try:
        library = bridge.Library(str(library_path))
    except ImportError as error:
        raise errors.LibraryMissing(
            f"the native library {library_path} cannot be used: {error}. Install farandole again. {build} {_FALLBACK}"
        ) from None
    found, expected = library.version, package_version()
    if found != expected:
        raise errors.LibraryMissing(
            f"the native library {library_path} is version {found}, the package is {expected}: rebuild it. {_FALLBACK}"
        )
    return library


def start_heartbeat(own_fd: int, agent_fd: int | None, beat_ms: int, library: str | None = None) -> bridge.Heartbeat:
    """Starts a native thread that writes heartbeats into the memory file `own_fd`, and watches those of the agent in
    `agent_fd`; with None it watches none.
    """
    no_agent = -1
    core = load(library)  # first: without an extension there is no name `bridge`
    return bridge.Heartbeat(core, own_fd, no_agent if agent_fd is None else agent_fd, beat_ms)
