"""What a training step does with its time: rank 0's timeline of one step, for a picture.
Asks a pool and reads the timeline that it writes; returns a row whose facts are spans."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import processes
from .plan import Plan, Row, row
from .rank_pools import RankPools

PHASES = ("forward", "backward", "step")
Span = tuple[str, str, float, float]  # tensor, what happens to it, begin and end in microseconds


def spans(events: list[dict[str, Any]]) -> tuple[float, list[Span]]:
    """The timeline's begin in seconds since 1970, and its innermost spans.

    >>> at = [{"ph": "B", "pid": 1, "ts": 5.0, "name": "QUEUE"}, {"ph": "E", "pid": 1, "ts": 7.0}]
    >>> spans(at)
    (0.0, [('1', 'QUEUE', 5.0, 7.0)])
    """
    names: dict[int, str] = {}
    began = 0.0
    stacks: dict[Any, list[tuple[str, float]]] = defaultdict(list)
    found: list[Span] = []
    for event in events:
        pid = event.get("pid", 0)
        more = event.get("args", {})
        if event["ph"] == "M":
            began = more.get("start_time_since_epoch_in_micros", began * 1e6) / 1e6
            if "name" in more:
                names[pid] = more["name"]
        elif event["ph"] == "B":
            stacks[pid].append((event["name"], event["ts"]))
        elif event["ph"] == "E" and stacks[pid]:
            name, since = stacks[pid].pop()
            if name != "ALLREDUCE":  # the span around queueing and moving
                found.append((names.get(pid, str(pid)), name, since, event["ts"]))
    return began, found


def measure(plan: Plan, pools_by_size: RankPools) -> Iterator[Row]:
    """The last of a few steps of gpt, or of the case there is."""
    if not processes.has_torch():
        pools_by_size.note("trace: not measured without torch")
        return
    case = "gpt" if "gpt" in plan.steps else next(iter(plan.steps))
    with pools_by_size.pools(plan.ranks[0], ["farandole"]) as pools:
        path = Path(pools["farandole"].folder, "timeline.json")
        marks = pools["farandole"].ask("trace", case=case, steps=4, path=str(path))[0]["marks"]
    began, found = spans(json.loads(path.read_text()))
    first = (marks[0] - began) * 1e6
    phases = [
        [name, round((one - marks[0]) * 1e6, 1), round((two - marks[0]) * 1e6, 1)]
        for name, one, two in zip(PHASES, marks[:-1], marks[1:], strict=True)
    ]
    inside = [
        [tensor, what, round(since - first, 1), round(until - first, 1)]
        for tensor, what, since, until in found
        if since >= first
    ]
    facts = {"phases": phases, "spans": inside}
    yield row("trace", case, plan.ranks[0], "s", {"farandole": [marks[-1] - marks[0]]}, facts=facts)
