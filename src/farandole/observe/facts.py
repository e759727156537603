# What is known of one rank at one moment, from its agent's report: its operations, its stack, the state of its process.
# Pure: it gets texts and bytes.
"""`Facts.read(...)` turns a report of launch/examine.py into numbers and frames. A report may be incomplete."""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from dataclasses import dataclass, field
from typing import Any

from farandole.observe import records, stacks
from farandole.observe.records import Operation, Record
from farandole.observe.stacks import Frame

# Numbers of system calls on x86_64 and on arm64 that tell what a thread waits for.
_FUTEX = (202, 98)
_LOCKS_OF_FILES = (73, 32)  # flock
_LOADERS = (
    "torch/utils/data/", "torch/utils/data/dataloader.py", "tensorflow/python/data/", "farandole/data/",
    "webdataset/", "tensorflow_datasets/", "datasets/iterable_dataset.py", "datasets/arrow_dataset.py", "grain/",
)  # fmt: skip
_LOCK_FUNCTIONS = {
    "threading.py": ("acquire", "wait", "wait_for", "join", "__enter__", "_wait_for_tstate_lock"),
    "queue.py": ("get", "put", "join"),
    "futures/_base.py": ("result", "wait", "exception"),
    "multiprocessing/synchronize.py": ("acquire", "__enter__", "wait"),
    "multiprocessing/process.py": ("join",),
    "multiprocessing/pool.py": ("wait", "get", "join"),
    "filelock/_api.py": ("acquire",),
}
_LOCK_SOURCE = re.compile(r"\.acquire\(|\bwith\b.*\b\w*lock\w*|\.join\(\)|\.wait\(|\b(flock|lockf)\(", re.IGNORECASE)
_FILE_SOURCE = re.compile(
    r"\bopen\(|\.(read|write|readline|readlines|flush|fsync|read_text|read_bytes|write_text|write_bytes)\("
    r"|\bos\.(open|read|write|fsync|stat|listdir|scandir|rename|replace)\(|\b(torch|np|numpy)\.(save|load)\b|\bshutil\."
)
_FILE_MODULES = ("torch/serialization.py", "/shutil.py", "/pathlib.py", "numpy/lib/", "h5py/", "/gzip.py", "/zipfile")
_FILE_WAITS = re.compile(
    r"nfs|fuse|ceph|lustre|gpfs|ext4|xfs|btrfs|jbd2|folio|page_bit|io_schedule|wait_for_partner|fifo|iget|dentry|lookup"
)
_FREEZE_WAITS = re.compile(r"freez|refrigerator")
# Where a program waits for operations without a frame of ours, because a framework calls the core.
_FRAMEWORK_WAITS = (
    "torch/autograd/",
    "torch/distributed/",
    "tensorflow/python/eager/",
    "jax/_src/",
    "keras/src/backend",
)


_INSTALLED = ("/site-packages/", "/dist-packages/", "/farandole/", "/lib/python3")


