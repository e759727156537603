# The memory file with a rank's last operations: how the core lays it out, and how another process reads it.
# Touches memory files. Needs the standard library alone, because agents read it.
"""The core writes (core/trace/recorder.h has the same layout); `read(file.bytes())` returns what is in it.

The file outlives the process that writes it: whoever holds it can read what a killed rank did last.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass, field
from typing import Any

PAGE_BYTES = 4096
ENTRIES = 1024
ENTRY_BYTES = 256
RECORD_BYTES = PAGE_BYTES + ENTRIES * ENTRY_BYTES
LAYOUT = 0x0000_0001_4344_5246
_PAGE = struct.Struct("=4Qq2i2Iq3Q")
_OF_PYTHON = struct.Struct("=q3Q")  # the end of the page's numbers: Python writes them
_OF_PYTHON_AT = 56
_GROUPS_AT = 88
_ENTRY = struct.Struct("=Q5qQiIii5B11x4q136s")
# The order is that of the core; tests compare it with engine/interface.py, which agents do not load.
KINDS = (
    "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier",
    "join", "add_group", "remove_group", "send", "receive", "tune",
)  # fmt: skip
DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64", "bfloat16",
)  # fmt: skip
REDUCTIONS = ("average", "sum", "adasum", "min", "max", "product")
ALGORITHMS = {1: "ring", 2: "direct", 3: "doubling", 4: "tree", 16: "shared memory"}
PRECONDITION = 3  # the code of operations that failed because ranks disagree


@dataclass(frozen=True)
class Operation:
    """An operation of one rank. Times are nanoseconds of the monotonic clock; 0: that has not happened."""

    number: int
    name: str
    kind: str
    dtype: str
    reduction: str
    shape: tuple[int, ...]  # the first four dimensions
    dimensions: int
    bytes: int
    group: int
    generation: int
    sequence: int  # among the collectives of the group; 0: not known yet
    peer: int  # the root of a broadcast, the other side of a send or receive; -1: none
    submitted_ns: int
    ready_ns: int  # all ranks had submitted it
    begun_ns: int
    done_ns: int
    code: int  # 0: no error
    algorithm: str  # "" before the end, and for operations without one

    @property
    def pending(self) -> bool:
        """Whether it has not ended."""
        return self.done_ns == 0

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks to submit it."""
        return self.pending and not self.ready_ns and not self.begun_ns

    @property
    def between_two(self) -> bool:
        """Whether it is a send or a receive."""
        return self.kind in ("send", "receive")


@dataclass(frozen=True)
class Record:
    """What a rank has recorded."""

    rank: int
    size: int
    generation: int
    pid: int
    main_thread: int  # its identifier in Python
    note_seconds: float  # 0: nothing is said about stalled operations
    warning_seconds: float
    epoch_offset_ns: int  # wall-clock time minus the times of the operations
    submitted: int
    finished: int
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)
    operations: tuple[Operation, ...] = ()  # in order of submission


class RecordFile:
    """The memory file of one rank: a new one, or one behind a descriptor, which this object then owns."""

    def __init__(self, fd: int | None = None) -> None:
        self.shared = fd is not None  # another process holds it too
        if fd is None:
            fd = os.memfd_create("farandole-record", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.truncate(fd, RECORD_BYTES)
            with contextlib.suppress(OSError):  # so that a full memory never ends the rank; not all systems can
                os.posix_fallocate(fd, 0, RECORD_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.fd = fd
        self._memory = mmap.mmap(fd, RECORD_BYTES)
        self._words = memoryview(self._memory).cast("q")

    def introduce(self, pid: int, main_thread: int, note_seconds: float, warning_seconds: float) -> None:
        """Writes what the agent needs to know of the process."""
        milliseconds = round(note_seconds * 1000), round(warning_seconds * 1000)
        _OF_PYTHON.pack_into(self._memory, _OF_PYTHON_AT, pid, main_thread, *milliseconds)

    @property
    def note_ns(self) -> int:
        """How long an operation may wait before it is reported; 0: without limit, or there is no rank yet."""
        return self._words[_OF_PYTHON_AT // 8 + 2] * 1_000_000

    def waiting_since(self) -> int:
        """When the oldest operation that has not ended was submitted; 0: there is none."""
        if self._words[2] == self._words[3]:  # as many have ended as were submitted
            return 0
        step, first = ENTRY_BYTES // 8, PAGE_BYTES // 8
        columns = (self._words[first + offset :: step].tolist() for offset in (0, 1, 4))
        return min((since for number, since, done in zip(*columns, strict=True) if number and not done), default=0)

    def bytes(self) -> bytes:
        """All of it, as it is now."""
        return self._memory[:]

    def close(self) -> None:
        """Frees the memory of this process. A second call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._words.release()
            self._memory.close()
            os.close(fd)


def inherited(fd: int | None) -> RecordFile:
    """The file that the agent gave to this process as `fd`; a new one if it gave none."""
    if fd is not None:
        # A child of a rank has the rank's variables, but not its files.
        with contextlib.suppress(OSError, ValueError):
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if os.fstat(fd).st_size == RECORD_BYTES and seals & fcntl.F_SEAL_SHRINK:
                return RecordFile(os.dup(fd))
    return RecordFile()


def read(memory: bytes) -> Record | None:
    """What a rank has recorded; None when it has not begun, or another version has written it."""
    if len(memory) != RECORD_BYTES:
        return None
    layout, _, submitted, finished, epoch, rank, size, generation, words, pid, main, note, warning = _PAGE.unpack_from(
        memory
    )
    if layout != LAYOUT:
        return None
    groups = _groups(memory[_GROUPS_AT : _GROUPS_AT + 4 * min(words, (PAGE_BYTES - _GROUPS_AT) // 4)])
    found = [one for one in map(_operation, _ENTRY.iter_unpack(memory[PAGE_BYTES:])) if one is not None]
    found.sort(key=lambda one: one.number)
    times = (note / 1000, warning / 1000)
    return Record(rank, size, generation, pid, main, *times, epoch, submitted, finished, groups, tuple(found))


def _groups(data: bytes) -> dict[int, tuple[int, ...]]:
    numbers = struct.unpack(f"={len(data) // 4}I", data)
    found: dict[int, tuple[int, ...]] = {}
    position = 0
    while position + 2 <= len(numbers):
        group, count = numbers[position : position + 2]
        found[group] = numbers[position + 2 : position + 2 + count]
        position += 2 + count
    return found


def _operation(values: tuple[Any, ...]) -> Operation | None:
    number, submitted, ready, begun, done, size, sequence, group, generation, peer, code, kind, dtype, op, way = values[
        :15
    ]
    dimensions, shape, name = values[15], values[16:20], values[20]
    if not number:
        return None
    return Operation(
        number=number,
        name=name.partition(b"\0")[0].decode(errors="replace"),
        kind=_of(KINDS, kind),
        dtype=_of(DTYPES, dtype),
        reduction=_of(REDUCTIONS, op),
        shape=tuple(shape[:dimensions]),
        dimensions=dimensions,
        bytes=size,
        group=group,
        generation=generation,
        sequence=sequence,
        peer=peer,
        submitted_ns=submitted,
        ready_ns=ready,
        begun_ns=begun,
        done_ns=done,
        code=code,
        algorithm=ALGORITHMS.get(way, ""),
    )


def _of(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else f"number {number}"
