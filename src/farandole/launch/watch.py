# An agent's watch over its ranks: who is silent, for how long, and whether there is a reason.
# Touches memory files and /proc; decides nothing but what to report.
"""Each rank's pulse counts up a word in a memory file; the agent's own word tells the ranks when it heard the launcher.

Silence is counted in the agent's own ticks: an agent that did not run itself for two beats starts anew. A rank that is
traced by a debugger is never reported.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from farandole.rendezvous.orders import Quiet, Watch

WORD_BYTES = 4096
SAVING = 8  # where a rank writes 1 when it has something to save before it goes
ALONE = 9  # where an agent writes 1 when the launcher is gone
LOOKS = 4  # at the words, between two ticks
SLACK = 0.3  # of a beat: what a sign of life may be late
_WORD = struct.Struct("=Q")


class Word:
    """A memory file with a number at its beginning: a new one, or the one behind a descriptor, which is then ours."""

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("farandole-pulse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.truncate(fd, WORD_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.fd = fd
        self._memory = mmap.mmap(self.fd, WORD_BYTES)

    @property
    def value(self) -> int:
        """The number."""
        return int(_WORD.unpack_from(self._memory)[0])

    @value.setter
    def value(self, number: int) -> None:
        _WORD.pack_into(self._memory, 0, number)

    @property
    def saving(self) -> bool:
        """Whether its writer has something to save before it goes."""
        return self._memory[SAVING] != 0

    def leave_alone(self) -> None:
        """Tells the readers of an agent's word that the launcher is gone."""
        self._memory[ALONE] = 1

    def reader(self) -> int:
        """A descriptor that can only be read."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Gives the memory back."""
        self._memory.close()
        os.close(self.fd)


@dataclass
class Watched:
    """A rank, and when its word last moved."""

    pid: int
    word: Word
    value: int = 0
    since: float = 0.0
    told: int = 0  # how many of the limits it has passed


class Watcher:
    """All words of an agent. `look(now)` gives what the launcher should know."""

    def __init__(self, times: Watch) -> None:
        self.times = times
        self.own = Word()
        self.own_reader = self.own.reader()
        self._heard = 0.0
        self.unheard = 0.0  # for so many seconds the launcher has not heard from us, it says
        self._ranks: dict[int, Watched] = {}
        self._last = 0.0
        self._looks = 0
        self._limits = [limit / 1000 for limit in (times.suspect_ms, times.evict_ms, times.stubborn_ms)]

    @property
    def heard(self) -> float:
        """When the launcher spoke last."""
        return self._heard

    @heard.setter
    def heard(self, now: float) -> None:
        self._heard = now
        self.own.value = int(now * 1000)  # the ranks read it with the same clock

    @property
    def pause(self) -> float:
        """Seconds between two looks."""
        return self.times.beat_ms / 1000 / LOOKS

    def add(self, rank: int, pid: int, word: Word) -> None:
        """One more to watch."""
        self._ranks[rank] = Watched(pid, word)

    def forget(self, rank: int) -> None:
        """Its process has ended."""
        watched = self._ranks.pop(rank, None)
        if watched is not None:
            watched.word.close()

    @property
    def saving(self) -> bool:
        """Whether some rank has something to save before it goes."""
        return any(one.word.saving for one in self._ranks.values())

    def look(self, now: float) -> tuple[bool, list[Quiet]]:
        """Whether a tick is due, and what has changed."""
        beat = self.times.beat_ms / 1000
        if now - self._last > 2 * beat:
            for one in self._ranks.values():  # we did not look; who knows what they did
                one.since = now
        self._last = now
        self._looks += 1
        return self._looks % LOOKS == 0, list(self._reports(now, beat * SLACK))

    @property
    def cut_off(self) -> bool:
        """Whether the launcher has been silent for longer than usual, or says so of us."""
        return max(self._last - self.heard, self.unheard) > 3 * self.times.beat_ms / 1000

    def _reports(self, now: float, slack: float) -> Iterator[Quiet]:
        for rank, one in self._ranks.items():
            value = one.word.value
            if value != one.value or value == 0:  # 0: it has no pulse yet, or none any more
                if one.told:
                    yield Quiet(rank, 0, "")
                one.value, one.since, one.told = value, now, 0
                continue
            silent = now - one.since
            if one.told < len(self._limits) and silent >= self._limits[one.told] + slack:
                state, traced = _state(one.pid)
                if traced:
                    one.since = now
                    continue
                one.told += 1
                yield Quiet(rank, round((silent - slack) * 1000), state)

    def close(self) -> None:
        """Gives everything back."""
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
