# Python's stacks of other processes: how a process offers them, how their text is read, how those of many ranks merge.
# Touches faulthandler and a memory file. Needs the standard library alone, because agents use it.
"""A rank registers a signal with faulthandler, whose handler is written in C and needs neither Python's lock nor
memory: it also answers while a library holds the lock. It writes to a memory file, so it never waits for a reader.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SIGNAL = signal.SIGRTMIN + 12  # no library that we know uses it; a process gets it only when it has a handler
MOST_BYTES = 1 << 20
HEAD_BYTES = 16
_offered: list[threading.Thread] = []
_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


@dataclass(frozen=True)
class Frame:
    """A line that a thread is in."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Thread:
    """A thread and its frames, the innermost first."""

    ident: int
    frames: tuple[Frame, ...]


class StacksFile:
    """A memory file to which a rank appends its stacks: a new one, which its agent reads.

    It begins with the number of the thread that gets the signal.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("farandole-stacks", os.MFD_CLOEXEC)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_APPEND)  # for all who share it: after clear() the next text is first

    def clear(self) -> None:
        """Removes the last stacks."""
        os.ftruncate(self.fd, HEAD_BYTES)

    @property
    def thread(self) -> int:
        """The thread that gets the signal; 0: the rank offers no stacks."""
        with contextlib.suppress(ValueError):
            return int(os.pread(self.fd, HEAD_BYTES, 0))
        return 0

    @property
    def size(self) -> int:
        """The number of bytes that have been written."""
        return max(0, os.fstat(self.fd).st_size - HEAD_BYTES)

    def text(self) -> str:
        """What has been written."""
        return os.pread(self.fd, MOST_BYTES, HEAD_BYTES).decode(errors="replace")

    def close(self) -> None:
        """Frees it."""
        os.close(self.fd)


def offer(fd: int | None) -> None:
    """From now on this process writes the stacks of all its threads to `fd` when one of them gets the signal.

    That thread does nothing else: a signal ends some waits in C libraries, and those of the program must not end.
    """
    if fd is None or _offered:
        return
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        # A child of a rank has the rank's variables, but not its files.
        if "farandole-stacks" not in os.readlink(f"/proc/self/fd/{fd}"):
            return
        faulthandler.register(SIGNAL, file=fd, all_threads=True)
        thread = threading.Thread(target=threading.Event().wait, name="farandole-stacks", daemon=True)
        thread.start()
        os.write(fd, f"{thread.native_id:<{HEAD_BYTES}}".encode())
        _offered.append(thread)


def offers(pid: int) -> bool:
    """Whether a process has a handler for the signal; without one the signal would end it."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False


def parse(text: str) -> list[Thread]:
    """The threads in a text of faulthandler."""
    found: list[tuple[int, list[Frame]]] = []
    for line in text.splitlines():
        if (start := _THREAD.match(line)) is not None:
            found.append((int(start[2], 16), []))
        elif found and (frame := _FRAME.match(line)) is not None:
            number = int(frame[2]) if frame[2].isdecimal() else 0
            found[-1][1].append(Frame(frame[1], number, frame[3]))
    return [Thread(ident, tuple(frames)) for ident, frames in found]


def main_of(threads: Sequence[Thread], ident: int) -> Thread | None:
    """The main thread of a process; `ident`: its identifier. faulthandler writes the oldest thread last."""
    return next((one for one in threads if one.ident == ident), threads[-1] if threads else None)


def ranks_text(ranks: Iterable[int]) -> str:
    """A short text for a set of ranks.

    >>> ranks_text([5, 0, 1, 2])
    '0-2, 5'
    """
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def short(file: str) -> str:
    """The end of a path that tells a reader which file it is."""
    for mark in ("/site-packages/", "/dist-packages/"):
        if mark in file:
            return file.rpartition(mark)[2]
    parts = file.split("/")
    for index in range(len(parts) - 1, 0, -1):
        if re.fullmatch(r"python3(\.\d+)?", parts[index - 1]):
            return "/".join(parts[index:])
        if parts[index - 1] == "farandole":
            return "/".join(parts[index - 1 :])
    return "/".join(parts[-2:])


def merge(stacks: Mapping[int, Sequence[Frame]], sources: Mapping[tuple[str, int], str] | None = None) -> list[str]:
    """One tree of the stacks (rank -> frames, the innermost first): each frame once, with the ranks that are in it."""
    outermost = {rank: tuple(reversed(frames)) for rank, frames in stacks.items()}
    lines: list[str] = []
    _branch(outermost, 0, 0, sources or {}, lines)
    return lines


def _branch(
    stacks: Mapping[int, Sequence[Frame]],
    depth: int,
    indent: int,
    sources: Mapping[tuple[str, int], str],
    lines: list[str],
) -> None:
    while stacks:
        below: dict[Frame, dict[int, Sequence[Frame]]] = {}
        for rank, frames in stacks.items():
            if depth < len(frames):
                below.setdefault(frames[depth], {})[rank] = frames
        split = len(below) + (sum(map(len, below.values())) < len(stacks)) > 1
        for frame, inside in sorted(below.items(), key=lambda entry: (-len(entry[1]), min(entry[1]))):
            text = f"{short(frame.file)}:{frame.line} {frame.function}"
            source = sources.get((frame.file, frame.line), "")
            who = f"[{ranks_text(inside)}] " if split or depth == 0 else ""
            lines.append("  " * indent + who + text + (f"    {source}" if source else ""))
            if split:
                _branch(inside, depth + 1, indent + 1, sources, lines)
        if split:
            return
        stacks = next(iter(below.values()), {})
        depth += 1
