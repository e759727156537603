# The record's layout in Python against the core's, its reader, Flight Recorder's schema with torch's own analyser.
# Touches memory files and the native library.
from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.engine.interface import NAMES, Kind, ReduceOp
from farandole.observe import flight, records, stacks
from farandole.observe.records import Operation, Record, RecordFile

HEADER = Path(__file__).parents[3] / "core/trace/recorder.h"


def test_the_names_and_sizes_are_those_of_the_core() -> None:
    assert list(records.KINDS) == [kind.name.lower() for kind in Kind]
    assert records.DTYPES == NAMES and list(records.REDUCTIONS) == [op.name.lower() for op in ReduceOp]
    text = HEADER.read_text()
    assert f"kEntries = {records.ENTRIES};" in text and f"kEntryBytes = {records.ENTRY_BYTES};" in text
    found = re.search(r"kLayout = ([0-9x']+);", text)
    assert found is not None and int(found[1].replace("'", ""), 0) == records.LAYOUT
    assert f"FARANDOLE_RECORD_BYTES {records.RECORD_BYTES} " in (HEADER.parents[1] / "api/farandole.h").read_text()


def written(*rows: tuple[int, int, int, str]) -> RecordFile:
    """A file with operations: number, when submitted, when done, name."""
    file = RecordFile()
    counts = len(rows), sum(bool(row[2]) for row in rows)
    page = records._PAGE.pack(records.LAYOUT, records.ENTRIES, *counts, 5, 1, 2, 3, 4, 0, 0, 0, 0)
    os.pwrite(file.fd, page, 0)
    os.pwrite(file.fd, struct.pack("=4I", 0, 2, 0, 1), 88)
    for number, submitted, done, name in rows:
        times, form = (submitted, done, done, done), (0, 8, 1, 16, 2, 4, 3, 0, 0)
        entry = records._ENTRY.pack(number, *times, 48, number, 0, 3, -1, 0, *form, name.encode())
        os.pwrite(file.fd, entry, records.PAGE_BYTES + number % records.ENTRIES * records.ENTRY_BYTES)
    return file


def test_a_record_file_is_read_and_shows_what_waits() -> None:
    file = written((1025, 300, 0, "grad.1"), (1024, 200, 210, "grad.0"), (1026, 400, 0, "grad.2"))
    try:
        assert file.note_ns == 0 and file.waiting_since() == 300
        file.introduce(77, 0xABC, 0.5, 60.0)
        assert file.note_ns == 500_000_000
        found = records.read(file.bytes())
        assert found is not None
        assert (found.rank, found.size, found.generation, found.pid, found.main_thread) == (1, 2, 3, 77, 0xABC)
        assert (found.note_seconds, found.warning_seconds, found.groups) == (0.5, 60.0, {0: (0, 1)})
        assert [one.name for one in found.operations] == ["grad.0", "grad.1", "grad.2"]
        first = found.operations[0]
        assert (first.kind, first.dtype, first.reduction, first.shape) == ("allreduce", "float32", "sum", (4, 3))
        assert (first.algorithm, first.pending, found.operations[1].pending) == ("shared memory", False, True)
    finally:
        file.close()


def test_an_empty_or_short_record_is_none() -> None:
    file = RecordFile()
    try:
        assert records.read(file.bytes()) is None and file.waiting_since() == 0
    finally:
        file.close()
    assert records.read(b"short") is None


def test_a_descriptor_that_is_something_else_is_not_used(tmp_path: Path) -> None:
    with open(tmp_path / "other", "wb") as other:
        other.truncate(records.RECORD_BYTES)
        file = records.inherited(other.fileno())
        assert os.fstat(file.fd).st_ino != os.fstat(other.fileno()).st_ino
        file.close()
        stacks.offer(other.fileno())
        assert not stacks.offers(os.getpid())


def test_equal_stacks_of_ranks_are_merged_into_one_tree() -> None:
    text = """Thread 0x00000000000000aa (most recent call first):
  File "/a/b/reader.py", line 3 in read

Current thread 0x00000000000000bb (most recent call first):
  File "/a/b/c.py", line 2 in inner
  File "/a/b/c.py", line 9 in <module>
"""
    threads = stacks.parse(text)
    assert [one.ident for one in threads] == [0xAA, 0xBB] and threads[1].frames[0].function == "inner"
    main = stacks.main_of(threads, 0xBB)
    assert main is not None and stacks.main_of(threads, 0x1) == main  # the last one is the oldest
    other = (stacks.Frame("/a/b/c.py", 5, "other"), stacks.Frame("/a/b/c.py", 9, "<module>"))
    lines = stacks.merge({0: main.frames, 1: other, 2: main.frames}, {("/a/b/c.py", 2): "wait()"})
    assert lines == ["[0-2] b/c.py:9 <module>", "[0, 2] b/c.py:2 inner    wait()", "[1] b/c.py:5 other"]


def operations(names: str, left: str) -> tuple[Operation, ...]:
    found = []
    for place, name in enumerate(names + left, 1):
        moment = 1000 * place
        done = moment + 10 if place <= len(names) else 0
        found.append(
            Operation(place, name, "allreduce", "float32", "sum", (4, 3), 2, 48, 0, 1, place if done else 0, -1, moment,
                      done, done, done, 0, "")
        )  # fmt: skip
    return tuple(found)


def test_torchs_analyser_reads_the_last_operations(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.flight_recorder")
    left = {0: "d", 1: ""}
    for rank in left:
        known = operations("abc", left[rank])
        flight.write(tmp_path, {rank: Record(rank, 2, 1, 1, 1, 5, 60, 0, len(known), 3, {0: (0, 1)}, known)})
    words = ["-m", "torch.distributed.flight_recorder.fr_trace", str(tmp_path / "flight_recorder"), "-p", "rank_"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "missing ranks: {1}" in said and "collective: gloo:all_reduce" in said and "[[4, 3]]" in said, said
