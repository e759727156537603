# The agent's watch over heartbeats: which process is silent, for how long, and for what reasons it is reported.
# Touches memory files and processes of its own; time is an argument.
"""`Watcher.check(now)` with a clock of the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from farandole.launch.watch import CHECKS, SAVING, StatusPage, Watcher
from farandole.rendezvous.agent_messages import RankSilent, WatchRanks

TIMES = WatchRanks(1, heartbeat_ms=500, suspect_ms=2000, evict_ms=5000, give_up_ms=30_000, drain_ms=30_000)


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    one = Watcher(TIMES)
    yield one
    one.close()


def pass_time(watcher: Watcher, start: float, seconds: float, beating: StatusPage | None = None) -> list[RankSilent]:
    found: list[RankSilent] = []
    for look in range(int(seconds / watcher.pause)):
        if beating is not None and look % CHECKS == 0:
            beating.value += 1
        found += watcher.check(start + look * watcher.pause)[1]
    return found


def test_ranks_with_a_heartbeat_and_ranks_that_have_not_started_are_not_reported(watcher: Watcher) -> None:
    one, other = StatusPage(), StatusPage()
    watcher.add(0, os.getpid(), one)
    watcher.add(1, os.getpid(), other)
    assert pass_time(watcher, 100.0, 40.0, one) == []


def test_silence_is_reported_at_each_limit_and_its_end(watcher: Watcher) -> None:
    word = StatusPage()
    watcher.add(3, os.getpid(), word)
    assert pass_time(watcher, 100.0, 3.0, word) == []
    found = pass_time(watcher, 103.0, 40.0)
    assert [(report.rank, round(report.silent_ms, -3)) for report in found] == [(3, 2000), (3, 5000), (3, 30_000)]
    assert all(0 <= report.silent_ms - limit < 300 for report, limit in zip(found, (2000, 5000, 30_000), strict=True))
    word.value += 1
    assert watcher.check(143.0)[1] == [RankSilent(3, 0, "")]


def test_an_agent_that_was_suspended_restarts_its_timers(watcher: Watcher) -> None:
    word = StatusPage()
    watcher.add(0, os.getpid(), word)
    pass_time(watcher, 100.0, 1.0, word)
    assert pass_time(watcher, 101.0, 1.5) == []
    assert pass_time(watcher, 110.0, 1.9) == []  # nobody looked for 7 s
    assert len(pass_time(watcher, 111.9, 1.0)) == 1


def test_the_state_of_a_process_and_a_debugger(watcher: Watcher) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])  # sleep: until it is killed
    try:
        word = StatusPage()
        watcher.add(0, child.pid, word)
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        pass_time(watcher, 100.0, 0.5, word)
        assert [report.state for report in pass_time(watcher, 100.5, 3.0)] == ["T"]
        traced = subprocess.Popen(
            [sys.executable, "-c", f"{TRACE}\nprint(attach({child.pid}), flush=True); sys.stdin.read()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert traced.stdin is not None and traced.stdout is not None
        try:
            assert traced.stdout.readline() == b"0\n"
            word.value += 1
            watcher.check(104.0)
            assert pass_time(watcher, 104.0, 40.0) == []
        finally:
            traced.stdin.close()
            traced.wait()
            traced.stdout.close()
    finally:
        child.kill()
        child.wait()


TRACE = """
import ctypes, sys
def attach(pid):
    call = ctypes.CDLL(None, use_errno=True).ptrace
    call.argtypes = [ctypes.c_long] * 4
    return call(0x4206, pid, 0, 0)  # PTRACE_SEIZE
"""


def test_ranks_can_read_the_time_of_the_launchers_last_sign_of_life(watcher: Watcher) -> None:
    watcher.last_message_at = 100.0
    pass_time(watcher, 100.0, 1.0)
    assert watcher.own.value == 100_000 and not watcher.cut_off
    pass_time(watcher, 101.0, 1.0)
    assert watcher.own.value == 100_000 and watcher.cut_off
    watcher.last_message_at = 102.5
    assert watcher.own.value == 102_500
    pass_time(watcher, 102.0, 1.0)
    assert not watcher.cut_off
    watcher.launcher_silent_s = 2.0  # the launcher does not hear us: the line works one way
    assert watcher.cut_off


def test_a_rank_can_say_that_it_has_something_to_save(watcher: Watcher) -> None:
    word = StatusPage()
    watcher.add(0, os.getpid(), word)
    assert not watcher.saving
    os.pwrite(word.fd, b"\1", SAVING)
    assert watcher.saving
    reader = word.reader()
    try:
        with pytest.raises(OSError):
            os.pwrite(reader, b"\0", SAVING)
    finally:
        os.close(reader)