@dataclass(frozen=True)
class Child:
    """A child process of a rank."""

    pid: int
    state: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Facts:
    """What one rank does. Times are those of its host's monotonic clock."""

    rank: int
    host: str
    pid: int = 0
    state: str = ""  # the kernel's letter
    wait: str = ""  # where it waits in the kernel
    call: int = -1
    busy: float = 0.0  # processors in use
    answered: bool = False  # it has written its stacks
    threads: tuple[stacks.Thread, ...] = ()
    sources: dict[tuple[str, int], str] = field(default_factory=dict)
    children: tuple[Child, ...] = ()
    record: Record | None = None
    now_ns: int = 0
    whole: bytes = b""  # the record, as the core wrote it

    @classmethod
    def read(cls, rank: int, host: str, facts: bytes, record: bytes) -> Facts:
        """From the agent's report."""
        report: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            report = json.loads(facts)
        memory = b""
        with contextlib.suppress(zlib.error):
            memory = zlib.decompressobj().decompress(record, records.RECORD_BYTES)
        known = records.read(memory)
        children = tuple(
            Child(one["pid"], one["state"], _main_frames(one["stack"], known)) for one in report.get("children", ())
        )
        return cls(
            rank=rank,
            host=host,
            pid=report.get("pid", 0),
            state=report.get("state", ""),
            wait=report.get("wait", ""),
            call=report.get("call", -1),
            busy=report.get("busy", 0.0),
            answered=report.get("answered", False),
            threads=tuple(stacks.parse(report.get("stack", ""))),
            sources={(file, line): text for file, line, text in report.get("sources", ())},
            children=children,
            record=known,
            now_ns=report.get("now_ns", 0),
            whole=memory if known is not None else b"",
        )

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The frames of the main thread, the innermost first."""
        main = stacks.main_of(self.threads, self.record.main_thread if self.record is not None else 0)
        return main.frames if main is not None else ()

    @property
    def pending(self) -> list[Operation]:
        """The operations of this rank that have not ended, the oldest first."""
        known = self.record.operations if self.record is not None else ()
        return sorted((one for one in known if one.pending), key=lambda one: one.submitted_ns)

    def age(self, operation: Operation) -> float:
        """Seconds since it was submitted."""
        return (self.now_ns - operation.submitted_ns) / 1e9

    @property
    def stopped(self) -> str:
        """Why the whole process does not run; "" when it does."""
        if self.state == "T":
            return "its process is stopped by a signal (SIGSTOP, or Ctrl-Z); `kill -CONT` lets it go on"
        if self.state == "t":
            return "a debugger holds its process"
        if _FREEZE_WAITS.search(self.wait):
            return "its process is frozen (the freezer of its control group)"
        return ""

    @property
    def waits_in_an_operation(self) -> bool:
        """Whether its main thread waits for one of its own pending operations."""
        if not self.pending or self.stopped:
            return False
        if not self.frames:
            return True  # nothing is known of what it does; it has submitted an operation
        own = any("/farandole/" in frame.file for frame in self.frames[:12])
        inner = self.frames[0].file
        return (own and self.loading is None) or any(part in inner for part in _FRAMEWORK_WAITS)

    @property
    def loading(self) -> Frame | None:
        """The frame of a data loader that the main thread is in."""
        return next((one for one in self.frames if any(part in one.file for part in _LOADERS)), None)

    @property
    def user_frame(self) -> Frame | None:
        """The innermost line of the user's own program: the one that a reader can change."""
        own = [one for one in self.frames if not _installed(one.file)]
        return own[0] if own else self.frames[0] if self.frames else None

    def user_line(self) -> str:
        """That line, with its source."""
        frame = self.user_frame
        if frame is None:
            return ""
        source = self.sources.get((frame.file, frame.line), "")
        return f"{stacks.short(frame.file)}:{frame.line} in {frame.function}" + (f": {source}" if source else "")

    @property
    def in_a_lock_of_a_file(self) -> bool:
        """Whether the main thread waits for a lock of a file."""
        return self.call in _LOCKS_OF_FILES or "lock_inode_wait" in self.wait

    @property
    def in_a_lock(self) -> bool:
        """Whether the main thread waits for a lock."""
        if not self.frames:
            return self.call in _FUTEX
        inner = self.frames[0]
        if any(inner.file.endswith(file) and inner.function in names for file, names in _LOCK_FUNCTIONS.items()):
            return True
        source = self.sources.get((inner.file, inner.line), "")
        idle = self.busy < 0.5
        waits = self.call in _FUTEX or self.wait.startswith("futex")
        return idle and (waits or (self.call < 0 and not self.wait and bool(_LOCK_SOURCE.search(source))))

    @property
    def in_the_file_system(self) -> bool:
        """Whether the main thread waits for a file."""
        if self.state == "D" or _FILE_WAITS.search(self.wait):
            return True
        if not self.frames:
            return False
        inner = self.frames[0]
        source = self.sources.get((inner.file, inner.line), "")
        sleeping = "nanosleep" in self.wait
        return not sleeping and (
            any(part in inner.file for part in _FILE_MODULES) or (bool(_FILE_SOURCE.search(source)) and self.busy < 0.9)
        )


def _main_frames(text: str, record: Record | None) -> tuple[Frame, ...]:
    main = stacks.main_of(stacks.parse(text), record.main_thread if record is not None else 0)
    return main.frames if main is not None else ()


def _installed(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    return file.startswith("<frozen") or any(part in file for part in _INSTALLED)
