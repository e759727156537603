# The native library: where it lies, what its functions take (core/api/farandole.h), its arithmetic alone.
# Touches engine, errors, packing, version.
"""Loads the native library and declares its functions; adds with its kernels, for measurements."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from . import errors
from .engine import Array, DType
from .packing import INT, LONG, POINTER, TEXT
from .version import package_version

ABI = 1
LIBRARY = Path(__file__).with_name("_native") / "libfarandole.so"

_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "farandole_version": (TEXT, ()),
    "farandole_kernels": (TEXT, ()),
    "farandole_add": (INT, (INT, POINTER, POINTER, POINTER, LONG)),
    "farandole_create": (INT, (POINTER, POINTER, POINTER, ctypes.c_size_t)),
    "farandole_add_link": (INT, (POINTER, INT, INT, INT)),
    "farandole_start": (INT, (POINTER, LONG, POINTER, ctypes.c_size_t)),
    "farandole_leave": (INT, (POINTER, LONG)),
    "farandole_revoke": (INT, (POINTER, INT, INT, TEXT)),
    "farandole_destroy": (None, (POINTER,)),
    "farandole_submit": (INT, (POINTER, POINTER, INT, INT, POINTER, POINTER, ctypes.c_size_t)),
    "farandole_run": (INT, (POINTER,)),
    "farandole_poll": (INT, (POINTER, LONG)),
    "farandole_wait": (INT, (POINTER, LONG, LONG)),
    "farandole_wait_aside": (INT, (POINTER, LONG, LONG)),
    "farandole_settle": (None, (POINTER, ctypes.c_size_t)),
    "farandole_share": (ctypes.c_uint64, (POINTER, INT, POINTER, ctypes.c_size_t)),
    "farandole_unshare": (None, (POINTER, ctypes.c_uint64)),
    "farandole_next_completion": (LONG, (POINTER, LONG)),
    "farandole_outcome_of": (INT, (POINTER, LONG, POINTER)),
    "farandole_release": (None, (POINTER, LONG)),
    "farandole_next_event": (INT, (POINTER, POINTER, LONG)),
    "farandole_counter": (LONG, (POINTER, INT)),
    "farandole_tuning": (INT, (POINTER, POINTER)),
    "farandole_trace": (INT, (POINTER, INT, INT)),
    "farandole_trace_drain": (LONG, (POINTER, POINTER, LONG)),
    "farandole_pulse_start": (INT, (INT, INT, LONG, POINTER, POINTER, ctypes.c_size_t)),
    "farandole_pulse_guard": (None, (POINTER, POINTER, LONG)),
    "farandole_pulse_silence": (LONG, (POINTER,)),
    "farandole_pulse_stop": (None, (POINTER,)),
    # In the test library alone:
    "farandole_chaos_set": (INT, (POINTER, TEXT, TEXT, INT)),
    "farandole_chaos_fired": (LONG, (POINTER, TEXT)),
}

# A library may lack them: the chaos functions are in the test library alone, the other is for measurements.
_OPTIONAL = {"farandole_chaos_set", "farandole_chaos_fired", "farandole_add"}


@functools.cache
def load(path: str | None = None) -> ctypes.CDLL:
    """The native library, checked against this package; LibraryMissing says how to get it."""
    place = Path(path) if path else LIBRARY
    fallback = "FARANDOLE_ENGINE=python selects the slow engine that needs no library."
    if not place.exists():
        raise errors.LibraryMissing(
            f"the native library {place} does not exist. In a checkout, build it with "
            f"`cmake -B build -S . && cmake --build build -j`. {fallback}"
        )
    try:
        library = ctypes.CDLL(str(place))
        for name, (result, arguments) in _SIGNATURES.items():
            if name not in _OPTIONAL or hasattr(library, name):
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise errors.LibraryMissing(f"the native library {place} cannot be used: {error}. {fallback}") from None
    found, expected = library.farandole_version().decode(), package_version()
    if found != expected:
        raise errors.LibraryMissing(
            f"the native library {place} is version {found}, the package is {expected}: rebuild it. {fallback}"
        )
    return library


def can_add() -> bool:
    """Whether the library lets its arithmetic be measured."""
    return hasattr(load(), "farandole_add")


def add(dtype: DType, left: Array, right: Array, out: Array) -> None:
    """out = left + right by the core's kernel alone, on this thread; contiguous arrays with the bits of `dtype`."""
    pointers = [array.ctypes.data for array in (left, right, out)]
    if load().farandole_add(int(dtype), *pointers, left.size) != 0:
        raise ValueError(f"the kernel knows no {dtype!r}")


def calls(path: str) -> Any:
    """A library of a framework's calls, for `lend`."""
    return ctypes.CDLL(path)
