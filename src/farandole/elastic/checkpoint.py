# Checkpoints on disk: parts in the safetensors format, and a manifest that is written last. They contain no code.
# Touches the file system; the rooms operations and world; the files safetensors and trees.
"""A checkpoint is a directory. It gets its final name when all its files are on disk, so it is always complete."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..operations.objects import broadcast_object
from ..world.runtime import runtime
from . import safetensors, trees
from .safetensors import Block, Damaged

logger = logging.getLogger("farandole")

CHUNK_BYTES = 4 << 20  # each chunk has a checksum
PARTS_SECONDS = 600.0  # how long rank 0 waits for the parts of other ranks
LOST_SECONDS = 10.0  # how long it waits after a rank was lost, because the part may never come
FORMAT, VERSION = "farandole checkpoint", 1
MANIFEST = "manifest.json"
FINISHED, UNFINISHED, OLD = "checkpoint-", ".writing-", ".removing-"
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Writing:
    """A checkpoint that is being written."""

    def __init__(self, path: str, skipped: bool = False) -> None:
        self.path = path
        self.skipped = skipped  # this checkpoint was skipped, because another one was being written
        self.error: Exception | None = None
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it has ended, with an error or without."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until all is on disk; raises the error, or TimeoutError."""
        if not self.settle(timeout):
            raise TimeoutError(f"the checkpoint below {self.path} is still being written after {timeout} s")
        if self.error is not None:
            raise self.error

    def settle(self, timeout: float | None = None) -> bool:
        """Waits until it has ended, with an error or without; False after `timeout` seconds."""
        return self._done.wait(timeout)

    @classmethod
    def over(cls, path: str, skipped: bool) -> Writing:
        """An object for a rank that has nothing to write. It has ended already."""
        writing = cls(path, skipped)
        writing.finish()
        return writing

    def finish(self, error: Exception | None = None) -> None:
        """Marks it as ended."""
        self.error = error
        self._done.set()


class Writer:
    """Writes one checkpoint at a time, on a thread. Python waits for it at exit."""

    def __init__(self) -> None:
        self.current: Writing | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self.current is not None and not self.current.done

    def drain(self) -> None:
        """Waits until no checkpoint is being written."""
        if self.current is not None:
            self.current.settle()

    def start(self, path: str, work: Callable[[], None]) -> Writing:
        """Runs `work` on a thread."""
        writing = self.current = Writing(path)

        def body() -> None:
            try:
                work()
                writing.finish()
            except Exception as error:
                explained = _explained(error, path)
                logger.warning("%s; training continues", explained)
                writing.finish(explained)

        threading.Thread(target=body, name="farandole-checkpoint").start()
        return writing


def _explained(error: Exception, path: str) -> Exception:
    if not isinstance(error, OSError) or error.errno is None:
        return error
    entry_path = path
    while not os.path.exists(entry_path):
        entry_path = os.path.dirname(entry_path)
    free = f"; {shutil.disk_usage(entry_path).free / 1e6:.1f} MB are free there"
    return OSError(error.errno, f"the checkpoint was not written: {error.strerror}{free}", path)


# --- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    """A commit that is written to disk. Its tensors do not change until `release` is called."""

    commit: int
    replicated: dict[str, Any]
    sharded: dict[str, dict[Any, Any]] | None  # this rank's own parts; None: the state has no such parts
    release: Callable[[], None] = lambda: None


def save(writer: Writer, snapshot: Snapshot, path: str, keep: int, wait: bool) -> Writing:
    """Writes a checkpoint: see `farandole.elastic.save_to`."""
    rank, size = (runtime.rank, runtime.size) if runtime.initialized else (0, 1)
    parts = size if snapshot.sharded is not None else 1
    if wait:
        writer.drain()
    nonce, skip = os.urandom(8).hex(), writer.busy
    losses = runtime.notifications.losses
    if parts > 1:
        nonce, skip = broadcast_object((nonce, skip), name="elastic.checkpoint")
        if not skip:
            writer.drain()  # rank 0 has no other checkpoint, and will wait for the part of this rank
    if skip or rank >= parts:
        snapshot.release()
        if skip:
            logger.info("a checkpoint below %s is skipped: the one before it is still being written", path)
        return Writing.over(path, skip)
    try:
        blocks, text = _encoded(snapshot, rank)
    except BaseException:
        snapshot.release()
        raise

    def work() -> None:
        try:
            lost = lambda: runtime.notifications.losses != losses  # noqa: E731
            write(path, nonce, rank, parts, keep, snapshot.commit, blocks, text, lost)
        finally:
            snapshot.release()

    writing = writer.start(path, work)
    if wait:
        writing.wait()
    return writing


