# Ranks as threads of one process: the test connects their engines by socket pairs. It is fast, for most tests.
# Touches the engines; replaces rendezvous/.
"""`World` has one engine per rank. `World.run` runs a function on all ranks and never hangs."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from farandole.base import errors
from farandole.base.config import Config
from farandole.engine import library
from farandole.engine.interface import Engine, Kind, Outcome, Request
from farandole.engine.native import NativeEngine
from farandole.engine.reference import ReferenceEngine

UNIX, TCP = 0, 1
DEADLINE_S = 30.0


CHAOS_LIBRARY = Path(library.LIBRARY).with_name("libfarandole_chaos.so")
LIBRARY = os.environ.get("FARANDOLE_LIBRARY")  # None: the library in the package
ENGINES = ["native", "python"] if Path(LIBRARY or library.LIBRARY).exists() else ["python"]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected TCP sockets on the loopback interface."""
    with socket.create_server(("127.0.0.1", 0), backlog=1) as server:
        one = socket.create_connection(server.getsockname())
        two, _ = server.accept()
    for end in (one, two):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, two


def make_engine(kind: str, config: Config, rank: int, hosts: Sequence[int]) -> Engine:
    if kind == "native":
        return NativeEngine(replace(config, library=config.library or LIBRARY), rank, hosts)
    return ReferenceEngine(config, rank, hosts)


class Stuck(AssertionError):
    """A rank did not return in time. The stacks of all threads were printed to stderr."""


class World:
    """A job in one process. `hosts[r]` is the host number of rank r. Ranks of one host share memory; others use TCP."""

    def __init__(self, hosts: Sequence[int], engine: str = "native", *, linked: bool = True, **settings: Any) -> None:
        self.hosts = list(hosts)
        self.size = len(hosts)
        config = Config(**settings)
        self.streams = config.tcp_streams if engine == "native" else 1
        self.engines = [make_engine(engine, config, rank, hosts) for rank in range(self.size)]
        if linked:
            for one in range(self.size):
                for two in range(one + 1, self.size):
                    self.link(one, two)
        self.run(lambda engine, rank: engine.start(10.0))

    def link(self, one: int, two: int) -> None:
        kind = UNIX if self.hosts[one] == self.hosts[two] else TCP
        for _ in range(1 if kind == UNIX else self.streams):
            ends = socket.socketpair() if kind == UNIX else tcp_pair()
            self.engines[one].add_link(two, ends[0].detach(), kind)
            self.engines[two].add_link(one, ends[1].detach(), kind)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        on_all(lambda rank: self.engines[rank].close(), self.size, DEADLINE_S)

    def run(self, function: Callable[[Engine, int], Any], deadline: float = DEADLINE_S) -> list[Any]:
        """Runs function(engine, rank) on every rank. Returns the results by rank, or raises the lowest rank's error."""
        results = self.attempt(function, deadline)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def attempt(self, function: Callable[[Engine, int], Any], deadline: float = DEADLINE_S) -> list[Any]:
        """Like `run`, but returns exceptions as results."""

        def give_up() -> None:
            for engine in self.engines:
                engine.revoke(errors.REVOKED, -1, "the test's deadline has passed")

        return on_all(lambda rank: function(self.engines[rank], rank), self.size, deadline, give_up)


def on_all(
    function: Callable[[int], Any], size: int, deadline: float, give_up: Callable[[], None] = lambda: None
) -> list[Any]:
    """Runs function(rank) in a thread per rank. Exceptions are results. If late: prints stacks and raises Stuck."""
    results: list[Any] = [None] * size

    def body(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + deadline
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    stuck = [thread.name for thread in threads if thread.is_alive()]
    if stuck:
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        give_up()
        raise Stuck(f"{', '.join(stuck)} did not come back within {deadline} s")
    return results


def do(engine: Engine, request: Request, timeout: float | None = DEADLINE_S) -> Outcome:
    """Submits one request and waits for it."""
    return engine.wait(engine.submit([request])[0], timeout)


def allreduce(engine: Engine, values: Any, name: str | None = None, **more: Any) -> np.ndarray[Any, Any]:
    array = np.ascontiguousarray(values)
    result: np.ndarray[Any, Any] | None
    result = do(engine, Request(Kind.ALLREDUCE, name, array, np.empty_like(array), **more)).output
    assert result is not None
    return result


def barrier(engine: Engine, group: int = 0) -> None:
    do(engine, Request(Kind.BARRIER, group=group))


def add_groups(engine: Engine, *groups: Sequence[int]) -> list[int]:
    """Adds process sets. Returns their numbers."""
    splits = [number for ranks in groups for number in (len(ranks), *ranks)]
    first = do(engine, Request(Kind.ADD_GROUP, splits=splits)).value
    return list(range(first, first + len(groups)))
