# Operations under way as torch.distributed sees them: Work objects, their futures, and the thread that completes those.
# Touches torch, engine, runtime and failures.
"""`Work` is what users hold; `Operation` is what becomes of it, also after they have let it go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import distributed as dist

from ... import errors
from ...engine import Outcome
from ...runtime import World
from . import failures

Finish = Callable[[list[Outcome]], None]


def _nothing(outcomes: list[Outcome]) -> None:
    """For operations whose results lie where they belong."""


class Operation:
    """Requests that the engine has, and what is left to do when it has carried them out."""

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
        self._lock = threading.Lock()  # a user, the watcher and a future's waiter may all come for it

    def poll(self) -> bool:
        """Whether it is over; if so its results are where they belong."""
        if self.done:
            return True
        if not self._lock.acquire(blocking=False):
            return False  # somebody waits for it
        try:
            if all(self._world.engine.poll(handle) for handle in self._handles[len(self.outcomes) :]):
                self._complete(None)
        except errors.ShutDown as error:
            self._end(error)
        finally:
            self._lock.release()
        return self.done

    def wait(self, seconds: float | None, aside: bool = False) -> None:
        """Until it is over; FarandoleTimeout leaves it as it was. What went wrong is in `failure`."""
        if self.done:
            return
        if not self._lock.acquire(timeout=-1 if seconds is None else seconds):
            raise errors.FarandoleTimeout(f"{self.what} was not done after {seconds:g} s", seconds=seconds)
        try:
            if not self.done:
                self._complete(seconds, aside)
        finally:
            self._lock.release()

    def _complete(self, seconds: float | None, aside: bool = False) -> None:
        engine = self._world.engine
        while len(self.outcomes) < len(self._handles):
            try:
                outcome = engine.wait(self._handles[len(self.outcomes)], seconds, aside)
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
        self._finish = _nothing  # lets go of staged memory
        self.done = True


_here = threading.local()  # `watches`: on the threads of watchers


def _mark() -> None:
    _here.watches = True


class Watcher:
    """Completes futures: a thread for the collectives of one group, which end in their order; more for the rest.

    The rest are transfers, and collectives that begin in what a user has attached to a future: it runs on these threads
    and may wait for them, as PowerSGD's hook does.
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
            del job  # what it holds is the user's

    def close(self) -> None:
        """Ends the threads when what they have is done."""
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
        self.for_cpp = False  # C++ looks at the future
        self.awaited = False  # `deliver` is called before anybody waits for the future

    def wait(self, timeout: timedelta | None = None, aside: bool = False) -> bool:
        """Until it is done; DistBackendError when it failed or took too long."""
        operation = self._operation
        chosen = timeout if timeout is not None and timeout > timedelta(0) else self._timeout
        if not operation.done:
            try:
                operation.wait(None if chosen is None else chosen.total_seconds(), aside)
            except errors.FarandoleTimeout as error:
                raise failures.late(self._group, operation.what, error) from None
        if operation.failure is not None:
            raise failures.translated(operation.what, operation.failure) from operation.failure
        return True

    def synchronize(self) -> None:
        """The same as wait."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        return self._operation.poll()

    def is_success(self) -> bool:
        """Whether it ended well."""
        return self._operation.poll() and self._operation.failure is None

    def exception(self) -> Any:
        """What went wrong, once it is over."""
        failure = self._operation.failure
        return None if failure is None else failures.translated(self._operation.what, failure)

    def result(self) -> list[torch.Tensor]:
        """The tensors that it fills."""
        self.wait()
        return self._operation.results

    def source_rank(self) -> int:
        """Who sent what a receive from anybody received, as a rank in the group."""
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
                    Work(operation, group, timeout).wait(aside=True)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(operation.results)

            if self.for_cpp:
                # An exception that Python has set is a value in C++, where DDP would take it for tensors.
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
        """Waits, here, and fills the future; DistBackendError as from `wait`."""
        self.wait()
        if self._complete is not None:
            self._complete()

    def give_up(self) -> None:
        """Nobody will wait for it any more."""
        if not self._operation.done:
            self._group.forgotten(self._operation)

    def __del__(self) -> None:
        # Results still have to arrive, and the engine holds the tensors until somebody comes for them.
        operation = self._operation
        if self._future is None and not operation.done:
            self._group.forgotten(operation)
