# The cause of a hang, from the facts of all ranks: chains of waiting, circles, groups, sends, what a rank does instead.
# Pure: facts are made here.
from __future__ import annotations

from typing import Any

import pytest

from farandole.observe import hangs
from farandole.observe.facts import Facts
from farandole.observe.hangs import judge, mismatch
from farandole.observe.records import Operation, Record
from farandole.observe.stacks import Frame, Thread

SECOND = 1_000_000_000
NOW = 1000 * SECOND
IN_OURS = (Frame("/x/farandole/operations/pending.py", 49, "result"), Frame("/home/me/train.py", 12, "main"))
COMPUTES = (Frame("/home/me/train.py", 20, "forward"), Frame("/home/me/train.py", 12, "main"))


def operation(name: str, ago: float = 6.0, kind: str = "allreduce", group: int = 0, **more: Any) -> Operation:
    """An operation that waits; `done=True`: it has ended."""
    submitted = NOW - int(ago * SECOND)
    done = submitted + 1000 if more.pop("done", False) else 0
    values: dict[str, Any] = {
        "number": 1, "name": name, "kind": kind, "dtype": "float32", "reduction": "sum", "shape": (4,), "dimensions": 1,
        "bytes": 16, "group": group, "generation": 1, "sequence": 0, "peer": -1, "submitted_ns": submitted,
        "ready_ns": done, "begun_ns": done, "done_ns": done, "code": 0, "algorithm": "",
    }  # fmt: skip
    return Operation(**{**values, **more})


def facts(rank: int, *operations: Operation, frames: tuple[Frame, ...] = (), groups: Any = None, **more: Any) -> Facts:
    known = groups or {0: (0, 1, 2)}
    record = Record(rank, 3, 1, 100 + rank, 7, 5.0, 60.0, 0, len(operations), 0, known, operations)
    frames = frames or (IN_OURS if any(one.pending for one in operations) else COMPUTES)
    values: dict[str, Any] = {"state": "S", "wait": "", "busy": 0.0, "answered": True, "pid": 100 + rank}
    return Facts(
        rank=rank, host="h", record=record, now_ns=NOW, threads=(Thread(7, frames),), **{**values, **more}
    )  # fmt: skip


def all_of(*ranks: Facts) -> dict[int, Facts]:
    return {one.rank: one for one in ranks}


def test_the_rank_that_computes_is_named_with_its_line() -> None:
    verdict = judge(all_of(facts(0, operation("a")), facts(1, busy=1.0), facts(2, operation("a", 5.5))))
    assert (verdict.kind, verdict.ranks, verdict.operation) == (hangs.NEVER_SUBMITTED, (1,), "a")
    assert verdict.waiting == (0, 2) and verdict.seconds == 6.0 and verdict.names_a_cause
    assert "ranks 0, 2 wait for rank 1 in allreduce 'a' float32 [4] for 6.0 s" in verdict.text
    assert "it computes: me/train.py:20 in forward" in verdict.text


def test_who_waits_for_another_one_is_not_the_cause() -> None:
    """Rank 0 waits for rank 1, which waits for something of rank 2 in another group, which is stopped."""
    groups = {0: (0, 1), 3: (1, 2)}
    first = facts(0, operation("a"), groups=groups)
    second = facts(1, operation("b", 7.0, group=3), groups=groups)
    third = facts(2, groups={3: (1, 2)}, state="T")
    verdict = judge(all_of(first, second, third))
    assert (verdict.kind, verdict.ranks, verdict.operation) == (hangs.STOPPED, (2,), "b"), verdict


def test_ranks_outside_of_the_group_are_not_missing() -> None:
    groups = {0: (0, 1, 2), 5: (0, 1)}
    verdict = judge(all_of(facts(0, operation("x", group=5), groups=groups), facts(1, groups=groups), facts(2)))
    assert verdict.ranks == (1,)


def test_a_receive_waits_for_its_sender() -> None:
    waits = operation("", kind="receive", peer=2, begun_ns=1)
    verdict = judge(all_of(facts(0, waits), facts(1), facts(2, busy=1.0)))
    assert (verdict.ranks, verdict.waiting) == ((2,), (0,)) and "receive with rank 2" in verdict.text


def test_with_different_operations_the_majority_is_right() -> None:
    verdict = judge(all_of(facts(0, operation("c")), facts(1, operation("b")), facts(2, operation("b"))))
    assert (verdict.kind, verdict.ranks, verdict.operation) == (hangs.OTHER_ORDER, (0,), "b")
    assert "rank 0 waits in allreduce 'c'" in verdict.text and "ranks 1-2 wait in allreduce 'b'" in verdict.text


@pytest.mark.parametrize("wrong", [0, 1])
def test_the_order_of_earlier_steps_tells_who_left_out_an_operation(wrong: int) -> None:
    """Also with two ranks, where there is no majority."""
    before = [operation(name, 20 - index, done=True, number=index) for index, name in enumerate("abcabca")]
    both = {0: (0, 1)}
    late, right = operation("c", number=9), operation("b", number=9)
    ranks = [facts(rank, *before, late if rank == wrong else right, groups=both) for rank in range(2)]
    verdict = judge(all_of(*ranks))
    assert (verdict.kind, verdict.ranks, verdict.operation) == (hangs.NEVER_SUBMITTED, (wrong,), "b"), verdict
    assert f"rank {wrong} left out allreduce 'b'" in verdict.text


