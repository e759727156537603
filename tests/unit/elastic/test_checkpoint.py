"""Checkpoints are complete or do not exist, whatever happens while they are written; damaged ones are refused.
The tests kill real processes that write; a full disk is a small tmpfs (root). Rows 19 and 20 of docs/faults.md."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.elastic import ObjectState, checkpoint, commits, load_from, safetensors, save_to, trees
from farandole.elastic.safetensors import Block, Damaged

SYSTEM_CALLS = ("open", "write", "fsync", "close", "rename", "mkdir", "unlink", "rmdir", "listdir")


def make_state(**values: Any) -> ObjectState:
    return ObjectState(lambda value: value, lambda: 0, **values)


def blocks_of(number: int) -> dict[str, Block]:
    return {"weights": Block("F32", (1000,), np.full(1000, number, dtype=np.float32).view(np.uint8))}


def write(path: Path, number: int, keep: int = 2) -> None:
    text = json.dumps({"sharded": [], "replicated": [["weights", ["array", "weights"]], ["number", number]]})
    checkpoint.write(str(path), os.urandom(8).hex(), 0, 1, keep, number, blocks_of(number), text)


def loaded_number(path: Path) -> int:
    """Loads the newest good checkpoint, checks its contents and returns its number; 0 if there is none."""
    loaded = checkpoint.load(str(path))
    if loaded is None:
        return 0
    number, tree, _ = loaded
    assert tree["number"] == number and (tree["weights"] == number).all() and tree["weights"].shape == (1000,)
    return number


# --- row 19: what happens while a checkpoint is written --------------------------------------------------------------


def kill_at(index: int, half: bool) -> None:
    """Makes call `index` (from 0) of SYSTEM_CALLS kill this process.

    The call does nothing; or with `half`, a write writes half of its bytes, and any other call does its work.
    """
    calls_left = index

    def killing(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_or_die(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls_left
            calls_left -= 1
            if calls_left < 0:
                if half and name == "write":
                    call(args[0], args[1][: len(args[1]) // 2])
                elif half:
                    call(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return call_or_die

    for name in SYSTEM_CALLS:
        setattr(os, name, killing(name, getattr(os, name)))


def writer_was_killed(path: Path, number: int, index: int, half: bool) -> bool:
    """Writes a checkpoint in a process that is killed at call `index`; False when the process ended before that."""
    pid = os.fork()
    if pid == 0:
        try:
            kill_at(index, half)
            write(path, number)
        except BaseException:
            os._exit(9)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A directory in memory. Hundreds of writers are faster there, and a killed process leaves the same files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield Path(folder)


@pytest.mark.chaos
def test_row_19_killed_at_every_system_call(memory_folder: Path) -> None:
    kills = 0
    for half in (False, True):
        for before in (0, 1, 3):  # how many checkpoints exist already
            index = 0
            while True:
                path = memory_folder / f"{half}-{before}-{index}"
                for number in range(1, before + 1):
                    write(path, number)
                if not writer_was_killed(path, 7, index, half):
                    break
                kills += 1
                assert loaded_number(path) in (before, 7)
                write(path, 8)  # the next writer removes what the killed one left
                assert loaded_number(path) == 8
                names = sorted(os.listdir(path))
                assert all(name == ".lock" or name.startswith("checkpoint-") for name in names), names
                assert len(names) <= 3
                index += 1
            assert loaded_number(path) == 7
    print(f"{kills} writers killed, every checkpoint readable")
    assert kills > 150


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_row_19_killed_at_random_system_calls(memory_folder: Path) -> None:
    """Kills 100 writers. `make chaos` kills 800: with those of the test above they are about a thousand."""
    draw = random.Random(19)
    newest, number, kills = 0, 0, 0
    wanted = 800 if "CHAOS_N" in os.environ else 100
    while kills < wanted:
        number += 1
        if writer_was_killed(memory_folder, number, draw.randrange(60), draw.random() < 0.5):
            kills += 1
            loaded = loaded_number(memory_folder)
            assert loaded in (newest, number)
            newest = loaded
        else:
            newest = number
            assert loaded_number(memory_folder) == number
    assert number > kills  # some writers ended before they were killed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    path = tmp_path / "small"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_row_19_the_disk_is_full(small_disk: Path) -> None:
    state = make_state(weights=np.ones(60_000, dtype=np.float32))
    state.commit()
    path = str(small_disk / "run")
    save_to(state, path, wait=True)
    state.weights = np.ones(600_000, dtype=np.float32)
    state.commit()
    with pytest.raises(OSError, match="No space left") as caught:
        save_to(state, path, wait=True)
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == path and "MB are free" in str(caught.value)
    writing = save_to(state, path)  # a write in the background raises nothing, so that training continues
    assert writing.settle(30) and isinstance(writing.error, OSError)
    state.commit()
    restored = make_state(weights=None)
    assert load_from(restored, path) == 1 and restored.weights.shape == (60_000,)
    assert sorted(os.listdir(path)) == [".lock", "checkpoint-00000001"]
    state.weights = np.zeros(60_000, dtype=np.float32)
    state.commit()
    save_to(state, path, wait=True)  # writing works again when there is room
    assert load_from(restored, path) == 4 and (restored.weights == 0).all()


def test_row_19_read_only(small_disk: Path) -> None:
    state = make_state(x=1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OSError, match="Read-only") as caught:
        save_to(state, str(small_disk / "run"), wait=True)
    assert str(small_disk) in str(caught.value)


def test_row_19_a_slow_fsync_does_not_block_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (release.wait(30), fsync(handle)))
    state = make_state(x=np.arange(10), step=0)
    state.commit()
    first = save_to(state, str(tmp_path))
    for step in range(1, 4):
        state.step = step
        state.commit()
        assert save_to(state, str(tmp_path)).skipped  # only one checkpoint is written at a time
    assert not first.done
    release.set()
    first.wait(30)
    save_to(state, str(tmp_path), wait=True)
    assert [number for number, _ in checkpoint.finished(str(tmp_path))] == [1, 2]
    restored = make_state(x=None, step=-1)
    assert load_from(restored, str(tmp_path)) == 4 and restored.step == 3
    (tmp_path / "checkpoint-00000002" / "manifest.json").unlink()
    assert load_from(restored, str(tmp_path)) == 1 and restored.step == 0  # what the slow write began with


def test_two_jobs_cannot_write_into_one_directory(tmp_path: Path) -> None:
    with checkpoint._lock(str(tmp_path)), pytest.raises(OSError, match="another job is writing"):
        write(tmp_path, 1)


# --- row 20: damaged and hostile checkpoints -------------------------------------------------------------------------


def damage(folder: Path, draw: random.Random) -> str:
    file = draw.choice([folder / "manifest.json", folder / "part-00000.safetensors"])
    data = bytearray(file.read_bytes())
    kind = draw.choice(["flip", "truncate", "grow", "missing", "empty"])
    if kind == "flip":
        place = draw.randrange(len(data))
        data[place] ^= 1 << draw.randrange(8)
    elif kind == "truncate":
        del data[draw.randrange(len(data)) :]
    elif kind == "grow":
        data += b"x"
    elif kind == "empty":
        data.clear()
    if kind == "missing":
        file.unlink()
    else:
        file.write_bytes(data)
    return f"{kind} {file.name}"


def test_row_20_the_next_older_checkpoint_replaces_a_damaged_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(20)
    for trial in range(150):
        path = tmp_path / str(trial)
        write(path, 1)
        write(path, 2)
        what = damage(path / "checkpoint-00000002", draw)
        caplog.clear()
        assert loaded_number(path) == 1, what
        assert "checkpoint-00000002: " in caplog.text, what
        damage(path / "checkpoint-00000001", draw)
        with pytest.raises(Damaged, match="no good checkpoint"):
            checkpoint.load(str(path))


def file_with(header: Any, body: bytes = b"") -> Any:
    """The bytes of a safetensors file with this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return np.frombuffer(len(text).to_bytes(8, "little") + text + body, dtype=np.uint8)


