# The elastic driver by small cases: who is a member, who is waited for, who gets which message, when the job ends.
# Pure; time is an argument.
"""`Game` runs a driver step by step; `test_driver_faults.py` runs it with random faults."""

from __future__ import annotations

import random

import pytest

from farandole.rendezvous.elastic import policy
from farandole.rendezvous.elastic.driver import ElasticDriver
from farandole.rendezvous.elastic.members import Drop, Kill, Over, Say, Start, Status
from farandole.rendezvous.elastic.policy import Candidate, Limits, Times
from farandole.rendezvous.messages import (
    Hello,
    HostsAgreed,
    Leave,
    LinkBroken,
    Linked,
    Lost,
    MembershipUpdate,
    MemoryProved,
    Message,
    Rejected,
    Removed,
    Retry,
    Started,
    Welcome,
)


class Game:
    """A driver, and the connections of its workers: worker n speaks over connection 10 n + (how often it came)."""

    def __init__(
        self, np: int = 3, hosts: str = "a:2,b:1", least: int = 1, most: int | None = None, **more: object
    ) -> None:
        limits = Limits(np, least, most, **more)  # type: ignore[arg-type]
        self.driver = ElasticDriver(limits, "1", Times(), random.Random(1))
        self.now = 0.0
        self.times: dict[int, int] = {}
        self.delivered: list[tuple[int, Message]] = []
        self.acts: list[object] = []
        self.hosts(hosts)

    def take(self, sends: list[tuple[int, Message]]) -> list[tuple[int, Message]]:
        found = [(member // 10, message) for member, message in sends]
        self.delivered += found
        self.acts += self.driver.take_actions()
        return found

    def hosts(self, text: str) -> list[tuple[int, Message]]:
        found = [(name, int(slots)) for name, _, slots in (one.partition(":") for one in text.split(",") if one)]
        return self.take(self.driver.hosts_found(found, self.now))

    def started(self) -> list[int]:
        found = [act.worker for act in self.acts if isinstance(act, Start)]
        self.acts = [act for act in self.acts if not isinstance(act, Start)]
        return found

    def hello(self, worker: int, commit: int = 0, package: str = "1", wire: str = "") -> list[tuple[int, Message]]:
        self.times[worker] = self.times.get(worker, -1) + 1
        known = self.driver.state.workers.get(worker)
        host = known.host if known is not None else "?"
        hello = Hello(0, 1, host, 100 + worker, package, 1, 1000, 2, "l", "r", worker, commit, wire=wire)
        return self.send(worker, hello)

    def send(self, worker: int, message: Message) -> list[tuple[int, Message]]:
        return self.take(self.driver.message(10 * worker + self.times[worker], message, self.now))

    def begin(self, *workers: int, commit: int = 0) -> dict[int, int]:
        """All of them come, prove and link: the rank of each."""
        sends = [one for worker in workers for one in self.hello(worker, commit)]
        return self.link(sends)

    def link(self, sends: list[tuple[int, Message]]) -> dict[int, int]:
        ranks = {worker: message.numbers[0] for worker, message in sends if isinstance(message, Welcome)}
        generation = self.driver.generation
        for worker in ranks:
            sends += self.send(worker, MemoryProved(generation, (), ""))
        assert sum(isinstance(message, HostsAgreed) for _, message in sends) == len(ranks)
        started = [one for worker in ranks for one in self.send(worker, Linked(generation))]
        assert sum(isinstance(message, Started) for _, message in started) == len(ranks)
        return ranks

    def ended(self, worker: int, code: int = 137) -> list[tuple[int, Message]]:
        return self.take(self.driver.ended(worker, code, "died", self.now))

    def pass_time(self, seconds: float) -> list[tuple[int, Message]]:
        self.now += seconds
        return self.take(self.driver.tick(self.now))

    @property
    def over(self) -> Over | None:
        return self.driver.over


def test_the_first_generation_has_all_workers_with_their_numbers() -> None:
    game = Game()
    assert game.started() == [0, 1, 2]
    assert game.hello(2) == [] and game.hello(0) == []
    sends = game.hello(1)
    numbers = {worker: message.numbers for worker, message in sends if isinstance(message, Welcome)}
    assert numbers == {0: (0, 3, 0, 2, 0, 2), 1: (1, 3, 1, 2, 0, 1), 2: (2, 3, 0, 1, 1, 2)}
    game.link(sends)
    assert [one.status for one in game.driver.state.members] == [Status.MEMBER] * 3


def test_row_1_a_death_is_told_at_once_and_survivors_go_on_without_waiting_for_the_new_process() -> None:
    game = Game()
    game.begin(0, 1, 2)
    game.started()
    sends = game.ended(1)
    assert [(worker, type(message)) for worker, message in sends] == [(0, Lost), (2, Lost)]
    assert game.started() == [3]  # at once: the first failure costs no time
    assert game.send(0, Leave(1, 1)) == [] and game.hello(0, 5) == []
    game.send(2, Leave(1, 1))
    assert game.link(game.hello(2, 5)) == {0: 0, 2: 1}
    replies = game.hello(3)  # the newcomer
    assert [(worker, message.result) for worker, message in replies if isinstance(message, MembershipUpdate)] == [
        (0, 2),
        (2, 2),
    ]
    game.send(0, Leave(2, 1))
    game.send(2, Leave(2, 1))
    game.hello(0, 6)
    assert game.link(game.hello(2, 6)) == {0: 0, 3: 1, 2: 2}


def test_row_3_the_newest_commit_leads_and_only_if_it_was_in_the_last_generation() -> None:
    game = Game(hosts="a:1,b:1,c:1")
    game.begin(0, 1, 2)
    game.ended(0)
    game.send(1, Leave(1, 1))
    game.send(2, Leave(1, 1))
    game.hello(1, 7)
    assert game.link(game.hello(2, 8)) == {2: 0, 1: 1}
    assert policy.arrange([Candidate(1, "a", 9, -1), Candidate(2, "b", 7, 0)])[0].worker == 2


def test_a_new_worker_without_state_does_not_continue_alone() -> None:
    game = Game(np=1, hosts="a:1")
    game.begin(0, commit=0)
    game.hosts("a:1,b:1")
    game.hello(1)
    game.send(0, Leave(1, 1))
    game.link(game.hello(0, 9))
    game.ended(0)  # before it has given its state to the other
    game.send(1, Leave(2, 1))
    game.hello(1, 0)
    assert game.over is not None and game.over.failed and "state" in game.over.text


def test_row_2_a_death_while_links_are_made_repeats_the_round() -> None:
    game = Game()
    game.hello(0), game.hello(1), game.hello(2)
    sends = game.ended(2)
    assert [(worker, type(message)) for worker, message in sends] == [(0, Retry), (1, Retry)]
    game.hello(0)
    assert game.hello(1) == []  # np is 3: the first generation waits for the new one
    [new] = [number for number in game.started() if number > 2]
    assert len(game.link(game.hello(new))) == 3


def test_row_5_an_evicted_rank_is_fenced_and_rejoins_or_leaves() -> None:
    game = Game()
    game.begin(0, 1, 2)
    game.started()
    game.acts.clear()
    sends = game.take(game.driver.evict_silent(1, "is silent for 5 s", game.now))
    assert [worker for worker, message in sends if isinstance(message, Lost)] == [0, 2]
    assert Drop(10) in game.acts and any(isinstance(act, Say) and "rank 1" in act.text for act in game.acts)
    assert (
        game.send(1, Linked(1)) == [] and game.send(1, LinkBroken(1, 0, "")) == []
    )  # late messages of the evicted worker
    game.send(0, Leave(1, 1)), game.send(2, Leave(1, 1))
    game.hello(0, 1)
    game.link(game.hello(2, 1))
    assert game.started() == []
    assert any(isinstance(message, MembershipUpdate) for _, message in game.hello(1, 1))  # it woke up in time
    game.take(game.driver.evict_silent(1, "again", game.now))
    game.pass_time(11)
    [new] = game.started()
    assert new == 3
    assert [type(message) for _, message in game.hello(1, 1)] == [Removed]
    game.ended(1, 0)
    assert not game.driver.state.finishing  # one that was sent away has not finished the job


def test_rows_5_and_37_who_is_evicted_for_silence_and_who_not() -> None:
    game = Game()
    game.begin(0, 1, 2)
    quiet = game.driver.silence_reported
    assert game.take(quiet(1, 2.0, "T", game.now)) == []
    assert any(isinstance(act, Say) and "2.0 s (its process is stopped)" in act.text for act in game.acts)
    assert game.take(quiet(1, 0, "", game.now)) == []  # it is back
    game.take(quiet(1, 2.0, "D", game.now))
    assert game.take(quiet(1, 5.0, "D", game.now)) == []  # waits in the kernel
    assert [type(m) for _, m in game.take(quiet(1, 30.0, "D", game.now))] == [Lost, Lost]
    game = Game()
    game.begin(0, 1, 2)
    quiet = game.driver.silence_reported
    for worker in (0, 1):
        game.take(quiet(worker, 2.0, "T", game.now))
    for worker in (0, 1):
        assert game.take(quiet(worker, 5.0, "T", game.now)) == []  # most fell silent at once: suspect yourself
    for worker in (0, 1):
        game.take(quiet(worker, 0, "", game.now))
    game.take(quiet(2, 2.0, "S", game.now))
    assert [type(m) for _, m in game.take(quiet(2, 5.0, "S", game.now))] == [Lost, Lost]


def test_a_lost_host_loses_only_its_own_ranks() -> None:
    game = Game()
    game.begin(0, 1, 2)
    replies = game.hosts("b:1")
    assert [(worker, message.result) for worker, message in replies if isinstance(message, MembershipUpdate)] == [
        (0, 1),
        (1, 1),
        (2, 1),
    ]
    for worker in (0, 1, 2):
        game.send(worker, Leave(1, 1))
    assert [type(m) for _, m in game.hello(0, 1)] == [Removed] and [type(m) for _, m in game.hello(1, 1)] == [Removed]
    assert game.link(game.hello(2, 1)) == {2: 0}
    game.ended(0, 0), game.ended(1, 0)
    assert game.over is None and not game.driver.state.finishing
    assert game.started() == [0, 1, 2]  # and no new one


def test_the_last_rank_with_the_state_stays_until_another_rank_has_it() -> None:
    game = Game(np=1, hosts="a:1")
    game.begin(0)
    game.hosts("b:1")
    replies = game.hello(1)
    assert any(isinstance(message, MembershipUpdate) for _, message in replies)
    game.send(0, Leave(1, 1))
    assert game.link(game.hello(0, 3)) == {0: 0, 1: 1}
    game.send(0, Leave(2, 1)), game.send(1, Leave(2, 1))
    game.hello(1, 3)
    assert [type(m) for _, m in game.hello(0, 3) if not isinstance(m, Welcome)] == [Removed]


def test_a_process_that_does_not_leave_in_time_is_killed() -> None:
    game = Game(drain_timeout=5.0)
    game.begin(0, 1, 2)
    game.hosts("a:2")
    game.pass_time(4.9)
    assert Kill(2) not in game.acts
    game.pass_time(0.2)
    assert Kill(2) in game.acts


def test_row_23_a_drain_names_its_deadline() -> None:
    game = Game()
    game.begin(0, 1, 2)
    replies = game.take(game.driver.drain("b", 7.0, game.now))
    assert {message for _, message in replies} == {MembershipUpdate(1, 1, policy.REMOVED, 7000)}


def test_row_23_a_drain_continues_when_a_rank_dies_before_the_next_commit() -> None:
    """The host that has to go is in one more generation, hears how much time is left, saves there, and goes."""
    game = Game()
    game.begin(0, 1, 2)
    game.take(game.driver.drain("b", 7.0, game.now))
    game.pass_time(1.0)
    game.ended(0)
    sends = [one for worker in (1, 2) for one in (game.send(worker, Leave(1, 1)) + game.hello(worker, 1))]
    game.delivered.clear()
    assert game.link(sends) == {1: 0, 2: 1}
    replies = [message for _, message in game.delivered if isinstance(message, MembershipUpdate)]
    assert replies == [MembershipUpdate(2, 2, policy.REMOVED, 6000)] * 2
    for worker in (1, 2):
        game.send(worker, Leave(2, 3))
    assert [type(message) for _, message in game.hello(2, 2)] == [Removed]  # it has saved
    assert game.link(game.hello(1, 2)) == {1: 0}


def test_row_23_a_drain_ends_at_its_deadline_even_if_a_rank_died() -> None:
    game = Game()
    game.begin(0, 1, 2)
    game.take(game.driver.drain("b", 2.0, game.now))
    game.ended(0)
    game.send(2, Leave(1, 1))
    game.pass_time(2.5)
    assert Kill(2) in game.acts
    assert [type(message) for _, message in game.hello(2, 1)] == [Removed]


def test_row_23_a_drained_rank_is_replaced_and_does_not_count_as_a_success() -> None:
    game = Game()
    game.begin(0, 1, 2)
    game.started()
    for worker in (0, 1, 2):
        game.send(worker, Leave(1, 2 if worker == 1 else 1))
    game.hello(0, 1)
    assert game.link(game.hello(2, 1)) == {0: 0, 2: 1}  # nobody waits for it
    game.ended(1, 0)
    assert not game.driver.state.finishing and game.started() == [3]


def test_exit_code_0_is_a_success_unless_the_rank_was_evicted() -> None:
    game = Game()
    game.begin(0, 1, 2)
    game.started()
    game.take(game.driver.evict_silent(1, "stopped", game.now))
    game.pass_time(3.0)
    game.ended(1, 0)
    assert not game.driver.state.finishing
    other = Game()
    other.begin(0, 1, 2)
    other.take(other.driver.connection_lost(10, "closed", other.now))  # it said no goodbye
    other.ended(1, 0)
    assert other.driver.state.finishing


def test_after_the_end_nothing_is_decided() -> None:
    game = Game()
    game.begin(0, 1, 2)
    game.started()
    game.driver.stop()
    game.ended(1)
    assert game.started() == [] and game.pass_time(100) == []


def test_row_13_of_two_hosts_without_connection_one_waits() -> None:
    game = Game(hosts="a:1,b:1,c:1")
    game.hello(0), game.hello(1), game.hello(2)
    for worker in (0, 1, 2):
        game.send(worker, MemoryProved(1, (), ""))
    game.send(0, LinkBroken(1, 2, "no way"))
    assert [type(m) for _, m in game.pass_time(0.5)] == [Retry] * 3
    game.hello(0), game.hello(1), game.hello(2)
    assert game.over is None and game.driver.generation == 1  # np is 3; nothing begins without it
    game = Game(hosts="a:1,b:1,c:1", np=2)
    game.begin(0, 1, 2)
    for worker in (0, 1, 2):
        game.send(worker, Leave(1, 1))
    sends = game.hello(0, 1) + game.hello(1, 1) + game.hello(2, 1)
    for worker in (0, 1, 2):
        game.send(worker, MemoryProved(2, (), ""))
    game.send(1, LinkBroken(2, 2, "no way")), game.send(0, LinkBroken(2, 2, "no way"))
    game.pass_time(0.5)
    game.hello(2, 1)
    assert len(sends) == 3 and game.hello(0, 1) == []
    assert game.link(game.hello(1, 1)) == {0: 0, 1: 1}
    assert not [m for _, m in game.pass_time(10) if isinstance(m, MembershipUpdate)]  # no flip-flop
    assert [m for _, m in game.pass_time(6) if isinstance(m, MembershipUpdate)]


def test_a_failing_slot_is_restarted_later_and_the_job_fails_when_all_slots_do() -> None:
    game = Game(np=2, hosts="a:2")
    game.begin(0, 1)
    game.started()
    moments = []
    for _ in range(4):
        worker = max(game.driver.state.workers)
        game.ended(worker if worker > 1 else 1, 1)
        before = game.now
        while not (new := game.started()):
            game.pass_time(0.25)
        moments.append(game.now - before)
        assert new
    assert moments == [0.0, 1.0, 2.0, 4.0]
    assert game.over is None
    game.ended(0, 1)
    assert game.over is not None and game.over.failed


def test_a_command_that_always_fails_ends_the_job() -> None:
    game = Game(np=2, hosts="a:2")
    for _ in range(3):
        for worker in list(game.driver.state.workers):
            game.ended(worker, 1)
    assert game.over is not None and game.over.failed and "before the first" in game.over.text


def test_after_one_success_the_others_finish_and_no_worker_is_started() -> None:
    game = Game()
    game.begin(0, 1, 2)
    game.started()
    game.send(0, Leave(1, 0))
    game.ended(0, 0)
    assert game.started() == [] and game.over is None
    game.ended(1, 137)  # killed at the very end
    game.send(2, Leave(1, 1))
    assert game.link(game.hello(2, 4)) == {2: 0}  # it finishes alone
    game.ended(2, 0)
    assert game.over == Over(False, "") and game.started() == []


def test_limits_of_size_and_of_resets() -> None:
    game = Game(np=2, hosts="a:4", most=3, reset_limit=1)
    assert game.started() == [0, 1, 2]
    game.begin(0, 1, 2)
    game.ended(2)
    game.send(0, Leave(1, 1)), game.send(1, Leave(1, 1))
    game.hello(0, 1)
    game.link(game.hello(1, 1))
    assert game.over is None
    game.ended(1)
    game.send(0, Leave(2, 1))
    game.hello(0, 1)
    assert game.over is not None and "--reset-limit 1" in game.over.text


def test_below_min_np_the_job_waits_and_then_ends_with_what_is_missing() -> None:
    game = Game(np=3, least=3, elastic_timeout=20.0)
    game.begin(0, 1, 2)
    game.hosts("a:2")
    for worker in (0, 1, 2):
        game.send(worker, Leave(1, 1))
        game.hello(worker, 1)
    game.pass_time(19)
    assert game.over is None
    game.pass_time(2)
    assert game.over is not None and "2 of the 3 ranks of --min-np" in game.over.text and "2 slots" in game.over.text


def test_a_cool_down_keeps_a_host_out() -> None:
    game = Game(np=2, hosts="a:1,b:1", cooldown=(10, 100))
    game.begin(0, 1)
    game.started()
    game.ended(1)
    assert game.started() == []
    game.pass_time(19)
    assert game.started() == []
    game.pass_time(12)
    assert game.started() == [2]


def test_row_31_another_version_is_refused() -> None:
    game = Game()
    [(_, sorry)] = game.hello(0, package="2")
    assert isinstance(sorry, Rejected) and "farandole 2" in sorry.text


def test_another_protocol_at_the_start_is_reported_to_all_waiting_ranks() -> None:
    game = Game(hosts="a:1,b:1,c:1")
    assert game.hello(0, wire="aa") == []
    sends = game.hello(1, wire="bb")
    assert sorted(worker for worker, _ in sends) == [0, 1]
    for _, message in sends:
        assert isinstance(message, Rejected)
        for word in ("worker 1 on b", "protocol bb", "worker 0 on a", "protocol aa", "install the same build"):
            assert word in message.text
    assert any(isinstance(act, Say) and "protocol bb" in act.text for act in game.acts)
    assert not any(isinstance(act, Drop) for act in game.acts)  # it would overtake the words
    assert game.driver.generation == 0


def test_a_new_worker_with_another_protocol_version_is_refused_and_the_job_continues() -> None:
    game = Game(np=2, hosts="a:1,b:1", least=1)
    for worker in (0, 1):
        sends = game.hello(worker, wire="aa")
    assert game.link(sends) == {0: 0, 1: 1}
    game.ended(1)
    assert game.send(0, Leave(1, 1)) == []
    assert game.link(game.hello(0, 3, wire="aa")) == {0: 0}  # it continues alone
    game.started()
    [(worker, message)] = game.hello(2, wire="bb")
    assert worker == 2 and isinstance(message, Rejected)
    for word in ("worker 2 on b", "protocol bb", "worker 0 on a", "protocol aa"):
        assert word in message.text
    game.ended(2, 1)
    assert [one.number for one in game.driver.state.members] == [0] and game.over is None
    game.pass_time(60)
    [number] = game.started()
    [(worker, updated)] = game.hello(number, wire="aa")  # one of the right build is let in
    assert worker == 0 and isinstance(updated, MembershipUpdate)


def test_a_second_connection_of_one_worker_ends_the_first() -> None:
    game = Game()
    game.begin(0, 1, 2)
    sends = game.hello(1, 1)
    assert [worker for worker, message in sends if isinstance(message, Lost)] == [0, 2]
    assert Drop(10) in game.acts


@pytest.mark.parametrize(
    ("limits", "word"),
    [
        ({"np": 2, "min_np": 3}, "--min-np 3"),
        ({"np": 2, "min_np": 0}, "--min-np 0"),
        ({"np": 2, "min_np": 1, "max_np": 1}, "--max-np 1"),
        ({"np": 2, "min_np": 1, "reset_limit": -1}, "--reset-limit -1"),
        ({"np": 2, "min_np": 1, "cooldown": (0, 5)}, "--blacklist-cooldown-range 0 5"),
        ({"np": 2, "min_np": 1, "cooldown": (7, 5)}, "--blacklist-cooldown-range 7 5"),
        ({"np": 2, "min_np": 1, "cooldown": (7, 4000)}, "--blacklist-cooldown-range 7 4000"),
    ],
)
def test_bad_limits_name_the_flag(limits: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Limits(**limits)  # type: ignore[arg-type]


def test_an_exit_before_the_first_generation_is_no_success_while_others_wait() -> None:
    game = Game()
    game.ended(0, 0)
    assert game.over is None and game.started() == [0, 1, 2]
    game.hello(1)
    assert game.over is None  # the third may come yet, or end as well
    game.hello(2)
    assert game.over is not None and game.over.failed and "exit code 0 before" in game.over.text
    other = Game()  # a command that is no training
    for worker in (0, 1, 2):
        assert other.over is None
        other.ended(worker, 0)
    assert other.over == Over(False, "") and other.started() == [0, 1, 2]


def test_a_new_worker_that_exits_with_0_before_it_was_a_member_does_not_end_the_job() -> None:
    game = Game()
    game.begin(0, 1, 2)
    game.started()
    game.ended(2)
    assert game.started() == [3]
    game.ended(3, 0)
    assert not game.driver.state.finishing


def test_the_roster_has_the_worker_of_each_rank() -> None:
    game = Game()
    game.begin(0, 1, 2)
    assert game.driver.state.worker_of_rank == {0: 0, 1: 1, 2: 2}
    game.ended(0)
    for worker in (1, 2):
        game.send(worker, Leave(1, 1))
    game.link(game.hello(1) + game.hello(2))
    assert game.driver.state.worker_of_rank == {0: 1, 1: 2}


def test_a_host_whose_rank_failed_is_left_out_and_its_other_ranks_leave() -> None:
    game = Game(np=4, hosts="a:2,b:2", leave_hosts_out=True)
    game.begin(0, 1, 2, 3)
    game.started()
    replies = game.ended(3)
    assert [worker for worker, message in replies if isinstance(message, Lost)] == [0, 1, 2]
    assert game.started() == []  # neither there nor elsewhere
    assert any("b is left out, because" in act.text for act in game.acts if isinstance(act, Say))
    for worker in (0, 1, 2):
        game.send(worker, Leave(1, 1))
    sends = [one for worker in (0, 1, 2) for one in game.hello(worker, 5)]
    assert [worker for worker, message in sends if isinstance(message, Removed)] == [2]
    sends += game.ended(2, 0)
    assert {message.numbers[:2] for _, message in sends if isinstance(message, Welcome)} == {(0, 2), (1, 2)}
    game.hosts("a:2,b:2")
    game.pass_time(1000)
    assert game.started() == [] and game.over is None


def test_a_host_that_is_left_out_is_back_after_its_time() -> None:
    game = Game(np=2, hosts="a:1,b:1", leave_hosts_out=True, cooldown=(10, 20))
    game.begin(0, 1)
    game.started()
    game.ended(1)
    game.send(0, Leave(1, 1))
    game.link(game.hello(0, 5))
    assert game.started() == []
    moment = game.driver.deadline()
    assert moment is not None and moment <= game.now + 20
    game.pass_time(20)
    assert game.started() == [2]


def test_the_only_rank_with_the_state_stays_on_a_host_without_slots_until_another_rank_has_it() -> None:
    game = Game(np=2, hosts="a:2", leave_hosts_out=True)
    game.begin(0, 1)
    game.started()
    game.hosts("a:2,b:1")
    assert game.started() == [2]
    game.ended(1)
    game.send(0, Leave(1, 1))
    assert game.link(game.hello(0, 5)) == {0: 0}
    [(_, replies)] = game.hello(2)
    assert isinstance(replies, MembershipUpdate) and replies.result & 2
    generation = game.driver.generation
    game.send(0, Leave(generation, 1))
    assert game.link(game.hello(0, 6)) == {0: 0, 2: 1}  # it gives the newcomer what it has
    game.send(0, Leave(generation + 1, 1))
    [(_, gone), *_] = game.hello(0, 7)
    assert isinstance(gone, Removed)


def test_when_every_host_is_left_out_the_job_ends_with_the_reason() -> None:
    game = Game(np=2, hosts="a:1,b:1", leave_hosts_out=True)
    game.started()
    game.ended(0, 1)
    assert game.over is None
    game.ended(1, 1)
    assert game.over is not None and game.over.failed and "every host has been left out" in game.over.text