def _encoded(snapshot: Snapshot, rank: int) -> tuple[dict[str, Block], str]:
    blocks: dict[str, Block] = {}
    sharded, replicated = snapshot.sharded or {}, snapshot.replicated if rank == 0 else {}
    code = {
        "sharded": [[name, trees.encode(value, f"sharded.{name}", blocks)] for name, value in sharded.items()],
        "replicated": [[name, trees.encode(value, name, blocks)] for name, value in replicated.items()],
    }
    return blocks, json.dumps(code, separators=(",", ":"))


def write(
    path: str,
    nonce: str,
    rank: int,
    parts: int,
    keep: int,
    commit: int,
    blocks: dict[str, Block],
    text: str,
    lost: Callable[[], bool] = lambda: False,
) -> None:
    """Writes this rank's part. Rank 0 also waits for the other parts, writes the manifest and renames the directory.

    `lost()`: whether a rank has been lost since the ranks began to write.
    """
    os.makedirs(path, mode=0o700, exist_ok=True)
    folder = os.path.join(path, UNFINISHED + nonce)
    if rank != 0:
        _make_folder(folder)
        _write_part(folder, rank, blocks, text)
        return
    with _lock(path):
        _tidy(path, folder)
        _make_folder(folder)
        try:
            _write_part(folder, rank, blocks, text)
            manifest = {"format": FORMAT, "version": VERSION, "commit": commit, "parts": _parts(folder, parts, lost)}
            _write_file(folder, MANIFEST, [_signed(manifest)])
            numbers = [number for number, _ in finished(path)]
            os.rename(folder, os.path.join(path, f"{FINISHED}{max(numbers, default=0) + 1:08d}"))
        except BaseException:
            with contextlib.suppress(OSError):
                _remove(folder)
            raise
        _sync_folder(path)
        for _, old in finished(path)[:-keep]:
            moved_path = os.path.join(path, OLD + os.path.basename(old))
            os.rename(old, moved_path)  # first, so that an incomplete directory is never used as a checkpoint
            _remove(moved_path)


