"""State in one process: what commits keep, what restore brings back, sharded parts, and Horovod's interface.
Several ranks and real losses are in tests/frameworks and tests/ranks."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import farandole
from farandole.base.errors import HostsUpdatedInterrupt
from farandole.elastic import HostUpdateResult, ObjectState, RandomState, Sharded, State, commits, memory
from farandole.elastic.mirror import Holding, LostShards, _sources, owners, partner
from farandole.elastic.state import METHODS
from farandole.world.runtime import runtime


@pytest.fixture
def job() -> Iterator[None]:
    farandole.init()
    yield
    farandole.shutdown()


def make(**values: Any) -> ObjectState:
    return ObjectState(lambda value: value, lambda: 0, **values)


def test_restore_brings_back_the_last_commit() -> None:
    state = make(step=1, names=["a"], weights=np.zeros(3))
    state.step, state.names[0] = 2, "b"
    state.weights += 1
    state.commit()
    assert commits(state) == 1
    state.step = 3
    state.names.append("c")
    state.weights += 1
    state.restore()
    assert state.step == 2 and state.names == ["b"] and (state.weights == 1).all()
    state.names.append("d")  # what came back is not the copy itself
    state.restore()
    assert state.names == ["b"]


def test_values_that_cannot_be_copied_stay_and_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    source = (number for number in range(5))
    state = make(source=source, step=0)
    for _ in range(3):
        next(source)
        state.commit()
        state.restore()
    assert state.source is source
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("the elastic state's source (generator) cannot be copied")


def test_sync_takes_rank_0s_values_as_they_are_now() -> None:
    theirs = (7, {"step": 40, "names": ["x"]})
    state = ObjectState(lambda value: theirs, lambda: 1, step=0, names=[])
    state.sync()
    assert state.step == 40 and state.names == ["x"] and commits(state) == 7
    state.step = 41
    state.restore()
    assert state.step == 40


OUR_OLD_NAMES = [
    "commits",
    "memory",
    "save_to",
    "load_from",
    "take_number",
    "describe_memory",
    "register_save_callback",
    "messages",
]


def test_any_keyword_is_passed_to_the_script() -> None:
    state = make(**dict.fromkeys(OUR_OLD_NAMES, 0))
    for name in OUR_OLD_NAMES:
        setattr(state, name, getattr(state, name) + 1)
    state.commit()
    for name in OUR_OLD_NAMES:
        setattr(state, name, -1)
    state.restore()
    assert [getattr(state, name) for name in OUR_OLD_NAMES] == [1] * len(OUR_OLD_NAMES)
    assert commits(state) == 1 and set(memory(state)) == {"replicated", "sharded"}
    state.sync()
    assert state.commits == 1 and commits(state) == 1


@pytest.mark.parametrize("name", sorted(METHODS))
def test_names_of_methods_are_refused_as_values(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: methods of ObjectState have these names; use other names"):
        make(**{name: 0})


def test_what_others_read_of_a_state() -> None:
    """Horovod's own tests and subclasses look at these."""
    state = make(step=0)
    first = state._host_messages
    assert first.empty() and state._last_updated_timestamp == 0 and state._saved_state == {"step": 0}
    state.on_hosts_updated(3, HostUpdateResult.added)
    assert first.qsize() == 1
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()
    assert state._last_updated_timestamp == 3 and first.empty()
    state.on_hosts_updated(3, HostUpdateResult.added)  # known already
    state.check_host_updates()
    state.on_hosts_updated(4, HostUpdateResult.removed)
    state.on_reset()
    assert state._host_messages is not first and state._host_messages.empty()


@pytest.mark.parametrize(
    ("result", "skip"),
    [(HostUpdateResult.removed, True), (HostUpdateResult.added, False), (HostUpdateResult.mixed, False)],
)
def test_a_membership_update_interrupts_and_keeps_the_state(result: HostUpdateResult, skip: bool) -> None:
    state = make(step=0)
    state.check_host_updates()
    state.step = 5
    state.on_hosts_updated(1, result)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert caught.value.skip_sync is skip
    state.step = 6
    state.restore()
    assert state.step == 5 and commits(state) == 1  # the check committed it
    state.check_host_updates()  # and only interrupts once


