# Opens the core: the extension module (core/python/) and the native library of the same build.
# Touches config, errors, interface, version and the extension.
"""`load()` gives the core, or says why it cannot be used and what to do."""

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


def check_numbers(theirs: dict[str, dict[str, int]]) -> None:
    """ImportError when the extension was compiled for other numbers than the package has; it says which."""
    ours = _numbers()
    differ = [
        f"{table}.{name} is {ours.get(table, {}).get(name)} here and {theirs.get(table, {}).get(name)} there"
        for table in sorted({*ours, *theirs})
        for name in sorted({*ours.get(table, {}), *theirs.get(table, {})})
        if ours.get(table, {}).get(name) != theirs.get(table, {}).get(name)
    ]
    if differ:
        raise ImportError(f"it has another build than the package: {'; '.join(differ[:3])}. Install farandole again")


try:
    from . import bridge

    check_numbers(getattr(bridge, "NUMBERS", {}))
    MISSING: ImportError | None = None
except ImportError as error:  # reported when an engine is needed; the engine in Python needs no extension
    MISSING = error


@functools.cache
def load(path: str | None = None) -> bridge.Library:
    """The core in the native library, of the build of this package; LibraryMissing says how to get it."""
    place = Path(path) if path else LIBRARY
    build = "In a checkout, build it with `cmake -B build -S . && cmake --build build -j`."
    if not place.exists():
        raise errors.LibraryMissing(f"the native library {place} does not exist. {build} {_FALLBACK}")
    if MISSING is not None:
        raise errors.LibraryMissing(f"the extension module cannot be used: {MISSING}. {build} {_FALLBACK}")
    try:
        library = bridge.Library(str(place))
    except ImportError as error:
        raise errors.LibraryMissing(
            f"the native library {place} cannot be used: {error}. Install farandole again. {build} {_FALLBACK}"
        ) from None
    found, expected = library.version, package_version()
    if found != expected:
        raise errors.LibraryMissing(
            f"the native library {place} is version {found}, the package is {expected}: rebuild it. {_FALLBACK}"
        )
    return library


def start_heartbeat(mine: int, theirs: int | None, beat_ms: int, library: str | None = None) -> bridge.Heartbeat:
    """Starts a native thread that writes heartbeats into one memory file and watches the agent's in another."""
    return bridge.Heartbeat(load(library), mine, -1 if theirs is None else theirs, beat_ms)
