# Between the operations and the engine: requests to results, handles, names, the choice of op and group.
# Touches the rooms base, engine and world; the file arrays.
"""What all operations have in common; requests.py has the operations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from ..base import errors
from ..engine.interface import Kind, Memory, Outcome, ReduceOp, Request
from ..world.runtime import runtime
from ..world.world import Pending, World
from .arrays import Buffer

NO_SCALES = (1.0, 1.0)
FEW_NUMBERS = 64


class Submission:
    """Requests before they are submitted: the caller waits for them at once, or gets a handle."""

    __slots__ = ("bundle", "finish", "pending", "requests", "world")

    def __init__(
        self, world: World, requests: list[Request], finish: Callable[[list[Outcome]], Any], bundle: bool = False
    ) -> None:
        self.world = world
        self.requests = requests
        self.finish = finish
        self.bundle = bundle
        self.pending: Pending | None = None
        if not world.exchanged:
            world.exchanged = any(map(_large, requests))

    def submit(self) -> list[int]:
        """Submits the requests, so that `result` only waits; returns the engine's handles."""
        handles = self.world.engine.submit(self.requests, self.bundle)
        self.pending = Pending(handles, self.finish)
        return handles

    def result(self) -> Any:
        """Submits the requests if needed, waits, and returns the result."""
        if self.pending is not None:
            return _finish(self.world, self.pending, None)
        if len(self.requests) == 1 and not self.bundle:
            return self.finish([self.world.engine.run(self.requests[0])])
        handles = self.world.engine.submit(self.requests, self.bundle, prompt=True)
        return _finish(self.world, Pending(handles, self.finish), None)

    def handle(self) -> int:
        """Submits the requests and returns a handle for the user."""
        return self.world.add_handle(Pending(self.world.engine.submit(self.requests, self.bundle), self.finish))


def _large(request: Request) -> bool:
    """Whether it exchanges more than a few numbers, such as the averages of metrics; a broadcast does not count."""
    return request.kind != Kind.BROADCAST and request.input is not None and math.prod(request.input.shape) > FEW_NUMBERS


def _finish(world: World, pending: Pending, timeout: float | None) -> Any:
    """Waits for every part, even after a failure, so that none stays pending; raises the first error.

    Every thread that waits for the handle gets the result.
    """
    if not pending.lock.acquire(timeout=-1 if timeout is None else timeout):
        raise errors.FarandoleTimeout(f"the operation did not finish within {timeout:g} s", seconds=timeout)
    try:
        while len(pending.outcomes) < len(pending.handles):
            try:
                outcome = world.engine.wait(pending.handles[len(pending.outcomes)], timeout)
            except errors.FarandoleTimeout as error:
                if error.seconds is not None:
                    raise  # the caller's own deadline: the operation is still pending
                pending.failure, outcome = pending.failure or error, Outcome()
            except Exception as error:
                pending.failure, outcome = pending.failure or error, Outcome()
            pending.outcomes.append(outcome)
        if pending.failure is not None:
            raise pending.failure
        return pending.finish(pending.outcomes)
    finally:
        pending.lock.release()


def poll(handle: int) -> bool:
    """Whether the operation is done; ValueError for an unknown handle."""
    world = runtime.world
    pending = world.handles.get(handle)
    if pending is None:
        raise ValueError(f"Handle {handle!r} was not created or has been cleared. No operation has it")
    return pending.submitted() and all(world.engine.poll(part) for part in pending.handles[len(pending.outcomes) :])


def synchronize(handle: int, timeout: float | None = None) -> Any:
    """Waits for an `_async` operation and returns its result; None for an unknown handle, as in Horovod.

    Raises FarandoleTimeout after `timeout` seconds; the handle stays valid.
    """
    world = runtime.world
    pending = world.handles.get(handle)
    if pending is None:
        return None
    try:
        return _finish(world, pending, timeout)
    finally:
        # After a timeout or Ctrl-C some parts are pending, and the caller can wait again.
        if len(pending.outcomes) == len(pending.handles):
            world.handles.pop(handle, None)


def names_of(operation: str, name: str | None, count: int | None = None) -> list[str | None]:
    """Horovod's names: of one tensor when `count` is None, otherwise of the tensors of a group."""
    if name is not None:
        if not isinstance(name, str):
            raise TypeError(f"name={name!r} is a {type(name).__name__}; a name is a string, the same on all ranks")
        if "\0" in name:
            raise ValueError(f"the name {name!r} contains a zero character; remove it")
    if count is None:
        return [None if name is None else f"{operation}.{name}"]
    if name is None:
        return [None] * count
    return [f"grouped_{operation}.{name}_{index}of{count}" for index in range(1, count + 1)]


def chosen_op(op: Any, average: bool | None) -> ReduceOp:
    """The reduction that the caller chose; the average if none is given."""
    if average is None and isinstance(op, ReduceOp):
        return op
    if average is not None:
        if op is not None:
            raise ValueError(
                "The op parameter supersedes average. Please provide only one of them: `average` is deprecated"
            )
        warnings.warn("`average` is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=4)
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    if op is None:
        return ReduceOp.AVERAGE
    try:
        return ReduceOp(op)
    except ValueError:
        names = ", ".join(known.name.capitalize() for known in ReduceOp)
        raise ValueError(f"op={op!r} is not a reduction; choose one of {names}") from None


def checked_scales(scales: tuple[float, float]) -> tuple[float, float]:
    """Both factors as numbers. NaN is refused, because it would look like a mismatch between ranks."""
    if scales == NO_SCALES:
        return NO_SCALES
    for what, factor in zip(("prescale_factor", "postscale_factor"), scales, strict=True):
        if math.isnan(factor):
            raise ValueError(f"{what} is not a number (nan)")
    return float(scales[0]), float(scales[1])


def checked_compression(compression: Any) -> Any:
    """TypeError unless it is a compressor."""
    if not all(callable(getattr(compression, what, None)) for what in ("compress", "decompress")):
        raise TypeError(f"compression={compression!r}: expected a class with compress and decompress")
    return compression


def output_of(outcome: Outcome) -> Memory:
    if outcome.output is None:
        raise errors.HorovodInternalError("the engine gave no output")
    return outcome.output


def finisher(buffers: list[Buffer], grouped: bool, in_place: Sequence[Any] | None) -> Callable[[list[Outcome]], Any]:
    """Turns outcomes into results: the caller's own arrays if in place, otherwise new ones of the same type."""
    if in_place is not None:
        results = tuple(in_place) if grouped else in_place[0]
        return lambda outcomes: results
    if not grouped:
        give = buffers[0].give
        return lambda outcomes: give(output_of(outcomes[0]))
    return lambda outcomes: tuple(
        buffer.give(output_of(outcome)) for buffer, outcome in zip(buffers, outcomes, strict=True)
    )


def refuse_scalar(buffer: Buffer, operation: str) -> None:
    if not buffer.array.shape:
        raise errors.no_rows(operation)
