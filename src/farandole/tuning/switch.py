# Switching the values that are tuned, on all ranks at once, by a request of rank 0.
# Touches engine, errors, search.
"""What the tuners ask of the engine."""

from __future__ import annotations

from collections.abc import Callable

from ..engine import Engine, Kind, Request
from ..errors import FarandoleTimeout
from .search import Values

LOOK_S = 0.25  # so often somebody who waits for a switch asks whether he still should


class Stopped(Exception):
    """The job is being left."""


def switch(engine: Engine, values: Values, measuring: bool, stopped: Callable[[], bool] = lambda: False) -> None:
    """On rank 0: everybody works with `values` from the same collective on; `measuring` counts steps from there."""
    [handle] = engine.submit([Request(Kind.TUNE, splits=[*values.numbers(), int(measuring)])])
    while True:
        try:
            engine.wait(handle, LOOK_S)
            return
        except FarandoleTimeout:
            if stopped():
                raise Stopped from None
