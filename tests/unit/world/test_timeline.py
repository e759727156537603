# The timeline's file is JSON after every flush, and its thread exists only while it is written.
# Touches farandole.world.observe with an engine made of a list.
"""observe/timeline.py."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from waiting import until

from farandole.base.errors import ShutDown
from farandole.world.observe import timeline
from farandole.world.observe.timeline import Timeline, TraceFile


class Tape:
    """The tracing side of an engine."""

    rank = 0

    def __init__(self) -> None:
        self.switches: list[bool] = []
        self.lines: list[bytes] = []
        self.broken = False

    def trace(self, on: bool, mark_plans: bool = False) -> None:
        self.switches.append(on)

    def trace_drain(self) -> bytes:
        if self.broken:
            raise ShutDown("gone")
        lines, self.lines = self.lines, []
        return b"".join(lines)


def event(number: int) -> bytes:
    return json.dumps({"name": f"event {number}", "ph": "i", "ts": number}).encode() + b"\n"


def test_the_file_is_json_after_every_append(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "t.json")
    assert json.loads(file.path.read_text()) == []
    written = 0
    for count in (0, 1, 2, 0, 500, 1):
        file.append(b"".join(event(written + index) for index in range(count)))
        written += count
        assert [entry["ts"] for entry in json.loads(file.path.read_text())] == list(range(written))
    file.close()


def numbers(path: Path) -> list[int]:
    return [entry["ts"] for entry in json.loads(path.read_text())]


@pytest.mark.parametrize("order", ["first, others", "others, first"])
def test_several_ranks_with_one_path_leave_the_file_to_rank_0(order: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    files = {}
    for name in order.split(", "):
        files[name] = TraceFile(path, first=name == "first")
    if order == "others, first":
        files["others"].append(event(7))
    files["first"].append(event(1))
    files["others"].append(event(8))
    files["first"].append(event(2))
    assert numbers(path) == [1, 2]
    files["first"].close()
    files["others"].append(event(9))  # the file is complete
    assert numbers(path) == [1, 2]
    files["others"].close()


def test_a_rank_alone_with_a_path_writes_over_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for _ in range(2):
        file = TraceFile(path, first=False)
        file.append(event(1))
        file.append(event(2))
        assert numbers(path) == [1, 2]
        file.close()


def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TraceFile(tmp_path / "t.json")
    file.append(event(0))
    write, calls = os.pwrite, []

    def full(descriptor: int, data: bytes, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:10] if len(calls) == 1 else data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        file.append(event(1))
    assert len(calls) == 3
    assert [entry["ts"] for entry in json.loads(file.path.read_text())] == [0]
    file.close()


def test_events_arrive_while_it_runs_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "PERIOD_S", 0.01)
    tape, path = Tape(), tmp_path / "t.json"
    running = Timeline(tape, path)  # type: ignore[arg-type]
    tape.lines.append(event(0))
    until(lambda: json.loads(path.read_text()))
    assert len(json.loads(path.read_text())) == 1
    tape.lines.append(event(1))
    running.stop()
    running.stop()
    assert len(json.loads(path.read_text())) == 2
    assert tape.switches == [True, False]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("farandole")]


def test_an_engine_that_ends_does_not_break_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tape, path = Tape(), tmp_path / "t.json"
    running = Timeline(tape, path)  # type: ignore[arg-type]
    tape.broken = True
    running.stop()
    assert json.loads(path.read_text()) == []
    assert "is missing: gone" in caplog.text


def test_a_path_that_cannot_be_written_is_an_error_and_starts_no_timeline(tmp_path: Path) -> None:
    tape = Tape()
    with pytest.raises(OSError, match="No such file"):
        Timeline(tape, tmp_path / "nowhere" / "t.json")  # type: ignore[arg-type]
    assert tape.switches == []