def one_tensor(**changes: Any) -> dict[str, Any]:
    """The header of a file with one tensor of 8 bytes; `changes` replace or add fields."""
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    "data",
    [
        np.frombuffer(b"", dtype=np.uint8),
        np.frombuffer((1 << 62).to_bytes(8, "little") + b"{}", dtype=np.uint8),
        file_with(b"{"),
        file_with(b"[" * 100_000),
        file_with([1]),
        file_with({"__metadata__": {"a": 1}}),
        file_with(one_tensor(), b"short"),
        file_with(one_tensor(), b"longer than it says"),
        file_with(one_tensor(shape=[1 << 62, 4]), bytes(8)),
        file_with(one_tensor(shape=[-1, -2]), bytes(8)),
        file_with(one_tensor(shape=3), bytes(8)),
        file_with(one_tensor(shape=[2.0]), bytes(8)),
        file_with(one_tensor(shape=[True, True]), bytes(8)),
        file_with(one_tensor(data_offsets=[8, 0]), bytes(8)),
        file_with(one_tensor(data_offsets=[0, 8, 9]), bytes(8)),
        file_with(one_tensor(dtype="F33"), bytes(8)),
        file_with(one_tensor(dtype=["F32"]), bytes(8)),
        file_with(one_tensor(more=1), bytes(8)),
        file_with({**one_tensor(), "b": one_tensor()["a"]}, bytes(8)),
        file_with({"a": 5}, bytes(8)),
    ],
    ids=range(20),
)
def test_row_20_hostile_headers(data: Any) -> None:
    with pytest.raises(Damaged):
        safetensors.parse(data)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_row_20_any_bytes(tail: bytes, length: int) -> None:
    data = np.frombuffer(length.to_bytes(8, "little") + tail, dtype=np.uint8)
    try:
        blocks, _ = safetensors.parse(data)
    except Damaged:
        return
    assert sum(block.data.size for block in blocks.values()) <= len(tail)


