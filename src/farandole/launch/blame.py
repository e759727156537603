# Finds the root cause when a job fails, and the ranks that failed because of it.
# Pure: it gets the endings of ranks and returns a verdict with its reason.
"""A rank that failed because another rank was lost is collateral. The first failure that is not is the root cause."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from farandole.launch.evidence import OUT_OF_MEMORY

# Horovod's text for a job that failed. Programs search for it.
EXITED = (
    "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be terminated."
)


@dataclass(frozen=True)
class Ending:
    """How one rank ended. A list of endings is in the order in which the launcher received them."""

    rank: int
    code: int  # 128 + signal if it was killed
    asked: bool = False  # the launcher had told it to end
    cause: str = ""  # why the agent or the kernel killed it, if that is known
    error: str = ""  # the exception that ended it, as the worker reported it
    blames: int | None = None  # the rank that the exception is about; -1: another rank, but it is not known which
    at: str = ""  # the line of the user's script
    peak_kb: int = 0  # the most memory that it had
    lived: float = 0.0  # seconds as a member of the job
    waited: float = 0.0  # seconds of these in which it waited for other ranks
    alone: str = ""  # the framework with which it trained, if it never joined the other ranks

    @classmethod
    def read(cls, rank: int, code: int, asked: bool, cause: str, report: str) -> Ending:
        """From the message of the agent. `report` is written by base/ending.py and may be missing or incomplete."""
        error, blames, alone, at = "", None, "", ""
        facts: tuple[int, float, float] = (0, 0.0, 0.0)
        for line in report.splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                found = json.loads(line)
                alone = str(found.get("alone", alone))
                if "peak_kb" in found:
                    facts = (int(found["peak_kb"]), float(found["lived"]), float(found["waited"]))
                at = str(found.get("at", at))
                error = str(found["error"])
                blames = None if found["blames"] is None else int(found["blames"])
        return cls(rank, code, asked, cause, error, None if blames == rank else blames, at, *facts, alone)

    @property
    def text(self) -> str:
        """`exit code 1: ValueError: no data (train.py:41)`."""
        error = self.error.partition("\n")[0]
        return describe(self.code, self.cause) + (f": {error}" if error else "") + (f" ({self.at})" if self.at else "")

    @property
    def failed(self) -> bool:
        """Whether it ended with an error, and not because the launcher told it to end."""
        return self.code != 0 and not self.asked

    @property
    def by_itself(self) -> bool:
        """Whether it reports no exception that is about another rank."""
        return self.failed and self.blames is None

    @property
    def collateral(self) -> bool:
        """Whether it reports that it failed because of another rank."""
        return self.failed and self.blames is not None


@dataclass(frozen=True)
class Verdict:
    """The root cause, the reason as text, the ranks that failed because of it, and others that failed by themselves."""

    rank: int
    code: int
    text: str
    collateral: tuple[int, ...]
    by_themselves: tuple[Ending, ...] = ()


def root_cause_running(endings: Sequence[Ending], running: Sequence[int]) -> bool:
    """Whether the last rank that ended blames a rank that still runs, and so may fail soon itself.

    >>> root_cause_running([Ending(0, 1, blames=1), Ending(2, 1, blames=0)], running=[1])
    True
    """
    last = endings[-1]
    blamed = set(blamed_by(last, endings)) if last.collateral else set()
    return not blamed.isdisjoint(running) or (-1 in blamed and bool(running))


def blamed_by(ending: Ending, endings: Sequence[Ending]) -> Iterator[int]:
    """The rank that a failed rank blames, the rank that this one blames if it has ended too, and so on.

    Each rank appears once.

    >>> list(blamed_by(Ending(2, 1, blames=0), [Ending(1, 0), Ending(0, 1, blames=1)]))
    [0, 1]
    """
    ended = {ending.rank: ending for ending in endings}
    seen = {ending.rank}
    following: Ending | None = ending
    while following is not None and following.blames is not None and following.blames not in seen:
        seen.add(following.blames)
        yield following.blames
        following = ended.get(following.blames)


def judge(endings: Sequence[Ending]) -> Verdict | None:
    """The first rank that failed by itself; None when no rank failed.

    >>> judge([Ending(0, 1, blames=1), Ending(1, 7)])
    Verdict(rank=1, code=7, text='exit code 7', collateral=(0,), by_themselves=())
    """
    failed = [ending for ending in endings if ending.failed]
    if not failed:
        return None
    root_cause = next((ending for ending in failed if not ending.collateral), failed[0])
    text = root_cause.text
    if root_cause.collateral:  # the rank that it blames ended with code 0, or it is not known which rank it is
        blamed = set(blamed_by(root_cause, endings))
        left = next((ending for ending in endings if ending.rank in blamed and ending.code == 0), None)
        if left is not None:
            text += f"; rank {left.rank} had ended before with exit code 0"
    others = [ending for ending in endings if ending.code != 0 and ending is not root_cause]
    collateral = tuple(ending.rank for ending in others if not ending.by_itself)
    return Verdict(root_cause.rank, root_cause.code, text, collateral, tuple(one for one in others if one.by_itself))


def topic(verdict: Verdict) -> str:
    """The section of docs/errors.md about a job that ended because of a rank."""
    if OUT_OF_MEMORY in verdict.text:
        return "out-of-memory"
    return "rank-killed" if verdict.code > 128 else "rank-failed"


def describe(code: int, cause: str = "") -> str:
    """An exit code as text."""
    if cause:
        return cause
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(code - 128).name}"
    return f"exit code {code}"