def test_two_updates_are_one_interrupt() -> None:
    state = make(step=0)
    state.on_hosts_updated(1, HostUpdateResult.removed)
    state.on_hosts_updated(2, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert not caught.value.skip_sync
    state.commit()


def test_a_reset_drops_updates_and_runs_callbacks() -> None:
    called = []
    state = make(step=0)
    state.register_reset_callbacks([lambda: called.append(1), lambda: called.append(2)])
    state.on_hosts_updated(1, HostUpdateResult.added)
    state.on_reset()
    state.commit()
    assert called == [1, 2]


def test_save_callbacks_run_when_ranks_leave(job: None, caplog: pytest.LogCaptureFixture) -> None:
    from farandole.rendezvous.messages import MembershipUpdate

    called = []

    def fails() -> None:
        raise OSError("no disk")

    state = make(step=0)
    state.register_save_callback(lambda: called.append(state.step))
    state.register_save_callback(fails)
    state.on_hosts_updated(1, HostUpdateResult.removed)
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    assert called == []  # nothing is saved for hosts that are already gone
    state.step = 3
    runtime.notifications.add_update(MembershipUpdate(0, 5, 1, 2000))
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()
    assert called == [3] and "no disk" in caplog.text
    runtime.notifications.clear()


def test_a_state_class_of_the_user() -> None:
    class Mine(State):
        saved = 0

        def save(self) -> None:
            self.saved += 1

    state = Mine(lambda value: value, lambda: 0)
    state.commit()
    state.commit()
    assert state.saved == commits(state) == 2
    with pytest.raises(NotImplementedError):
        state.restore()


def test_memory_use_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "farandole")
    state = make(weights=np.zeros(1_000_000), step=1)
    state.commit()
    state.commit()
    assert memory(state) == {"replicated": 8_000_000, "sharded": 0}
    [line] = [record.message for record in caplog.records]
    assert line == "a commit keeps 8.0 MB replicated, 0.0 MB sharded in the memory of each rank"


# --- sharded parts ---------------------------------------------------------------------------------------------------


def test_state_that_has_only_sharded_parts(job: None) -> None:
    state = make(moments=Sharded({0: [1.0], "x": [2.0]}), step=0)
    state.sync()
    state.moments[0].append(5.0)
    state.step = 1
    state.commit()
    state.moments[0].append(6.0)
    state.moments["y"] = 1
    del state.moments["x"]
    state.restore()
    assert state.moments[0] == [1.0, 5.0] and "x" in state.moments and "y" not in state.moments
    assert len(state.moments) == 2 and set(state.moments) == {0, "x"}
    assert memory(state)["sharded"] > 0


def test_random_generators_are_part_of_the_commit(job: None) -> None:
    state = make(draws=RandomState(), step=0)
    state.sync()
    random.seed(1)
    np.random.seed(2)
    state.commit()
    first = random.random(), np.random.rand()
    state.restore()
    assert (random.random(), np.random.rand()) == first


def test_partners_are_on_another_host() -> None:
    assert partner(0, [0]) is None
    assert [partner(rank, [0, 0, 0]) for rank in range(3)] == [1, 2, 0]
    for hosts in ([0, 1, 2], [0, 0, 1], [0, 0, 1, 1, 2], [3, 1, 3, 1], [0] * 4 + [1] * 4):
        found = [partner(rank, hosts) for rank in range(len(hosts))]
        assert all(hosts[one] != hosts[rank] for rank, one in enumerate(found) if one is not None)
        if len(set(hosts)) == 2 and len(hosts) == 8:
            assert set(found) == set(range(8))  # no one keeps more than one


def test_owners_are_assigned_in_the_order_of_keys() -> None:
    items: list[Any] = [("a", 10), ("a", 2), ("a", "x"), ("b", 0)]
    assert owners(items, 2) == {("a", 2): 0, ("a", 10): 1, ("a", "x"): 0, ("b", 0): 0}


def test_the_loss_of_both_holders_of_a_shard_is_an_error() -> None:
    everything: list[Any] = [("m", 0), ("m", 1), ("m", 2)]
    reports: list[Any] = [{4: ([("m", 0)], [("m", 2)])}, {3: ([("m", 1)], [])}]
    with pytest.raises(LostShards, match=r"m\[1\]"):
        _sources(everything, 4, reports)
    reports[0][4][1].append(("m", 1))
    assert _sources(everything, 4, reports) == {("m", 0): 0, ("m", 1): 0, ("m", 2): 0}
    assert Holding({("m", 0): b"123"}, {("m", 1): b"4"}).bytes() == 4
