# Switching the values that are tuned, on all ranks at once, by a request of rank 0.
# Touches the rooms base and engine; the file search.
"""How the tuners change values in the engine."""

from __future__ import annotations

from collections.abc import Callable

from ...base.errors import FarandoleTimeout
from ...engine.interface import Engine, Kind, Request
from .search import Values

POLL_S = 0.25  # interval at which a waiting tuner checks whether it was stopped


class Stopped(Exception):
    """This process is leaving the job."""


def switch(engine: Engine, values: Values, measuring: bool, stopped: Callable[[], bool] = lambda: False) -> None:
    """On rank 0: all ranks use `values` from the same collective on; with `measuring` they count steps from there."""
    [handle] = engine.submit([Request(Kind.TUNE, splits=[*values.numbers(), int(measuring)])])
    while True:
        try:
            engine.wait(handle, POLL_S)
            return
        except FarandoleTimeout:
            if stopped():
                raise Stopped from None
