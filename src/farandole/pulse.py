# Signs of life of an elastic job's rank: the native thread (core/api/farandole.h) that shows and looks for them.
# Touches errors, library, native, packing.
"""Starts and ends the thread, and puts an engine under its guard."""

from __future__ import annotations

import ctypes
import os

from . import errors
from .library import load
from .native import NativeEngine
from .packing import ERROR_BYTES


class Pulse:
    """A native thread that shows signs of life in one memory file, and looks for the agent's in another."""

    def __init__(self, mine: int, theirs: int | None, beat_ms: int, library: str | None = None) -> None:
        self._library = load(library)
        self._pointer = ctypes.c_void_p()
        self._pid = os.getpid()
        error = ctypes.create_string_buffer(ERROR_BYTES)
        others = os.dup(theirs) if theirs is not None else -1
        code = self._library.farandole_pulse_start(
            os.dup(mine), others, beat_ms, ctypes.byref(self._pointer), error, len(error)
        )
        if code:
            raise errors.translate(code, error.value.decode(errors="replace"))

    def guard(self, engine: object, lease_ms: int = 0) -> None:
        """Revokes all in `engine` when the agent has been silent for so long; None before the engine is closed."""
        if self._pointer and self._pid == os.getpid():
            pointer = engine.pointer if isinstance(engine, NativeEngine) else None
            self._library.farandole_pulse_guard(self._pointer, pointer, lease_ms)

    @property
    def silence(self) -> float:
        """Seconds for which the agent has been silent."""
        return int(self._library.farandole_pulse_silence(self._pointer)) / 1000

    def stop(self) -> None:
        """Ends the thread; calling it again does nothing, nor does calling it in a forked child."""
        pointer, self._pointer = self._pointer, ctypes.c_void_p()
        if pointer and self._pid == os.getpid():
            self._library.farandole_pulse_stop(pointer)
