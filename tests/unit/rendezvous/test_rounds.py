# What the hub decides, case by case, without a socket.
# Touches only rounds.py.
from __future__ import annotations

from dataclasses import replace

import pytest

from farandole.rendezvous.messages import (
    Failed,
    Hello,
    HostsAgreed,
    Leave,
    Linked,
    LinkRefused,
    LinkRequest,
    ListenAddress,
    ListenRequest,
    Lost,
    MemoryProved,
    Message,
    Rejected,
    Started,
    Welcome,
)
from farandole.rendezvous.phases import LINK_SECONDS
from farandole.rendezvous.rounds import Rounds


def hello(rank: int, size: int = 3, **more: object) -> Hello:
    plain = Hello(rank, size, "h", 100 + rank, "1", 1, 30_000, 2, f"unix:/l{rank}", f"tcp:h:{rank + 1}")
    return replace(plain, **more)  # type: ignore[arg-type]


def arrive(rounds: Rounds, first: int = 0, **more: object) -> list[tuple[int, Message]]:
    """All ranks say hello as members first, first + 1, ..."""
    sends: list[tuple[int, Message]] = []
    for rank in range(rounds.size):
        sends = rounds.message(first + rank, hello(rank, rounds.size, **more), 0.0)
    return sends


def running(size: int = 3) -> Rounds:
    rounds = Rounds(size, "1")
    arrive(rounds)
    for rank in range(size):
        rounds.message(rank, MemoryProved(1, (), ""), 0.0)
    for rank in range(size):
        rounds.message(rank, Linked(1), 0.0)
    return rounds


def texts(sends: list[tuple[int, Message]]) -> dict[int, str]:
    assert all(isinstance(message, Rejected) for _, message in sends), sends
    return {member: message.text for member, message in sends if isinstance(message, Rejected)}


def test_a_round_from_hello_to_started() -> None:
    rounds = Rounds(3, "1")
    assert rounds.message(0, hello(2), 0.0) == [] and rounds.message(1, hello(0), 0.0) == []
    sends = rounds.message(2, hello(1, host="g"), 0.0)
    assert sorted(member for member, _ in sends) == [0, 1, 2]
    welcome = sends[0][1]
    assert isinstance(welcome, Welcome) and welcome.generation == 1
    assert welcome.hosts == (0, 1, 0) and welcome.names == ("h", "g", "h")
    assert welcome.locals == ("unix:/l0", "unix:/l1", "unix:/l2")
    for member in (0, 1):
        assert rounds.message(member, MemoryProved(1, (), ""), 1.0) == []
    assert {message for _, message in rounds.message(2, MemoryProved(1, (), ""), 1.0)} == {
        HostsAgreed(1, (0, 1, 0), "")
    }
    for member in (0, 1):
        assert rounds.message(member, Linked(1), 1.0) == []
    assert {message for _, message in rounds.message(2, Linked(1), 1.0)} == {Started(1)}
    assert rounds.deadline() is None, "a running round needs no clock"


def test_missing_ranks_are_named_with_the_variable_to_raise() -> None:
    rounds = Rounds(5, "1")
    rounds.message(0, hello(1, 5), 10.0)
    rounds.message(1, hello(3, 5, timeout_ms=90_000), 11.0)
    assert rounds.deadline() == 40.0
    assert rounds.tick(39.9) == []
    text = texts(rounds.tick(40.0))
    assert set(text) == {0, 1}
    assert "missing: ranks 0, 2, 4." in text[0] and "2 of 5" in text[0] and "30 s" in text[0]
    assert "FARANDOLE_START_TIMEOUT" in text[0] and "HOROVOD_START_TIMEOUT" in text[0]
    assert rounds.deadline() is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"size": 4}, "size of 4, but the job has 3"),
        ({"package": "2"}, "farandole 2, the launcher 1: install the same version"),
        ({"rank": 9}, "no rank 9 in a job of 3"),
        ({"rank": -1}, "no rank -1"),
        ({"rank": 0, "pid": 77}, "rank 0: 100 on h and 77 on h"),
    ],
)
def test_a_wrong_hello_is_reported_to_all_ranks(wrong: dict[str, object], words: str) -> None:
    rounds = Rounds(3, "1")
    rounds.message(0, hello(0), 0.0)
    replies = texts(rounds.message(1, hello(1, **wrong) if "rank" not in wrong else replace(hello(1), **wrong), 0.0))  # type: ignore[arg-type]
    assert set(replies) == {0, 1} and all(words in text for text in replies.values()), replies
    assert isinstance(arrive(rounds, 10)[0][1], Welcome), "the next round is not spoilt"
    assert rounds.generation == 1


def test_ranks_that_join_late_get_the_error_once() -> None:
    rounds = Rounds(3, "1")
    wrong = "has farandole 2, the launcher 1"
    assert wrong in texts(rounds.message(0, hello(1, package="2"), 0.0))[0]
    assert wrong in texts(rounds.message(1, hello(0), 0.0))[1]
    assert rounds.message(2, hello(1), 0.0) == [], "it comes again: a new round"
    assert rounds.message(3, hello(2), 0.0) == []
    assert isinstance(rounds.message(4, hello(0), 0.0)[0][1], Welcome)


