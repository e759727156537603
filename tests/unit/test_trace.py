# `farandole trace`: the numbers of a small timeline, the ten lines, and files that are no timelines.
# Touches only farandole.tools.trace.
"""tools/trace.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from farandole.tools import trace


def span(pid: int, name: str, began: float, ended: float) -> list[dict[str, Any]]:
    return [{"ph": "B", "pid": pid, "name": name, "ts": began}, {"ph": "E", "pid": pid, "ts": ended}]


def negotiation(pid: int, began: float, ended: float, arrivals: dict[int, float]) -> list[dict[str, Any]]:
    begin, end = span(pid, "NEGOTIATE_ALLREDUCE", began, ended)
    ticks = [{"ph": "X", "pid": pid, "name": str(rank), "ts": at, "dur": 0} for rank, at in arrivals.items()]
    return [begin, *ticks, end]


def named(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}


EVENTS = [
    named(1, "allreduce.w"),
    named(2, "allreduce.b"),
    {"ph": "i", "name": "CYCLE_START", "ts": 0, "s": "g"},
    *negotiation(1, 1000, 4000, {0: 1000, 2: 1500, 1: 4000}),
    *negotiation(2, 2000, 5000, {0: 2000, 1: 5000}),
    # Moving while tensor 2 still waits: that time is moving.
    {"ph": "B", "pid": 1, "name": "ALLREDUCE", "ts": 4000},
    *span(1, "QUEUE", 4000, 4500),
    {"ph": "E", "pid": 1, "ts": 6000},
    *span(2, "ALLREDUCE", 8000, 10000),
]


def test_time_is_sorted_into_computing_waiting_and_moving() -> None:
    summary = trace.summarise(EVENTS)
    assert (summary.span, summary.computing, summary.waiting, summary.moving) == (10000, 3000, 3000, 4000)
    assert summary.blamed == {"1": 3000 + 3000}
    assert summary.tensors == {"allreduce.w": 5000, "allreduce.b": 5000}


def test_complete_events_of_the_reference_engine_are_summarised() -> None:
    event = {"ph": "X", "pid": 0, "name": "ALLREDUCE", "ts": 10, "dur": 5, "args": {"tensor": "w"}}
    summary = trace.summarise([event])
    assert (summary.moving, summary.span, summary.tensors) == (5, 5, {"w": 5})


def test_the_summary_has_ten_lines_and_says_how_to_look_at_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.json"
    more = [entry for pid in range(10, 20) for entry in (named(pid, f"t{pid}"), *span(pid, "ALLREDUCE", 0, pid))]
    path.write_text(json.dumps(EVENTS + more))
    assert trace.main([str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert "rank 1 6.00 ms" in lines[2]
    assert "allreduce.w" in "".join(lines[5:9])
    assert "ui.perfetto.dev" in lines[-1]


def test_an_empty_timeline_is_summarised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    path.write_text("[\n]\n")
    assert trace.main([str(path)]) == 0
    assert "no tensors" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[1]", "{}", '"x"', '[{"ph": "B"}', "[" * 100_000, "\0"])
def test_a_file_that_is_no_timeline_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    assert trace.main([str(path)]) == 2
    message = capsys.readouterr().err
    assert str(path) in message
    assert "no timeline" in message


def test_malformed_events_are_ignored() -> None:
    odd: list[dict[str, Any]] = [
        {},
        {"ph": "E", "pid": 1},
        {"ph": "B", "ts": "late"},
        {"ph": "X", "args": None, "ts": None},
        {"ph": "M", "name": "process_name", "args": None},
    ]
    assert trace.summarise(odd).span == 0


def test_missing_file_and_missing_argument(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace.main([str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert trace.main([]) == 2
    assert "usage" in capsys.readouterr().err
