# What an agent finds out about its ranks for the launcher: last operations, Python stacks, the state of the processes.
# Touches memory files, /proc, and signals through spawn.py.
"""`RankFiles` has the memory files of one rank. `Examination` examines all ranks of the agent at the same time, within
two seconds. It never blocks: the agent's loop calls `turn` until the examination is over."""

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

CHECK_SECONDS = 0.25  # between two checks for operations that wait
TURN_SECONDS = 0.03
BUSY_SECONDS = 0.3  # in which the use of the processor is measured
ANSWER_SECONDS = 0.6  # for a process to write its stacks; a busy machine gets what is left of LONGEST_SECONDS
LONGEST_SECONDS = 1.6
CHILDREN = 3  # how many child processes of a rank are asked too, such as workers of a data loader
SOURCE_LINES = 8  # innermost frames whose source is sent
SOURCE_BYTES = 1 << 20  # of a file that is read for it
_TICKS = os.sysconf("SC_CLK_TCK")


class RankFiles:
    """The memory files in which a rank leaves its last operations and writes its stacks."""

    def __init__(self) -> None:
        self.record = records.RecordFile()
        self.stacks = stacks.StacksFile()
        self._reported = 0  # when the waiting operation was submitted that the launcher knows about; 0: none

    @property
    def fds(self) -> tuple[int, int]:
        """What the rank inherits."""
        return self.record.fd, self.stacks.fd

    def waiting(self, now_ns: int) -> int | None:
        """What the launcher must hear now: for how many nanoseconds the oldest operation has waited, or 0 when it does
        not wait any more. None: nothing new."""
        note = self.record.note_ns
        since = self.record.waiting_since() if note else 0
        if since and now_ns - since >= note:
            if since == self._reported:
                return None
            self._reported = since
            return now_ns - since
        if self._reported:
            self._reported = 0
            return 0
        return None

    def compressed_record(self) -> bytes:
        """The record of the last operations, in the form in which it is sent."""
        return zlib.compress(self.record.bytes(), 1)

    def close(self) -> None:
        """Frees both files."""
        self.record.close()
        self.stacks.close()


class _ExaminedRank:
    """A rank that is examined. `steps` is a generator that signals its processes one after the other."""

    def __init__(self, rank: int, worker: int, files: RankFiles, end: float) -> None:
        self.rank = rank
        self.files = files
        record = records.read(files.record.bytes())
        self.main_thread = record.main_thread if record is not None else 0
        self.pid = record.pid if record is not None else 0
        if self.pid != worker and self.pid not in spawn.descendants(worker):
            self.pid = 0  # in another process namespace, or from before
        self._shown_pid = self.pid or worker
        self.began = time.monotonic()
        self._used_before = _used(self._shown_pid)
        self.facts: dict[str, Any] = {"pid": self._shown_pid, "answered": False, "stack": "", "children": []}
        self.over = False
        self._end = end
        self._steps = self._ask()

    def turn(self, now: float) -> None:
        if next(self._steps, None) is None and now - self.began >= BUSY_SECONDS:
            self.over = True

    def _ask(self) -> Iterator[int]:
        if not self.pid:
            return
        yield from self._stack_of(self.pid, self.facts, self.files.stacks.thread)
        self.facts["answered"] = bool(self.facts["stack"])
        for child in spawn.descendants(self.pid)[: 4 * CHILDREN]:
            if len(self.facts["children"]) < CHILDREN and stacks.offers(child):
                found: dict[str, Any] = {"pid": child, "stack": "", "state": state_of(child)[0]}
                yield from self._stack_of(child, found, child)  # the thread that was forked
                self.facts["children"].append(found)

    def _stack_of(self, pid: int, facts: dict[str, Any], thread: int) -> Iterator[int]:
        """Signals a process, and waits until the text does not grow any more."""
        file = self.files.stacks
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
        state, wait, call = state_of(self._shown_pid)
        self.facts |= {
            "state": state,
            "wait": wait,
            "call": call,
            "busy": round((_used(self._shown_pid) - self._used_before) / spent, 3),
            "now_ns": time.monotonic_ns(),
            "sources": _sources(self.facts["stack"], self.main_thread),
        }
        return agent_messages.Examined(
            number, self.rank, json.dumps(self.facts).encode(), self.files.compressed_record()
        )


class Examination:
    """Examines all ranks of this agent. `turn(now)` returns False when it is over and all reports are sent."""

    def __init__(
        self, number: int, ranks: Mapping[int, tuple[int, RankFiles]], send: Callable[[agent_messages.Examined], None]
    ) -> None:
        self.number = number
        self._send = send
        end = time.monotonic() + LONGEST_SECONDS
        self._ranks = [_ExaminedRank(rank, worker, files, end) for rank, (worker, files) in ranks.items()]

    def turn(self, now: float) -> bool:
        """Does one step for each rank."""
        for rank in list(self._ranks):
            rank.turn(now)
            if rank.over:
                self._ranks.remove(rank)
                self._send(rank.report(self.number))
        return bool(self._ranks)

    def forget(self, rank: int) -> None:
        """The process of this rank has ended."""
        self._ranks = [one for one in self._ranks if one.rank != rank]


def state_of(pid: int) -> tuple[str, str, int]:
    """The kernel's letter for a process, where its main thread waits in the kernel, and the number of its system call
    (-1: none, or the kernel does not say)."""
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
