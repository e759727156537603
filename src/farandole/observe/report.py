# The report about the ranks of a job at one moment: the verdict, what each rank does, merged stacks, last operations.
# Writes the files whose paths it gets.
"""`Report` is made of a verdict and the facts of all ranks. It is written before anything is killed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from farandole.observe import flight, hangs, stacks
from farandole.observe.facts import Facts
from farandole.observe.hangs import Verdict
from farandole.observe.records import Operation

LAST_OPERATIONS = 10  # of each rank that the text shows
_OWN_THREADS = tuple(f"farandole/{room}" for room in ("rendezvous/", "engine/events.py", "world/", "launch/"))


@dataclass(frozen=True)
class Report:
    """What was found at one moment."""

    verdict: Verdict
    ranks: Mapping[int, Facts]
    lost: Sequence[int] = ()
    seconds: float = 0.0  # what it took
    moment: float = field(default_factory=time.time)

    def why(self) -> str:
        """The verdict, and what each rank does."""
        return "\n".join([self.verdict.text, "", *hangs.states(self.ranks)]) + "\n"

    def stacks(self) -> str:
        """The stacks of all ranks, merged."""
        mains = {rank: facts.frames for rank, facts in self.ranks.items() if facts.frames}
        sources: dict[tuple[str, int], str] = {}
        for facts in self.ranks.values():
            sources |= facts.sources
        lines = ["main threads:", *stacks.merge(mains, sources)]
        silent = sorted(set(self.ranks) - set(mains))
        if silent:
            lines.append(f"no stack of rank {stacks.ranks_text(silent)}: {self._why_silent(silent[0])}")
        others: dict[int, dict[int, Sequence[stacks.Frame]]] = {}
        for rank, facts in self.ranks.items():
            main = facts.record.main_thread if facts.record is not None else 0
            rest = [one for one in facts.threads if one.ident != main and _of_the_user(one)]
            for index, thread in enumerate(rest):
                others.setdefault(index, {})[rank] = thread.frames
        for index in sorted(others):
            lines += ["", f"other threads ({index + 1}):", *stacks.merge(others[index])]
        for rank, facts in sorted(self.ranks.items()):
            for child in facts.children:
                if child.frames:
                    lines += ["", f"process {child.pid}, a child of rank {rank}:", *stacks.merge({rank: child.frames})]
        return "\n".join(lines) + "\n"

    def _why_silent(self, rank: int) -> str:
        facts = self.ranks[rank]
        if facts.stopped:
            return facts.stopped
        return "it has not called init()" if facts.record is None else "it did not answer in time"

    def text(self) -> str:
        """All of it."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.moment))
        lines = [f"farandole: what the ranks did at {when} (found out in {self.seconds:.2f} s)", ""]
        lines += [f"kind: {self.verdict.kind}", self.why(), self.stacks(), "last operations:"]
        for rank, facts in sorted(self.ranks.items()):
            for one in (facts.record.operations if facts.record is not None else ())[-LAST_OPERATIONS:]:
                lines.append(f"rank {rank}: {describe(one, facts.now_ns)}")
        return "\n".join(lines) + "\n"

    def data(self) -> dict[str, object]:
        """The verdict for programs."""
        one = self.verdict
        return {
            "kind": one.kind, "ranks": list(one.ranks), "operation": one.operation, "seconds": one.seconds,
            "waiting": list(one.waiting), "text": one.text, "lost": list(self.lost), "moment": self.moment,
        }  # fmt: skip

    def write(self, folder: Path, name: str, operations: bool) -> Path:
        """Writes name.txt and name.json, and with `operations` the last ones of each rank for Flight Recorder's
        analysers. Returns the text's path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.txt"
        path.write_text(self.text())
        (folder / f"{name}.json").write_text(json.dumps(self.data(), indent=1) + "\n")
        if operations:
            flight.write(folder / name, {r: one.record for r, one in self.ranks.items() if one.record is not None})
        return path


def describe(one: Operation, now_ns: int) -> str:
    """An operation with its times, in one line."""

    def after(moment: int) -> str:
        return f"{(moment - one.submitted_ns) / 1e6:.3f} ms" if moment else "no"

    age = (now_ns - one.submitted_ns) / 1e9
    way = f", {one.algorithm}" if one.algorithm else ""
    code = f", error {one.code}" if one.code else ""
    return (
        f"#{one.number} {hangs.title(one)}, {one.bytes} bytes{way}, {age:.3f} s ago; ready after "
        f"{after(one.ready_ns)}, begun {after(one.begun_ns)}, done {after(one.done_ns)}{code}"
    )


def _of_the_user(thread: stacks.Thread) -> bool:
    ours = any(part in one.file for one in thread.frames for part in _OWN_THREADS)
    # Also the thread that gets the signal: it waits, and that is all its stack says.
    waits = all(one.file.endswith("/threading.py") for one in thread.frames)
    return bool(thread.frames) and not ours and not waits
