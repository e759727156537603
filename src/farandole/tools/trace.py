# `farandole trace FILE`: summarises a timeline in ten lines.
# Reads one file; touches nothing else.
"""Divides the time of a rank into computing, waiting (and for which rank) and moving; names the slowest tensors."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

NEGOTIATE = "NEGOTIATE_"
SHOWN = 4  # so many tensors are shown, so that the output has ten lines
Span = tuple[float, float]


class BrokenTrace(ValueError):
    """The file is not a timeline; the message says why."""


@dataclass
class Summary:
    """Times are in microseconds."""

    events: int = 0
    span: float = 0.0
    computing: float = 0.0
    waiting: float = 0.0
    moving: float = 0.0
    blamed: dict[str, float] = field(default_factory=dict)  # rank -> how long other ranks waited for it
    tensors: dict[str, float] = field(default_factory=dict)  # name -> time from ready to done


def read(path: str) -> list[dict[str, Any]]:
    """The events of a file. BrokenTrace says what is wrong."""
    try:
        with open(path, encoding="utf-8") as file:
            events = json.load(file)
    except OSError as error:
        raise BrokenTrace(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise BrokenTrace(f"{path} is not JSON, so it is no timeline: {error}") from None
    if isinstance(events, dict):
        events = events.get("traceEvents")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise BrokenTrace(f"{path} is no timeline: expected a list of events")
    return events


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _operations(events: Iterable[dict[str, Any]]) -> Iterator[tuple[Any, str, Span, list[tuple[float, str]]]]:
    """The outermost spans of each tensor: (tensor, name, span, the ranks that reported in it, with their times)."""
    open_spans: dict[Any, list[tuple[str, float]]] = defaultdict(list)
    reports: dict[Any, list[tuple[float, str]]] = defaultdict(list)
    for event in events:
        phase, where = event.get("ph"), (event.get("pid"), event.get("tid"))
        name, at = str(event.get("name", "")), _number(event.get("ts"))
        stack = open_spans[where]
        if phase == "B":
            stack.append((name, at))
        elif phase == "E" and stack:
            opened, began = stack.pop()
            if not stack:
                yield event.get("pid"), opened, (began, at), reports.pop(where, [])
        elif phase == "X" and stack and name.isdigit():
            reports[where].append((at, name))
        elif phase == "X" and not stack:
            tensor = (event.get("args") or {}).get("tensor", event.get("pid"))
            yield tensor, name, (at, at + _number(event.get("dur"))), []


def _merged(spans: Iterable[Span]) -> list[Span]:
    result: list[Span] = []
    for began, ended in sorted(spans):
        if result and began <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], ended))
        else:
            result.append((began, ended))
    return result


def _length(spans: Iterable[Span]) -> float:
    return sum(ended - began for began, ended in _merged(spans))


def summarise(events: Sequence[dict[str, Any]]) -> Summary:
    """Divides the time. While any data moves, no time counts as waiting. The rest is computing."""
    names = {
        event.get("pid"): str((event.get("args") or {}).get("name", event.get("pid")))
        for event in events
        if event.get("ph") == "M" and event.get("name") == "process_name"
    }
    timed = [event for event in events if event.get("ph") in ("B", "E", "X", "i")]
    waiting: list[Span] = []
    moving: list[Span] = []
    blamed: dict[str, float] = defaultdict(float)
    tensors: dict[str, float] = defaultdict(float)
    for tensor, name, span, reports in _operations(timed):
        tensors[names.get(tensor, str(tensor))] += span[1] - span[0]
        if name.startswith(NEGOTIATE):
            waiting.append(span)
            if len(reports) > 1:
                blamed[max(reports)[1]] += max(reports)[0] - min(reports)[0]
        else:
            moving.append(span)
    times = [_number(event.get("ts")) for event in timed]
    ends = [ended for _, ended in waiting + moving]
    whole = max(times + ends, default=0.0) - min(times, default=0.0)
    return Summary(
        events=len(timed),
        span=whole,
        computing=max(0.0, whole - _length(waiting + moving)),
        waiting=_length(waiting + moving) - _length(moving),
        moving=_length(moving),
        blamed=dict(blamed),
        tensors=dict(tensors),
    )


def _time(microseconds: float) -> str:
    if microseconds >= 1e6:
        return f"{microseconds / 1e6:.2f} s"
    return f"{microseconds / 1e3:.2f} ms"


def lines(path: str, summary: Summary) -> list[str]:
    """The summary as text, at most ten lines."""
    whole = summary.span or 1.0

    def share(part: float) -> str:
        return f"{_time(part):>12}  {100 * part / whole:5.1f} %"

    worst = sorted(summary.blamed.items(), key=lambda item: -item[1])[:3]
    whom = ", ".join(f"rank {rank} {_time(spent)}" for rank, spent in worst) or "nobody in particular"
    slowest = sorted(summary.tensors.items(), key=lambda item: -item[1])[:SHOWN]
    return [
        f"{path}: {summary.events} events, {len(summary.tensors)} tensors, {_time(summary.span)}",
        f"  computing  {share(summary.computing)}",
        f"  waiting    {share(summary.waiting)}   last to come: {whom}",
        f"  moving     {share(summary.moving)}",
        "slowest tensors (waiting and moving):" if slowest else "no tensors",
        *(f"  {_time(spent):>12}  {name}" for name, spent in slowest),
        "To look at it: open https://ui.perfetto.dev and drop the file there.",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """The command `farandole trace FILE`; 0, or 2 when the file cannot be read."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments in (["-h"], ["--help"]):
        print("usage: farandole trace FILE\n\nSummarises a timeline (HOROVOD_TIMELINE, start_timeline) in ten lines.")
        return 0
    if len(arguments) != 1:
        print("usage: farandole trace FILE", file=sys.stderr)
        return 2
    try:
        summary = summarise(read(arguments[0]))
    except BrokenTrace as error:
        print(f"farandole trace: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines(arguments[0], summary)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
