# A small event loop: exchanges over sockets as generators, each with a deadline; none blocks another.
# Touches sockets it is given; opens none.
"""Flows and the loop that drives them.

A flow is a generator that yields what it waits for. Handshakes and link checks are written once, as flows. Many run
at the same time in the hub, in a rank that joins, and in tests. A loop without work never wakes up.
"""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE

MAX_WAIT = 3600.0  # seconds; the kernel's own limit is not far above

T = TypeVar("T")


class Duplex:
    """One descriptor to read and one to write, with the methods of a socket. ssh gives a program its streams so."""

    def __init__(self, reader: int, writer: int) -> None:
        self.reader = reader
        self.writer = writer
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)

    def recv(self, count: int) -> bytes:
        """The bytes that are there, at most `count`."""
        return os.read(self.reader, count)

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """The number of bytes sent."""
        return os.write(self.writer, data)

    def close(self) -> None:
        """Closes both."""
        os.close(self.reader)
        os.close(self.writer)


Stream = socket.socket | Duplex


@dataclass(frozen=True)
class Wait:
    """What a flow waits for: a stream to become ready, or a moment on the monotonic clock."""

    sock: Stream | None = None
    events: int = 0
    until: float | None = None


Flow = Generator[Wait, None, T]


def receive(sock: Stream, count: int) -> Flow[bytes]:
    """Reads exactly `count` bytes. Raises EOFError if the other side closes before."""
    parts = bytearray()
    while len(parts) < count:
        try:
            part = sock.recv(count - len(parts))
        except (BlockingIOError, InterruptedError):
            yield Wait(sock, READ)
            continue
        if not part:
            raise EOFError("the other side closed the connection")
        parts += part
    return bytes(parts)


def send(sock: Stream, data: bytes) -> Flow[None]:
    """Sends all of `data`."""
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except (BlockingIOError, InterruptedError):
            yield Wait(sock, WRITE)


