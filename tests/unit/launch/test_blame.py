# Which rank is the root cause, as a table; and the texts that describe exit codes and root causes.
# Touches only farandole.launch.
from __future__ import annotations

import json

import pytest

from farandole.base.ending import blames
from farandole.base.errors import HorovodInternalError, Mismatch, PeerLost, ShutDown
from farandole.launch.blame import Ending, describe, judge, root_cause_running

UNKNOWN = -1  # the rank failed because of another one, and does not know which
TABLE = [
    ("nobody failed", [Ending(0, 0), Ending(1, 0)], None),
    ("one failed", [Ending(0, 0), Ending(1, 3)], (1, 3, ())),
    ("the first of two", [Ending(1, 3), Ending(0, 4)], (1, 3, ())),
    ("a rank left with an error after the other had failed", [Ending(0, 1, blames=1), Ending(1, 7)], (1, 7, (0,))),
    (
        "two ranks failed because of one",
        [Ending(2, 1, blames=0), Ending(1, 1, blames=UNKNOWN), Ending(0, 9)],
        (0, 9, (2, 1)),
    ),
    ("ended because the launcher asked", [Ending(1, 137), Ending(0, 143, asked=True)], (1, 137, (0,))),
    ("the rank that it names exited with 0", [Ending(1, 0), Ending(0, 1, blames=1, error="ShutDown: x")], (0, 1, ())),
    ("each names the other", [Ending(1, 1, blames=0), Ending(0, 1, blames=1)], (1, 1, (0,))),
]


@pytest.mark.parametrize(("endings", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_root_cause_of_several_endings(
    endings: list[Ending], expected: tuple[int, int, tuple[int, ...]] | None
) -> None:
    found = judge(endings)
    assert (found and (found.rank, found.code, found.collateral)) == expected


def test_a_rank_with_an_error_of_its_own_is_not_a_consequence() -> None:
    by_itself = Ending(2, 1, error="ValueError: bad data")
    killed, asked = Ending(3, 137), Ending(4, 143, asked=True)
    found = judge([Ending(1, 7), by_itself, Ending(0, 1, blames=1, error="PeerLost: x"), killed, asked])
    assert found is not None and (found.rank, found.collateral) == (1, (0, 4))
    assert found.by_themselves == (by_itself, killed), "every ending with another code than 0 is listed"


def test_texts_of_exit_codes_and_root_causes() -> None:
    assert describe(3) == "exit code 3" and describe(137) == "killed by SIGKILL"
    assert describe(137, "killed by the kernel: out of memory").endswith("out of memory")
    found = judge([Ending(1, 0), Ending(0, 1, blames=1, error="ShutDown: rank 1 has left")])
    assert found is not None
    assert found.text == "exit code 1: ShutDown: rank 1 has left; rank 1 had ended before with exit code 0"
    # Rank 2 was told of the loss of rank 0 before that of rank 1. The launcher asked rank 0 to end while it was ending.
    found = judge([Ending(1, 0), Ending(2, 1, blames=0), Ending(0, 1, asked=True, blames=1)])
    assert found is not None and found.text.endswith("; rank 1 had ended before with exit code 0")


def test_reports_are_read_and_invalid_ones_ignored() -> None:
    good = json.dumps({"error": "PeerLost: x", "blames": 2})
    assert Ending.read(0, 1, False, "", good).blames == 2
    for bad in ("", "{", "[]", '{"error": 1}', '{"error": "x", "blames": "y"}', good[:10]):
        assert Ending.read(0, 1, False, "", bad).blames is None
    assert Ending.read(2, 1, False, "", good).blames is None, "a rank never names itself"


def test_waiting_for_the_root_cause_to_end() -> None:
    assert root_cause_running([Ending(0, 1, blames=1)], [1, 2])
    assert root_cause_running([Ending(0, 1, blames=UNKNOWN)], [1])
    assert not root_cause_running([Ending(0, 1, blames=1)], [2])
    assert not root_cause_running([Ending(0, 1)], [1])
    assert not root_cause_running([Ending(0, 1, blames=2), Ending(2, 1, blames=0)], [1]), "they name each other"


def test_which_errors_name_which_rank() -> None:
    assert blames(PeerLost("x", rank=3)) == 3 and blames(ShutDown("x", rank=1)) == 1
    assert blames(HorovodInternalError("x")) == UNKNOWN
    assert blames(ValueError("x")) is None and blames(Mismatch("x", rank=1)) is None
    wrapped = RuntimeError("y")
    wrapped.__cause__ = PeerLost("x", rank=2)
    assert blames(wrapped) == 2
