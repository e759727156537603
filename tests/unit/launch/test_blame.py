# Who is to blame, as a table; and the words of the kernel.
# Touches farandole.launch alone.
from __future__ import annotations

import json

import pytest

from farandole.base.ending import blames
from farandole.base.errors import HorovodInternalError, Mismatch, PeerLost, ShutDown
from farandole.launch.blame import Ending, describe, judge, root_cause_running

TABLE = [
    ("nobody failed", [Ending(0, 0), Ending(1, 0)], None),
    ("one failed", [Ending(0, 0), Ending(1, 3)], (1, 3, ())),
    ("the first of two", [Ending(1, 3), Ending(0, 4)], (1, 3, ())),
    ("it left in good order, the other fell first", [Ending(0, 1, blames=1), Ending(1, 7)], (1, 7, (0,))),
    ("two fell with one", [Ending(2, 1, blames=0), Ending(1, 1, blames=-1), Ending(0, 9)], (0, 9, (2, 1))),
    ("told to end", [Ending(1, 137), Ending(0, 143, asked=True)], (1, 137, (0,))),
    ("the one it blames ended well", [Ending(1, 0), Ending(0, 1, blames=1, error="ShutDown: x")], (0, 1, ())),
    ("each blames the other", [Ending(1, 1, blames=0), Ending(0, 1, blames=1)], (1, 1, (0,))),
]


@pytest.mark.parametrize(("endings", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_root_cause_of_several_endings(
    endings: list[Ending], expected: tuple[int, int, tuple[int, ...]] | None
) -> None:
    verdict = judge(endings)
    assert (verdict and (verdict.rank, verdict.code, verdict.collateral)) == expected


def test_a_rank_that_failed_by_itself_is_not_collateral() -> None:
    own = Ending(2, 1, error="ValueError: bad data")
    killed, told = Ending(3, 137), Ending(4, 143, asked=True)
    verdict = judge([Ending(1, 7), own, Ending(0, 1, blames=1, error="PeerLost: x"), killed, told])
    assert verdict is not None and (verdict.rank, verdict.collateral) == (1, (0, 4))
    assert verdict.by_themselves == (own, killed), "every ending with another code than 0 is listed"


def test_words() -> None:
    assert describe(3) == "exit code 3" and describe(137) == "killed by SIGKILL"
    assert describe(137, "killed by the kernel: out of memory").endswith("out of memory")
    verdict = judge([Ending(1, 0), Ending(0, 1, blames=1, error="ShutDown: rank 1 has left")])
    assert verdict is not None
    assert verdict.text == "exit code 1: ShutDown: rank 1 has left; rank 1 had ended before with exit code 0"
    # Rank 2 heard of rank 0 before it heard of rank 1, and rank 0 was told to end while it was ending.
    verdict = judge([Ending(1, 0), Ending(2, 1, blames=0), Ending(0, 1, asked=True, blames=1)])
    assert verdict is not None and verdict.text.endswith("; rank 1 had ended before with exit code 0")


def test_reports_are_read_and_bad_ones_forgiven() -> None:
    good = json.dumps({"error": "PeerLost: x", "blames": 2})
    assert Ending.read(0, 1, False, "", good).blames == 2
    for bad in ("", "{", "[]", '{"error": 1}', '{"error": "x", "blames": "y"}', good[:10]):
        assert Ending.read(0, 1, False, "", bad).blames is None
    assert Ending.read(2, 1, False, "", good).blames is None, "nobody blames himself"


def test_waiting_for_the_root_cause_to_end() -> None:
    assert root_cause_running([Ending(0, 1, blames=1)], [1, 2])
    assert root_cause_running([Ending(0, 1, blames=-1)], [1])
    assert not root_cause_running([Ending(0, 1, blames=1)], [2])
    assert not root_cause_running([Ending(0, 1)], [1])
    assert not root_cause_running([Ending(0, 1, blames=2), Ending(2, 1, blames=0)], [1]), "they blame each other"


def test_which_errors_name_which_rank() -> None:
    assert blames(PeerLost("x", rank=3)) == 3 and blames(ShutDown("x", rank=1)) == 1
    assert blames(HorovodInternalError("x")) == -1
    assert blames(ValueError("x")) is None and blames(Mismatch("x", rank=1)) is None
    wrapped = RuntimeError("y")
    wrapped.__cause__ = PeerLost("x", rank=2)
    assert blames(wrapped) == 2