def pause(seconds: float) -> Flow[None]:
    """Waits this long; other flows continue."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield Wait(until=until)


class Task(Generic[T]):
    """A running flow. `done(result, error)` is called once, at its end."""

    def __init__(
        self, flow: Flow[T], deadline: float | None, done: Callable[[T | None, Exception | None], None]
    ) -> None:
        self.flow = flow
        self.deadline = deadline
        self.done = done
        self.wait = Wait()

    def due(self) -> float | None:
        """When the loop must resume this task even if its socket is not ready."""
        times = [moment for moment in (self.deadline, self.wait.until) if moment is not None]
        return min(times) if times else None


class Loop:
    """Drives flows and watches sockets, on one thread; `call` alone is safe from others."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._tasks: dict[int, Task[Any]] = {}
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._timers: dict[object, tuple[float, Callable[[], None]]] = {}
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wakeup, READ, None)
        self._closing = threading.Lock()  # no thread may write to the event descriptor after it was closed

    def spawn(
        self, flow: Flow[T], deadline: float | None, done: Callable[[T | None, Exception | None], None]
    ) -> Task[T]:
        """Starts a flow; at `deadline` (monotonic) it gets a TimeoutError."""
        task = Task(flow, deadline, done)
        self._tasks[id(task)] = task
        self._step(task, None)
        return task

    def cancel(self, task: Task[Any]) -> None:
        """Ends a flow without calling `done`."""
        if self._tasks.pop(id(task), None) is not None:
            self._release(task)
            task.flow.close()

    def watch(self, sock: Stream | int, events: int, ready: Callable[[int], None]) -> None:
        """Calls `ready(events)` whenever the stream or descriptor is ready. A second call changes the events."""
        for half, mask in _descriptors(sock):
            if not events & mask:
                self._drop(half)
                continue
            try:
                self._selector.modify(half, events & mask, ready)
            except KeyError:
                self._selector.register(half, events & mask, ready)

    def forget(self, sock: Stream | int) -> None:
        """Stops watching it."""
        for half, _ in _descriptors(sock):
            self._drop(half)

    def _drop(self, half: socket.socket | int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(half)

    def at(self, key: object, moment: float | None, act: Callable[[], None]) -> None:
        """Calls `act` once at that moment; None cancels the timer of this key."""
        self._timers.pop(key, None)
        if moment is not None:
            self._timers[key] = (moment, act)

    def call(self, act: Callable[[], None]) -> None:
        """Makes the loop's thread call `act` soon. Safe from any thread; does nothing on a closed loop."""
        with self._closing:
            if self._wakeup >= 0:
                self._calls.append(act)
                os.eventfd_write(self._wakeup, 1)

    def turn(self, until: float | None = None) -> None:
        """Waits for events, at most until that moment, and handles them."""
        due = [moment for task in self._tasks.values() if (moment := task.due()) is not None]
        due += [moment for moment, _ in self._timers.values()]
        if until is not None:
            due.append(until)
        timeout = min(MAX_WAIT, max(0.0, min(due) - time.monotonic())) if due else None
        for key, events in self._selector.select(timeout):
            if key.fd == self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakeup)
            elif isinstance(key.data, Task):
                if id(key.data) in self._tasks:
                    self._step(key.data, None)
            elif self._selector.get_map().get(key.fd) is key:  # not forgotten by an earlier one of this round
                key.data(events)
        while self._calls:
            self._calls.popleft()()
        self._run_timers(time.monotonic())

    def finish(self, flow: Flow[T], deadline: float) -> T:
        """Runs one flow to its end; the others run too."""
        outcome: list[tuple[T | None, Exception | None]] = []
        self.spawn(flow, deadline, lambda result, error: outcome.append((result, error)))
        while not outcome:
            self.turn()
        result, error = outcome[0]
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # None only where T allows it

    def close(self) -> None:
        """Cancels every flow. Watched sockets stay open: they belong to others."""
        for task in list(self._tasks.values()):
            self.cancel(task)
        with self._closing:
            wakeup, self._wakeup = self._wakeup, -1
            if wakeup >= 0:
                self._selector.close()
                os.close(wakeup)
        self._calls.clear()
        self._timers.clear()

    def abandon(self) -> None:
        """In a forked child: closes this process's copies of the descriptors and touches nothing that is shared."""
        wakeup, self._wakeup = self._wakeup, -1
        self._closing = threading.Lock()  # the old one may be held by a thread that does not exist here
        if wakeup >= 0:
            self._selector.close()
            os.close(wakeup)
        self._tasks.clear()

    def _run_timers(self, now: float) -> None:
        for task in list(self._tasks.values()):
            if id(task) not in self._tasks:
                continue
            if task.deadline is not None and task.deadline <= now:
                self._step(task, TimeoutError("timed out"))
            elif task.wait.until is not None and task.wait.until <= now:
                self._step(task, None)
        for key, (moment, act) in list(self._timers.items()):
            if moment <= now and self._timers.get(key, (None, None))[1] is act:
                del self._timers[key]
                act()

    def _release(self, task: Task[Any]) -> None:
        if task.wait.sock is not None:
            self.forget(task.wait.sock)
        task.wait = Wait()

    def _step(self, task: Task[Any], error: Exception | None) -> None:
        self._release(task)
        try:
            wait = task.flow.throw(error) if error is not None else next(task.flow)
        except StopIteration as end:
            self._tasks.pop(id(task), None)
            task.done(end.value, None)
        except Exception as failure:  # what unauthenticated bytes cause ends only this flow
            self._tasks.pop(id(task), None)
            task.done(None, failure)
        else:
            task.wait = wait
            if wait.sock is not None:
                for half, mask in _descriptors(wait.sock):
                    if wait.events & mask:
                        self._selector.register(half, wait.events & mask, task)


def _descriptors(sock: Stream | int) -> list[tuple[socket.socket | int, int]]:
    """What the selector knows, and for which events."""
    if isinstance(sock, Duplex):
        return [(sock.reader, READ), (sock.writer, WRITE)]
    return [(sock, READ | WRITE)]
