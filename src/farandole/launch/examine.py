# What an agent finds out about its ranks for the launcher: last operations, Python stacks, the state of the processes.
# Touches memory files, /proc, and signals through spawn.py.
"""`Sights` has the memory files of one rank. `Examination` looks at all ranks of the agent at once, within two seconds,
and never blocks: the agent's loop calls `turn` until it is over."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from farandole.launch import spawn
from farandole.observe import records, stacks
from farandole.rendezvous import agent_messages

LOOK_SECONDS = 0.25  # between two looks for operations that wait
TURN_SECONDS = 0.03
BUSY_SECONDS = 0.3  # in which the use of the processor is measured
ANSWER_SECONDS = 0.6  # for a process to write its stacks; a busy machine gets what is left of LONGEST_SECONDS
LONGEST_SECONDS = 1.6
CHILDREN = 3  # so many child processes of a rank are asked too, such as workers of a data loader
SOURCE_LINES = 8  # innermost frames whose source is sent
SOURCE_BYTES = 1 << 20  # of a file that is read for it
_TICKS = os.sysconf("SC_CLK_TCK")


class Sights:
    """The memory files in which a rank leaves its last operations and writes its stacks."""

    def __init__(self) -> None:
        self.record = records.RecordFile()
        self.stacks = stacks.StacksFile()
        self.told = 0  # when the operation was submitted that the launcher has been told about

    @property
    def fds(self) -> tuple[int, int]:
        """What the rank inherits."""
        return self.record.fd, self.stacks.fd

    def waiting(self, now_ns: int) -> int | None:
        """For how many nanoseconds the oldest operation has waited when the launcher must hear of it; 0: no more."""
        note = self.record.note_ns
        since = self.record.waiting_since() if note else 0
        if since and now_ns - since >= note:
            if since == self.told:
                return None
            self.told = since
            return now_ns - since
        if self.told:
            self.told = 0
            return 0
        return None

    def last(self) -> bytes:
        """The record, to be sent."""
        return zlib.compress(self.record.bytes(), 1)

    def close(self) -> None:
        """Frees both."""
        self.record.close()
        self.stacks.close()


class _Subject:
    """A rank that is examined. `steps` is a generator that signals its processes one after the other."""

    def __init__(self, rank: int, worker: int, sights: Sights, end: float) -> None:
        self.rank = rank
        self.sights = sights
        record = records.read(sights.record.bytes())
        self.main_thread = record.main_thread if record is not None else 0
        self.pid = record.pid if record is not None else 0
        if self.pid != worker and self.pid not in spawn.descendants(worker):
            self.pid = 0  # in another process namespace, or from before
        self.shown = self.pid or worker
        self.began = time.monotonic()
        self.used = _used(self.shown)
        self.facts: dict[str, Any] = {"pid": self.shown, "answered": False, "stack": "", "children": []}
        self.over = False
        self._end = end
        self._steps = self._ask()

    def turn(self, now: float) -> None:
        if next(self._steps, None) is None and now - self.began >= BUSY_SECONDS:
            self.over = True

    def _ask(self) -> Iterator[int]:
        if not self.pid:
            return
        yield from self._stack_of(self.pid, self.facts, self.sights.stacks.thread)
        self.facts["answered"] = bool(self.facts["stack"])
        for child in spawn.descendants(self.pid)[: 4 * CHILDREN]:
            if len(self.facts["children"]) < CHILDREN and stacks.offers(child):
                found: dict[str, Any] = {"pid": child, "stack": "", "state": state_of(child)[0]}
                yield from self._stack_of(child, found, child)  # the thread that was forked
                self.facts["children"].append(found)

    def _stack_of(self, pid: int, facts: dict[str, Any], thread: int) -> Iterator[int]:
        """Signals a process, and waits until the text does not grow any more."""
        file = self.sights.stacks
        if not thread or state_of(pid)[0] in "TtZX" or not stacks.offers(pid):
            return
        file.clear()
        spawn.signal_thread(pid, thread, stacks.SIGNAL)
        asked, before, same = time.monotonic(), -1, 0
        while same < 2 and (now := time.monotonic()) < self._end and (file.size or now - asked < ANSWER_SECONDS):
            yield 1
            same = same + 1 if file.size == before and before > 0 and self._has_main(file.text()) else 0
            before = file.size
        facts["stack"] = file.text()

    def _has_main(self, text: str) -> bool:
        return not self.main_thread or f"0x{self.main_thread:016x}" in text

    def report(self, number: int) -> agent_messages.Examined:
        spent = max(1e-3, time.monotonic() - self.began)
        state, wait, call = state_of(self.shown)
        self.facts |= {
            "state": state,
            "wait": wait,
            "call": call,
            "busy": round((_used(self.shown) - self.used) / spent, 3),
            "now_ns": time.monotonic_ns(),
            "sources": _sources(self.facts["stack"], self.main_thread),
        }
        return agent_messages.Examined(number, self.rank, json.dumps(self.facts).encode(), self.sights.last())


class Examination:
    """Of all ranks of this agent. `turn(now)` returns False when it is over and `send` has got every report."""

    def __init__(
        self, number: int, ranks: Mapping[int, tuple[int, Sights]], send: Callable[[agent_messages.Examined], None]
    ) -> None:
        self.number = number
        self._send = send
        end = time.monotonic() + LONGEST_SECONDS
        self._subjects = [_Subject(rank, worker, sights, end) for rank, (worker, sights) in ranks.items()]

    def turn(self, now: float) -> bool:
        """Goes on."""
        for subject in list(self._subjects):
            subject.turn(now)
            if subject.over:
                self._subjects.remove(subject)
                self._send(subject.report(self.number))
        return bool(self._subjects)

    def forget(self, rank: int) -> None:
        """Its process has ended."""
        self._subjects = [one for one in self._subjects if one.rank != rank]


def state_of(pid: int) -> tuple[str, str, int]:
    """The kernel's letter for a process, where its main thread waits in the kernel, and the number of its system call
    (-1: none, or it is not told)."""
    state, wait, call = "X", "", -1
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat") as file:
        state = file.read().rpartition(")")[2].split()[0]
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        wait = file.read().strip("\0\n0")
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/syscall") as file:
        call = int(file.read().split()[0])
    return state, wait, call


def _used(pid: int) -> float:
    """Seconds of processors that a process has used."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat") as file:
        words = file.read().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / _TICKS
    return 0.0


def _sources(text: str, main_thread: int) -> list[tuple[str, int, str]]:
    """The lines of the program that the main thread is in."""
    import linecache  # rarely needed, and slow to import

    thread = stacks.main_of(stacks.parse(text), main_thread)
    found = []
    for frame in thread.frames[:SOURCE_LINES] if thread is not None else ():
        with contextlib.suppress(OSError):
            known = os.stat(frame.file)
            if frame.file.endswith(".py") and stat.S_ISREG(known.st_mode) and known.st_size <= SOURCE_BYTES:
                linecache.checkcache(frame.file)
                found.append((frame.file, frame.line, linecache.getline(frame.file, frame.line).strip()[:200]))
    return found
