# Who is to blame when a job fails, and who only fell with it.
# Pure: endings go in, a verdict with its reason comes out.
"""A rank that failed because another one was lost is collateral; the first other failure is the guilty one."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ending:
    """How one rank ended. The list of endings is in the order of their arrival."""

    rank: int
    code: int  # 128 + signal if it was killed
    asked: bool = False  # we had told it to end
    cause: str = ""  # what the kernel said
    error: str = ""  # the exception that ended it, in the worker's own words
    blames: int | None = None  # the rank that the exception is about; -1: some other, it does not know which

    @classmethod
    def read(cls, rank: int, code: int, asked: bool, cause: str, report: str) -> Ending:
        """From what the agent says; `report` is written by observe/ending.py and may be missing or cut."""
        error, blames = "", None
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            found = json.loads(report)
            error = str(found["error"])
            blames = None if found["blames"] is None else int(found["blames"])
        return cls(rank, code, asked, cause, error, None if blames == rank else blames)

    @property
    def failed(self) -> bool:
        """Whether it ended badly without having been told to."""
        return self.code != 0 and not self.asked

    @property
    def collateral(self) -> bool:
        """Whether it says that it fell with another."""
        return self.failed and self.blames is not None


@dataclass(frozen=True)
class Verdict:
    """The guilty one, in words, and who fell with it."""

    rank: int
    code: int
    text: str
    collateral: tuple[int, ...]


def culprit_under_way(endings: Sequence[Ending], running: Sequence[int]) -> bool:
    """Whether the one that the last rank to end blames still runs, and may soon show its own ending.

    >>> culprit_under_way([Ending(0, 1, blames=1), Ending(2, 1, blames=0)], running=[1])
    True
    """
    last = endings[-1]
    blamed = set(blamed_by(last, endings)) if last.collateral else set()
    return not blamed.isdisjoint(running) or (-1 in blamed and bool(running))


def blamed_by(ending: Ending, endings: Sequence[Ending]) -> Iterator[int]:
    """Whom a fallen rank blames, whom that one blames if it has fallen too, and so on; no rank twice.

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
    """Who failed first by itself; None when nobody failed.

    >>> judge([Ending(0, 1, blames=1), Ending(1, 7)])
    Verdict(rank=1, code=7, text='exit code 7', collateral=(0,))
    """
    failed = [ending for ending in endings if ending.failed]
    if not failed:
        return None
    guilty = next((ending for ending in failed if not ending.collateral), failed[0])
    text = describe(guilty.code, guilty.cause)
    if guilty.collateral:  # the one it blames ended well, or does not know
        text += f" ({guilty.error})"
        blamed = set(blamed_by(guilty, endings))
        left = next((ending for ending in endings if ending.rank in blamed and ending.code == 0), None)
        if left is not None:
            text += f"; rank {left.rank} had ended before with exit code 0"
    others = tuple(ending.rank for ending in endings if ending.code != 0 and ending is not guilty)
    return Verdict(guilty.rank, guilty.code, text, others)


def describe(code: int, cause: str = "") -> str:
    """An exit code in words."""
    if cause:
        return cause
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(code - 128).name}"
    return f"exit code {code}"
