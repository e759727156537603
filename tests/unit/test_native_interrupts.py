# What may come in between: a signal handler that uses the engine, a tensor whose memory is given away, a closed engine.
# Touches the native engine in a world of one.
from __future__ import annotations

import os
import signal
import socket
from types import FrameType

import numpy as np
import pytest

from farandole import native
from farandole.config import Config
from farandole.engine import Kind, ReduceOp, Request
from farandole.errors import ShutDown

pytestmark = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native library is not built")


def sum_of(engine: native.NativeEngine, count: int, name: str) -> np.ndarray:
    values = np.arange(count, dtype=np.float32)
    output = np.full(count, -1, np.float32)
    engine.run(Request(Kind.ALLREDUCE, name, values, output, op=ReduceOp.SUM))
    return output


def test_a_signal_handler_may_use_the_engine_in_the_middle_of_a_call() -> None:
    engine = native.NativeEngine(Config(), 0, [0])
    engine.start(5.0)
    handled = []

    def handler(_number: int, _frame: FrameType | None) -> None:
        handled.append(sum_of(engine, 3, f"inner.{len(handled)}"))

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        rounds = 0
        while len(handled) < 300:
            assert sum_of(engine, 7, f"outer.{rounds}").tolist() == [0, 1, 2, 3, 4, 5, 6]
            rounds += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        engine.close()
    assert all(found.tolist() == [0, 1, 2] for found in handled)


def test_a_closed_engine_closes_the_links_it_is_given() -> None:
    engine = native.NativeEngine(Config(), 0, [0, 1])
    engine.close()
    mine, theirs = socket.socketpair()
    with theirs:
        fd = mine.detach()
        with pytest.raises(ShutDown):
            engine.add_link(1, fd, 1)
        with pytest.raises(OSError):
            os.fstat(fd)
        assert theirs.recv(1) == b""