def test_a_rank_that_dies_while_the_others_wait_is_named() -> None:
    rounds = Rounds(3, "1")
    rounds.message(0, hello(0), 0.0)
    rounds.message(1, hello(1), 0.0)
    assert (
        "rank 1 (process 101 on h) died while the job was waiting for ranks"
        in texts(rounds.connection_lost(1, "eof"))[0]
    )
    rounds = Rounds(3, "1")
    arrive(rounds)
    text = texts(rounds.connection_lost(2, "eof"))
    assert set(text) == {0, 1} and "rank 2 (process 102 on h) died" in text[0]


def test_a_rank_whose_process_has_ended_is_not_waited_for() -> None:
    rounds = Rounds(3, "1")
    rounds.message(0, hello(0), 0.0)
    assert "rank 2 has ended (exit code 0)" in texts(rounds.process_ended(2, "has ended (exit code 0)"))[0]
    assert "rank 2 has ended" in texts(rounds.message(5, hello(1), 0.0))[5], "also by those who come later"


def test_a_rank_may_be_in_the_next_round_while_others_are_in_the_old_one() -> None:
    rounds = running()
    assert rounds.message(0, Leave(1), 1.0) == []
    assert rounds.message(10, hello(0), 1.0) == []
    assert rounds.message(1, Leave(1), 2.0) == [] and rounds.message(2, Leave(1), 2.0) == []
    rounds.message(11, hello(1), 2.0)
    welcome = rounds.message(12, hello(2), 2.0)[0][1]
    assert isinstance(welcome, Welcome) and welcome.generation == 2


def test_a_death_in_a_running_round_is_reported_to_the_remaining_ranks() -> None:
    rounds = running()
    rounds.message(0, Leave(1), 1.0)
    sends = rounds.connection_lost(1, "eof")
    assert [member for member, _ in sends] == [2]
    lost = sends[0][1]
    assert isinstance(lost, Lost) and lost.rank == 1
    assert rounds.connection_lost(0, "eof") == [], "who left cannot be lost"


def test_ranks_without_shared_memory_count_as_separate_hosts() -> None:
    rounds = Rounds(4, "1")
    arrive(rounds)
    # Rank 0 could not share with rank 1; the others of the host are not waited for.
    sends = rounds.message(0, MemoryProved(1, (1,), "because"), 0.0)
    assert {message for _, message in sends} == {HostsAgreed(1, (0, 1, 2, 3), "because")}
    assert rounds.message(3, MemoryProved(1, (), ""), 0.0) == [], "too late and harmless"


def test_other_hosts_keep_their_memory() -> None:
    rounds = Rounds(4, "1")
    for rank, host in enumerate("aabb"):
        rounds.message(rank, hello(rank, 4, host=host), 0.0)
    assert rounds.message(0, MemoryProved(1, (1,), "because"), 0.0) == []
    assert rounds.message(2, MemoryProved(1, (), ""), 0.0) == []
    sends = rounds.message(3, MemoryProved(1, (), ""), 0.0)
    assert {message for _, message in sends} == {HostsAgreed(1, (0, 1, 2, 2), "because")}


def test_ranks_without_shared_memory_are_separate_hosts() -> None:
    rounds = Rounds(3, "1")
    welcome = arrive(rounds, sharing=0)[0][1]
    assert isinstance(welcome, Welcome) and welcome.hosts == (0, 1, 2)


def test_a_failed_link_ends_the_round_for_all() -> None:
    rounds = Rounds(3, "1")
    arrive(rounds)
    text = texts(rounds.message(1, Failed(1, "rank 1 could not reach rank 2"), 0.0))
    assert set(text) == {0, 1, 2} and text[0] == "rank 1 could not reach rank 2"


def test_slow_links_end_the_round_with_names() -> None:
    rounds = Rounds(3, "1")
    arrive(rounds)
    rounds.message(1, MemoryProved(1, (), ""), 0.0)
    assert "ranks 0, 2 did not finish trying shared memory" in texts(rounds.tick(LINK_SECONDS))[0]


def test_two_requests_for_one_link_are_answered_once() -> None:
    rounds = running()
    assert rounds.message(0, LinkRequest(1, 2), 0.0) == [(2, ListenRequest(1, 0))], "the higher rank listens"
    assert rounds.message(2, LinkRequest(1, 0), 0.0) == [], "both wished for the same link"
    assert rounds.message(2, ListenAddress(1, 0, "tcp:h:5"), 0.0) == [(0, ListenAddress(1, 2, "tcp:h:5"))]
    assert rounds.message(2, ListenAddress(1, 1, "tcp:h:5"), 0.0) == [], "nobody asked for this one"


def test_a_link_request_for_a_rank_that_has_left_is_refused() -> None:
    rounds = running()
    rounds.message(2, LinkRequest(1, 1), 0.0)
    assert rounds.message(1, Leave(1), 0.0) == [(2, LinkRefused(1, 1, "rank 1 has left"))]
    [(member, message)] = rounds.message(0, LinkRequest(1, 1), 0.0)
    assert member == 0 and isinstance(message, LinkRefused)
    assert isinstance(rounds.message(0, LinkRequest(1, 77), 0.0)[0][1], LinkRefused)


@pytest.mark.security
def test_row_29_a_message_of_another_generation_ends_the_round() -> None:
    rounds = running()
    assert "another generation" in texts(rounds.message(0, LinkRequest(2, 1), 0.0))[0]


@pytest.mark.security
def test_row_30_messages_that_ranks_never_send_end_the_round() -> None:
    rounds = running()
    assert "sent a Started" in texts(rounds.message(1, Started(1), 0.0))[0]
    assert rounds.message(1, Linked(1), 0.0) == [], "it is out"