@pytest.mark.parametrize(
    ("kind", "frames", "more"),
    [
        (hangs.STOPPED, COMPUTES, {"state": "T"}),
        (hangs.STOPPED, COMPUTES, {"state": "t"}),
        (hangs.STOPPED, COMPUTES, {"wait": "do_freezer_trap"}),
        (hangs.LOST, COMPUTES, {"state": "Z"}),
        (hangs.FILES, COMPUTES, {"state": "D"}),
        (hangs.FILES, COMPUTES, {"wait": "nfs_wait_bit_killable"}),
        (hangs.FILES, COMPUTES, {"sources": {("/home/me/train.py", 20): "torch.save(model, path)"}}),
        (hangs.FILES, (Frame("/v/site-packages/torch/serialization.py", 9, "save"), *COMPUTES), {}),
        (hangs.LOCK, (Frame("/usr/lib/python3.11/threading.py", 320, "wait"), *COMPUTES), {}),
        (hangs.LOCK, (Frame("/usr/lib/python3.11/queue.py", 171, "get"), *COMPUTES), {}),
        (hangs.LOCK, COMPUTES, {"call": 202}),
        (
            hangs.LOCK,
            COMPUTES,
            {"wait": "locks_lock_inode_wait", "sources": {("/home/me/train.py", 20): "os.open(path)"}},
        ),
        (hangs.LOCK, COMPUTES, {"sources": {("/home/me/train.py", 20): "with self.lock:"}}),
        (hangs.LOADER, (Frame("/p/site-packages/torch/utils/data/dataloader.py", 1, "next"), *COMPUTES), {}),
        (hangs.NEVER_SUBMITTED, COMPUTES, {"call": 202, "busy": 3.5}),  # threads of a library, which compute
        (hangs.NEVER_SUBMITTED, COMPUTES, {"wait": "hrtimer_nanosleep"}),
        (hangs.NEVER_SUBMITTED, (), {"answered": False}),
    ],
)
def test_what_a_rank_does_instead(kind: str, frames: tuple[Frame, ...], more: dict[str, Any]) -> None:
    waiting = facts(0, operation("a"), groups={0: (0, 1)})
    verdict = judge(all_of(waiting, facts(1, frames=frames, groups={0: (0, 1)}, **more)))
    assert (verdict.kind, verdict.ranks) == (kind, (1,)), verdict.text


def test_a_loader_that_waits_for_a_lock_is_a_loader() -> None:
    frames = (Frame("/usr/lib/python3.11/threading.py", 320, "wait"),
              Frame("/p/site-packages/torch/utils/data/dataloader.py", 1, "next"))  # fmt: skip
    verdict = judge(all_of(facts(0, operation("a"), groups={0: (0, 1)}), facts(1, frames=frames)))
    assert verdict.kind == hangs.LOADER


def test_a_host_that_does_not_answer_is_lost_and_no_other_rank_is_named() -> None:
    verdict = judge(all_of(facts(0, operation("a")), facts(1, operation("a"))), lost=(2,))
    assert (verdict.kind, verdict.ranks) == (hangs.LOST, (2,)) and "does not answer" in verdict.text


def test_a_running_transfer_gets_no_verdict_unless_a_rank_is_stopped_or_a_link_is_slow() -> None:
    moves = operation("a", ready_ns=NOW - SECOND, begun_ns=NOW - SECOND)
    ranks = all_of(*(facts(rank, moves) for rank in range(3)))
    assert not judge(ranks).names_a_cause and "bytes are being moved" in judge(ranks).text
    link = "the link between rank 0 on a and rank 1 on b is slow: 1.0 MB/s, and sending takes 90% of the time"
    assert judge(ranks, slow=(link,)).kind == hangs.SLOW_LINK
    stopped = {**ranks, 1: facts(1, moves, state="T")}
    assert (judge(stopped).kind, judge(stopped).ranks) == (hangs.STOPPED, (1,))


def test_ranks_that_compute_get_no_verdict() -> None:
    assert not judge(all_of(*(facts(rank, operation("a", done=True)) for rank in range(3)))).names_a_cause
    assert not judge({}).names_a_cause


def test_a_rank_with_an_older_operation_that_it_does_not_wait_for_is_still_a_cause() -> None:
    """It has submitted something asynchronously, and then does not come."""
    verdict = judge(
        all_of(facts(0, operation("a")), facts(1, operation("b"), frames=COMPUTES), facts(2, operation("a")))
    )
    assert verdict.ranks == (1,) and verdict.kind != hangs.OTHER_ORDER


def test_the_rank_with_another_shape_is_named() -> None:
    ranks = {
        rank: Record(rank, 3, 1, 1, 1, 5.0, 60.0, 0, 1, 1, {}, (operation("a", code=3, shape=(shape,)),))
        for rank, shape in enumerate((4, 4, 5))
    }
    verdict = mismatch(ranks)
    assert verdict is not None and (verdict.kind, verdict.ranks) == (hangs.OTHER_SHAPE, (2,))
    assert verdict.text == "rank 2 submitted allreduce 'a' float32 [5]; ranks 0-1 submitted allreduce 'a' float32 [4]"
    assert mismatch({0: ranks[0], 1: ranks[1]}) is None and mismatch({2: ranks[2]}) is None