@contextlib.contextmanager
def _lock(path: str) -> Iterator[None]:
    """Locks the directory. Two jobs in one directory would remove each other's files, so the second gets an error."""
    lock = os.open(os.path.join(path, ".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                raise OSError(errno.EBUSY, "another job is writing checkpoints there", path) from None
            # Some shared file systems have no locks.
        yield
    finally:
        os.close(lock)


def _make_folder(folder: str) -> None:
    with contextlib.suppress(FileExistsError):  # another rank may have made it
        os.mkdir(folder, 0o700)


def _write_part(folder: str, rank: int, blocks: dict[str, Block], text: str) -> None:
    name = f"part-{rank:05d}.safetensors"
    size, digests = _write_file(folder, name, safetensors.pieces(blocks, {"farandole": text}))
    about = {"file": name, "bytes": size, "chunk_bytes": CHUNK_BYTES, "digests": digests}
    _write_file(folder, f"part-{rank:05d}.json", [_signed(about)])


def _parts(folder: str, count: int, lost: Callable[[], bool]) -> list[Any]:
    """The description of each rank's part, when all parts are on disk."""
    deadline, shortened = time.monotonic() + PARTS_SECONDS, False
    found: list[Any] = []
    while len(found) < count:
        try:
            found.append(_read_signed(os.path.join(folder, f"part-{len(found):05d}.json")))
        except FileNotFoundError:
            if not shortened and lost():
                deadline, shortened = time.monotonic() + LOST_SECONDS, True
            if time.monotonic() > deadline:
                if shortened:
                    raise TimeoutError(
                        f"a rank was lost while the checkpoint was written, and the part of rank {len(found)} did not "
                        f"appear in {folder}; the checkpoint before it stays the newest"
                    ) from None
                raise TimeoutError(
                    f"the part of rank {len(found)} did not appear in {folder} within {PARTS_SECONDS:.0f} s; with "
                    "sharded state all hosts have to share the directory"
                ) from None
            time.sleep(0.02)  # a shared file system sends no notifications to other hosts
    return found


def _write_file(folder: str, name: str, pieces: Iterable[memoryview]) -> tuple[int, list[str]]:
    """Writes a file under a temporary name and renames it when it is on disk. Returns its size and checksums."""
    path = os.path.join(folder, "." + name)
    file = os.open(path, _NEW_FILE, 0o600)
    try:
        size, digests, left = 0, [], CHUNK_BYTES
        digest = hashlib.blake2b(digest_size=16)
        for piece in pieces:
            while len(piece):
                written = os.write(file, piece[:left])
                digest.update(piece[:written])
                piece = piece[written:]
                size, left = size + written, left - written
                if left == 0:
                    digests.append(digest.hexdigest())
                    digest, left = hashlib.blake2b(digest_size=16), CHUNK_BYTES
        if left < CHUNK_BYTES:
            digests.append(digest.hexdigest())
        os.fsync(file)
    finally:
        os.close(file)
    os.rename(path, os.path.join(folder, name))
    _sync_folder(folder)
    return size, digests


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _tidy(path: str, own: str) -> None:
    """Removes incomplete directories of earlier writers that were killed."""
    for name in os.listdir(path):
        entry_path = os.path.join(path, name)
        if name.startswith((UNFINISHED, OLD)) and entry_path != own:
            _remove(entry_path)


def _remove(folder: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def _signed(value: Any) -> memoryview:
    text = json.dumps(value, separators=(",", ":")).encode()
    return memoryview(text + b"\n" + hashlib.blake2b(text, digest_size=16).hexdigest().encode() + b"\n")


# --- reading ---------------------------------------------------------------------------------------------------------


def finished(path: str) -> list[tuple[int, str]]:
    """The checkpoints below a path with their numbers, oldest first. They are not checked yet."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return []
    numbers = [(name.removeprefix(FINISHED), name) for name in names if name.startswith(FINISHED)]
    return sorted((int(number), os.path.join(path, name)) for number, name in numbers if number.isdecimal())


def load(path: str) -> tuple[int, dict[str, Any], dict[str, dict[Any, Any]]] | None:
    """The newest good checkpoint below a path; None without checkpoints. Raises Damaged if none is good."""
    reasons = []
    for _, folder in reversed(finished(path)):
        try:
            return read(folder)
        except (Damaged, OSError) as error:
            reasons.append(f"{folder}: {error}")
            logger.warning("a checkpoint is refused: %s", reasons[-1])
    if reasons:
        raise Damaged("there is no good checkpoint below " + path + ":\n  " + "\n  ".join(reasons))
    return None


def read(folder: str) -> tuple[int, dict[str, Any], dict[str, dict[Any, Any]]]:
    """The commit number, the replicated tree and the sharded parts. Damaged or OSError say what is wrong."""
    manifest = _read_signed(os.path.join(folder, MANIFEST))
    try:
        if manifest["format"] != FORMAT or manifest["version"] != VERSION:
            raise Damaged(f"version {manifest['version']} of {manifest['format']!r}; this is {VERSION} of {FORMAT!r}")
        commit, parts = int(manifest["commit"]), list(manifest["parts"])
        files = [(str(part["file"]), int(part["bytes"]), int(part["chunk_bytes"]), part["digests"]) for part in parts]
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"the manifest is not one that Farandole has written: {error!r}") from None
    replicated: dict[str, Any] = {}
    sharded: dict[str, dict[Any, Any]] = {}
    for name, size, chunk, digests in files:
        blocks, metadata = safetensors.parse(_read_checked(folder, name, size, chunk, digests))
        try:
            code = json.loads(metadata["farandole"])
            for part, value in code["sharded"]:
                sharded.setdefault(part, {}).update(trees.decode(value, blocks))
            replicated |= {part: trees.decode(value, blocks) for part, value in code["replicated"]}
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise Damaged(f"{name}: {error}") from None
    return commit, replicated, sharded


def _read_signed(entry_path: str) -> Any:
    with open(entry_path, "rb") as file:
        text, _, digest = file.read().rstrip(b"\n").rpartition(b"\n")
    if hashlib.blake2b(text, digest_size=16).hexdigest().encode() != digest:
        raise Damaged(f"checksum mismatch in {os.path.basename(entry_path)}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{os.path.basename(entry_path)} is not JSON: {error}") from None


def _read_checked(folder: str, name: str, size: int, chunk: int, digests: Any) -> Any:
    if re.fullmatch(r"part-\d{5}\.safetensors", name) is None or chunk < 1 or not isinstance(digests, list):
        raise Damaged(f"the manifest names an invalid part: {name!r}")
    with open(os.path.join(folder, name), "rb") as file:
        there = os.fstat(file.fileno()).st_size
        if there != size:
            raise Damaged(f"{name} has {there} bytes instead of {size}")
        data = np.fromfile(file, dtype=np.uint8)
    found = [hashlib.blake2b(data[at : at + chunk].data, digest_size=16).hexdigest() for at in range(0, size, chunk)]
    for index, (one, other) in enumerate(zip(found, digests, strict=False)):
        if one != other:
            raise Damaged(f"{name}: checksum mismatch in bytes {index * chunk} to {min(size, (index + 1) * chunk)}")
    if len(found) != len(digests):
        raise Damaged(f"{name}: {len(digests)} checksums for {len(found)} chunks")
    return data
