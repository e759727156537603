# How an agent watches the heartbeats of its ranks: which rank is silent, for how long, and why.
# Touches memory files and /proc; decides only what to report.
"""Each rank counts up a number in its status page, a memory file. The agent's own status page tells the ranks when it
last heard from the launcher.

An agent that did not run for two heartbeats itself starts to count again. A rank under a debugger is never reported.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from farandole.rendezvous.agent_messages import RankSilent, WatchRanks

STATUS_PAGE_BYTES = 4096
SAVING = 8  # where a rank writes 1 when it must save before it leaves
LAUNCHER_GONE = 9  # where an agent writes 1 when the launcher is gone
CHECKS = 4  # checks of the status pages between two heartbeats
SLACK = 0.3  # part of a heartbeat interval by which a heartbeat may be late
_WORD = struct.Struct("=Q")


class StatusPage:
    """A memory file with a number at its start: a new one, or one behind a descriptor, which this object then owns."""

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("farandole-pulse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.truncate(fd, STATUS_PAGE_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.fd = fd
        self._memory = mmap.mmap(self.fd, STATUS_PAGE_BYTES)

    @property
    def value(self) -> int:
        """The number."""
        return int(_WORD.unpack_from(self._memory)[0])

    @value.setter
    def value(self, number: int) -> None:
        _WORD.pack_into(self._memory, 0, number)

    @property
    def saving(self) -> bool:
        """Whether its writer must save before it leaves."""
        return self._memory[SAVING] != 0

    def set_launcher_gone(self) -> None:
        """Tells the readers of an agent's status page that the launcher is gone."""
        self._memory[LAUNCHER_GONE] = 1

    def reader(self) -> int:
        """A descriptor that can only be read."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Frees the memory."""
        self._memory.close()
        os.close(self.fd)


@dataclass
class WatchedRank:
    """A rank, and when its number last changed."""

    pid: int
    status_page: StatusPage
    value: int = 0
    since: float = 0.0
    passed: int = 0  # how many limits its silence has passed


class Watcher:
    """All status pages of an agent. `check(now)` returns the reports for the launcher."""

    def __init__(self, times: WatchRanks) -> None:
        self.times = times
        self.own = StatusPage()
        self.own_reader = self.own.reader()
        self._last_message_at = 0.0
        self.launcher_silent_s = 0.0  # how long the launcher has not heard from this agent, in its own words
        self._ranks: dict[int, WatchedRank] = {}
        self._last = 0.0
        self._checks = 0
        self._limits = [limit / 1000 for limit in (times.suspect_ms, times.evict_ms, times.give_up_ms)]

    @property
    def last_message_at(self) -> float:
        """When the last message of the launcher came."""
        return self._last_message_at

    @last_message_at.setter
    def last_message_at(self, now: float) -> None:
        self._last_message_at = now
        self.own.value = int(now * 1000)  # the ranks use the same clock

    @property
    def pause(self) -> float:
        """Seconds between two checks."""
        return self.times.heartbeat_ms / 1000 / CHECKS

    def add(self, rank: int, pid: int, status_page: StatusPage) -> None:
        """Watches one more rank."""
        self._ranks[rank] = WatchedRank(pid, status_page)

    def forget(self, rank: int) -> None:
        """Its process has ended."""
        watched = self._ranks.pop(rank, None)
        if watched is not None:
            watched.status_page.close()

    @property
    def saving(self) -> bool:
        """Whether a rank must save before it leaves."""
        return any(one.status_page.saving for one in self._ranks.values())

    def check(self, now: float) -> tuple[bool, list[RankSilent]]:
        """Whether a heartbeat is due, and the reports of changes."""
        beat = self.times.heartbeat_ms / 1000
        if now - self._last > 2 * beat:
            for one in self._ranks.values():  # the agent itself did not run, so it knows nothing about this time
                one.since = now
        self._last = now
        self._checks += 1
        return self._checks % CHECKS == 0, list(self._reports(now, beat * SLACK))

    @property
    def cut_off(self) -> bool:
        """Whether the launcher was silent for too long, or says that this agent was."""
        return max(self._last - self.last_message_at, self.launcher_silent_s) > 3 * self.times.heartbeat_ms / 1000

    def _reports(self, now: float, slack: float) -> Iterator[RankSilent]:
        for rank, one in self._ranks.items():
            value = one.status_page.value
            if value != one.value or value == 0:  # 0: no heartbeat has started, or it has stopped
                if one.passed:
                    yield RankSilent(rank, 0, "")
                one.value, one.since, one.passed = value, now, 0
                continue
            silent = now - one.since
            if one.passed < len(self._limits) and silent >= self._limits[one.passed] + slack:
                state, traced = _state(one.pid)
                if traced:
                    one.since = now
                    continue
                one.passed += 1
                yield RankSilent(rank, round((silent - slack) * 1000), state)

    def close(self) -> None:
        """Frees everything."""
        for rank in list(self._ranks):
            self.forget(rank)
        os.close(self.own_reader)
        self.own.close()


def _state(pid: int) -> tuple[str, bool]:
    """The kernel's letter for a process, and whether a debugger holds it."""
    state, tracer = "", 0
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/status") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name == "State":
                state = value.split()[0]
            elif name == "TracerPid":
                tracer = int(value)
    return state, tracer > 0
