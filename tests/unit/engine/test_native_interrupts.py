# Interruptions: a signal handler that uses the engine, a tensor whose memory is released, a closed engine.
# Touches the native engine in a world of one.
from __future__ import annotations

import dataclasses
import fcntl
import gc
import os
import socket
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from alarms import alarm, interrupted

from farandole.base.config import Config
from farandole.base.errors import ShutDown
from farandole.engine.interface import Kind, ReduceOp, Request
from farandole.engine.library import LIBRARY, start_heartbeat
from farandole.engine.native import NativeEngine

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the native library is not built")


def sum_of(engine: NativeEngine, count: int, name: str) -> np.ndarray:
    values = np.arange(count, dtype=np.float32)
    output = np.full(count, -1, np.float32)
    engine.run(Request(Kind.ALLREDUCE, name, values, output, op=ReduceOp.SUM))
    return output


def test_a_signal_handler_may_use_the_engine_in_the_middle_of_a_call(engine: NativeEngine) -> None:
    handled: list[np.ndarray] = []
    rounds = 0
    with alarm(lambda: handled.append(sum_of(engine, 3, f"inner.{len(handled)}")), 0.0005, 0.0005):
        while len(handled) < 300:
            assert sum_of(engine, 7, f"outer.{rounds}").tolist() == [0, 1, 2, 3, 4, 5, 6]
            rounds += 1
    assert all(found.tolist() == [0, 1, 2] for found in handled)


@pytest.mark.parametrize("call", ["wait", "wait with a limit", "poll", "run"])
def test_a_signal_handler_may_close_the_engine_in_the_middle_of_a_call(call: str, waiting: NativeEngine) -> None:
    values = np.ones(3, np.float32)
    request = Request(Kind.ALLREDUCE, "x", values, values)
    [handle] = waiting.submit([request])
    calls: dict[str, Callable[[], object]] = {
        "wait": lambda: waiting.wait(handle),
        "wait with a limit": lambda: waiting.wait(handle, 60.0),
        "poll": lambda: waiting.poll(handle, 60.0),
        "run": lambda: waiting.run(dataclasses.replace(request, name="y")),
    }
    freed: list[bool] = []

    def handler() -> None:
        waiting.close()  # waits until no call uses it: not for the one that it interrupts
        freed.append(waiting.freed)

    with alarm(handler, 0.05), pytest.raises(ShutDown):
        calls[call]()
    assert freed == [True]


@pytest.mark.parametrize("way", ["nobody", "another", "stop"])
def test_an_engine_is_freed_when_its_heartbeat_guard_ends(way: str) -> None:
    own_fd = os.memfd_create("heartbeat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(own_fd, 4096)
    fcntl.fcntl(own_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    engine, other = NativeEngine(Config(), 0, [0]), NativeEngine(Config(), 0, [0])
    try:
        heartbeat = start_heartbeat(own_fd, None, 1000)
        heartbeat.guard(engine, 1000)
        alive = weakref.ref(engine)
        engine.close()
        assert not engine.freed  # the heartbeat may be about to revoke it
        del engine
        gc.collect()
        kept = alive()
        assert kept is not None
        heartbeat.stop() if way == "stop" else heartbeat.guard(other if way == "another" else None)
        assert kept.freed
        heartbeat.stop()
        other.close()
        assert other.freed
    finally:
        os.close(own_fd)


def test_a_closed_engine_closes_the_links_it_is_given() -> None:
    engine = NativeEngine(Config(), 0, [0, 1])
    engine.close()
    own_fd, agent_fd = socket.socketpair()
    with agent_fd:
        fd = own_fd.detach()
        with pytest.raises(ShutDown):
            engine.add_link(1, fd, 1)
        with pytest.raises(OSError):
            os.fstat(fd)
        assert agent_fd.recv(1) == b""


def test_a_close_that_was_interrupted_is_finished_by_the_next_one(engine: NativeEngine) -> None:
    busy = threading.Event()
    events = engine._events
    events._thread, idle = threading.Thread(target=busy.wait), events._thread  # one that does not end
    events._thread.start()
    with interrupted(0.2):
        engine.close()
    assert not engine.freed
    busy.set()
    engine.close()
    assert engine.freed  # the core's memory
    assert idle is not None
    idle.join()
    engine.close()


def test_a_signal_ends_the_wait_for_bytes_that_a_peer_does_not_read() -> None:
    engine = NativeEngine(Config(), 0, [0, 1])
    own_fd, agent_fd = socket.socketpair()
    own_fd.setblocking(False)
    with pytest.raises(BlockingIOError):  # no byte more fits into it
        while True:
            own_fd.send(bytes(4096))
    engine.add_link(1, own_fd.detach(), 1)
    with agent_fd:
        engine.start(5.0)
        with interrupted(0.3):
            engine.leave(60.0)
        engine.close()
    assert engine.freed