def test_row_20_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    write(tmp_path, 1)
    folder = tmp_path / "checkpoint-00000001"
    for file in ("../../secret", "/etc/passwd", ".."):
        part: dict[str, Any] = {"file": file, "bytes": 1, "chunk_bytes": 1, "digests": []}
        manifest = {"format": checkpoint.FORMAT, "version": 1, "commit": 1, "parts": [part]}
        (folder / "manifest.json").write_bytes(bytes(checkpoint._signed(manifest)))
        with pytest.raises(Damaged, match="invalid part"):
            checkpoint.read(str(folder))


@pytest.mark.parametrize(
    "code",
    [["exec", "x"], ["array", "none"], ["dict", 5], [1], {"a": 1}, ["bytes", "%"], ["dict", [[["list", []], 1]]]],
)
def test_row_20_invalid_trees(code: Any) -> None:
    with pytest.raises(Damaged):
        trees.decode(code, {})


# --- the contents of checkpoints -------------------------------------------------------------------------------------


def test_every_plain_value_is_restored(tmp_path: Path) -> None:
    values = {
        "nothing": None,
        "numbers": [1, -(2**80), 2.5, float("inf"), True],
        "texts": ("a", "ü\0", b"\x00\xff"),
        "keys": {1: "one", "two": {3, 4}, (5, 6): frozenset("x"), None: {}},
        "arrays": {name: np.arange(6).astype(name).reshape(2, 3) for name in ("int8", "uint16", "float16", "bool")},
        "scalar": np.float32(1.5),
        "empty": np.empty((0, 3)),
        "big_endian": np.arange(3, dtype=">i4"),
        "point": np.array(3.0),
        "dotted": {"a.b": np.ones(1), "a": {"b": np.zeros(1)}},
    }
    state = make_state(**values)
    state.commit()
    save_to(state, str(tmp_path), wait=True)
    restored = make_state(**dict.fromkeys(values))
    assert load_from(restored, str(tmp_path)) == 1 and commits(restored) == 1
    for name, value in values.items():
        np.testing.assert_equal(getattr(restored, name), value)
    assert restored.keys == values["keys"] and isinstance(restored.scalar, np.float32) and restored.point.shape == ()


def test_the_error_names_a_value_that_cannot_be_saved() -> None:
    state = make_state(a={"b": [object()]})
    with pytest.raises(TypeError, match=r"a\.b\.0 is a object"):
        save_to(state, "/nowhere")
    with pytest.raises(TypeError, match="dtype object"):
        save_to(make_state(a=np.array([{}])), "/nowhere")
    with pytest.raises(ValueError, match="keep=0"):
        save_to(state, "/nowhere", keep=0)


def test_a_checkpoint_with_other_fields_is_refused(tmp_path: Path) -> None:
    save_to(make_state(a=1, b=2), str(tmp_path), wait=True)
    with pytest.raises(ValueError, match="has b; this state has"):
        load_from(make_state(a=1), str(tmp_path))
    assert load_from(make_state(a=1), str(tmp_path / "nothing")) == 0


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    state = make_state(step=0)
    for step in range(6):
        state.step = step
        state.commit()
        save_to(state, str(tmp_path), keep=2, wait=True)
    assert [number for number, _ in checkpoint.finished(str(tmp_path))] == [5, 6]
    assert oct(os.stat(tmp_path / "checkpoint-00000006").st_mode)[-3:] == "700"


def test_the_safetensors_library_reads_our_files_and_we_read_its(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    state = make_state(model={"0.weight": np.arange(6.0).reshape(2, 3), "flags": np.array([True, False])}, step=4)
    save_to(state, str(tmp_path), wait=True)
    file = tmp_path / "checkpoint-00000001" / "part-00000.safetensors"
    official = library.load_file(file)
    assert sorted(official) == ["model.0.weight", "model.flags"]
    np.testing.assert_array_equal(official["model.0.weight"], state.model["0.weight"])
    written = library.save({"x": np.ones(3, dtype=np.float16)}, {"a": "b"})
    parsed, metadata = safetensors.parse(np.frombuffer(written, dtype=np.uint8))
    assert parsed["x"].dtype == "F16" and parsed["x"].shape == (3,) and metadata == {"a": "b"}


def test_rank_0_stops_waiting_for_the_part_of_a_lost_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "LOST_SECONDS", 0.2)
    write(tmp_path, 1)
    with pytest.raises(TimeoutError, match=r"a rank was lost .* the part of rank 1"):
        checkpoint.write(str(tmp_path), "ab" * 8, 0, 2, 2, 2, blocks_of(2), "{}", lambda: True)
    assert loaded_number(tmp_path) == 1 and not list(tmp_path.glob(".writing-*"))
