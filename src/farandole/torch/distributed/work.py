# Pending operations for torch.distributed: Work objects, their futures, and the threads that complete the futures.
# Touches torch; the rooms base, engine and world; the file failures.
"""Users hold a `Work`. Its `Operation` continues also after the user has dropped the `Work`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import distributed as dist

from ...base import errors
from ...engine.interface import Outcome
from ...world.world import World
from . import failures

Finish = Callable[[list[Outcome]], None]


def _nothing(outcomes: list[Outcome]) -> None:
    """For operations whose results are already where they belong."""


class Operation:
    """Requests that were submitted, and what to do when they are done."""

    def __init__(
        self,
        world: World,
        handles: Sequence[int],
        what: str,
        results: Sequence[torch.Tensor] = (),
        finish: Finish = _nothing,
    ) -> None:
        self.what = what
        self.results = list(results)
        self.done = False
        self.failure: Exception | None = None
        self.outcomes: list[Outcome] = []
        self._world = world
        self._handles = handles
        self._finish = finish
        self._lock = threading.Lock()  # a user, the watcher and a thread that waits for a future may all complete it

    def poll(self) -> bool:
        """Whether it has ended. If it has, the results are in place."""
        if self.done:
            return True
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits for it
        try:
            if all(self._world.engine.poll(handle) for handle in self._handles[len(self.outcomes) :]):
                self._complete(None)
        except errors.ShutDown as error:
            self._end(error)
        finally:
            self._lock.release()
        return self.done

    def wait(self, seconds: float | None, passive: bool = False) -> None:
        """Waits until it has ended. FarandoleTimeout leaves it pending. An error is stored in `failure`."""
        if self.done:
            return
        if not self._lock.acquire(timeout=-1 if seconds is None else seconds):
            raise errors.FarandoleTimeout(f"{self.what} did not finish within {seconds:g} s", seconds=seconds)
        try:
            if not self.done:
                self._complete(seconds, passive)
        finally:
            self._lock.release()

    def _complete(self, seconds: float | None, passive: bool = False) -> None:
        engine = self._world.engine
        while len(self.outcomes) < len(self._handles):
            try:
                outcome = engine.wait(self._handles[len(self.outcomes)], seconds, passive)
            except errors.FarandoleTimeout as error:
                if error.seconds is not None:
                    raise
                self.failure, outcome = self.failure or error, Outcome()
            except Exception as error:
                self.failure, outcome = self.failure or error, Outcome()
            self.outcomes.append(outcome)
        if self.failure is None:
            try:
                self._finish(self.outcomes)
            except Exception as error:
                self.failure = error
        self._end(self.failure)

    def _end(self, failure: Exception | None) -> None:
        self.failure = failure
        self._finish = _nothing  # releases staging memory
        self.done = True


_here = threading.local()  # `watches` is set on the threads of watchers


def _mark() -> None:
    _here.watches = True


class Watcher:
    """Completes futures. One thread serves the collectives of a group, which end in order; more threads serve the rest.

    The rest are sends, receives, and collectives that begin in a callback of a future. Such a callback runs on these
    threads and may wait for its collectives, as PowerSGD's hook does.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._more: ThreadPoolExecutor | None = None

    def watch(self, job: Callable[[], None], in_order: bool) -> None:
        with self._lock:
            if not in_order or getattr(_here, "watches", False):
                if self._more is None:
                    self._more = ThreadPoolExecutor(64, f"farandole-watch-more-{self._name}", initializer=_mark)
                self._more.submit(job)
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"farandole-watch-{self._name}", daemon=True)
                self._thread.start()
        self._queue.put(job)

    def _run(self) -> None:
        _mark()
        while (job := self._queue.get()) is not None:
            job()
            del job  # the job holds objects of the user

    def close(self) -> None:
        """Ends the threads after their jobs are done."""
        with self._lock:
            thread, self._thread = self._thread, None
            more, self._more = self._more, None
        if more is not None:
            more.shutdown(wait=True)
        if thread is not None:
            self._queue.put(None)
            thread.join()


class Work(dist.Work):  # type: ignore[misc]
    """An operation that the user can wait for."""

    def __init__(self, operation: Operation, group: Any, timeout: timedelta | None, in_order: bool = True) -> None:
        """`in_order`: operations of its kind end in the order in which they began."""
        super().__init__()
        self._operation = operation
        self._group = group
        self._timeout = timeout
        self._in_order = in_order
        self._future: Any = None
        self._complete: Callable[[], None] | None = None
        self.on_future: Callable[[Work], None] | None = None  # called when the future is taken
        self.for_cpp = False  # C++ code reads the future
        self.awaited = False  # `deliver` is called before anyone waits for the future

    def wait(self, timeout: timedelta | None = None, passive: bool = False) -> bool:
        """Waits until it is done. Raises DistBackendError if it failed or took too long."""
        operation = self._operation
        chosen = timeout if timeout is not None and timeout > timedelta(0) else self._timeout
        if not operation.done:
            try:
                operation.wait(None if chosen is None else chosen.total_seconds(), passive)
            except errors.FarandoleTimeout as error:
                raise failures.timeout_error(self._group, operation.what, error) from None
        if operation.failure is not None:
            raise failures.translated(operation.what, operation.failure) from operation.failure
        return True

    def synchronize(self) -> None:
        """The same as wait."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, with or without success."""
        return self._operation.poll()

    def is_success(self) -> bool:
        """Whether it ended without error."""
        return self._operation.poll() and self._operation.failure is None

    def exception(self) -> Any:
        """The error, if it has ended with one."""
        failure = self._operation.failure
        return None if failure is None else failures.translated(self._operation.what, failure)

    def result(self) -> list[torch.Tensor]:
        """Waits, and gives the tensors that the operation fills."""
        self.wait()
        return self._operation.results

    def source_rank(self) -> int:
        """For a receive from any rank: the sender, as a rank in the group."""
        self.wait()
        return int(self._group.place_of(self._operation.outcomes[0].value))

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A torch Future of the tensors."""
        if self._future is None:
            if self.on_future is not None:
                self.on_future(self)
            self._future = torch.futures.Future()
            operation, future, group, timeout = self._operation, self._future, self._group, self._timeout

            def complete() -> None:
                try:
                    Work(operation, group, timeout).wait(passive=True)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(operation.results)

            if self.for_cpp:
                # In C++, an exception set by Python is an ordinary value, which DDP would take for tensors.
                self._future = future.then(torch.futures.Future.value)
            if operation.done:
                complete()
            elif self.awaited:
                self._complete = complete
            else:
                self._group.watcher.watch(complete, self._in_order)
        return self._future

    getFuture = get_future

    def deliver(self) -> None:
        """Waits on this thread and completes the future. DistBackendError as in `wait`."""
        self.wait()
        if self._complete is not None:
            self._complete()

    def give_up(self) -> None:
        """Called when no code will wait for it any more."""
        if not self._operation.done:
            self._group.forgotten(self._operation)

    def __del__(self) -> None:
        # Results still have to arrive, and the engine holds the tensors until the operation is polled or waited for.
        operation = self._operation
        if self._future is None and not operation.done:
            self._group.forgotten(operation)
