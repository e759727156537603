"""The elastic loop in one process: what is restored, synchronised and called again after which exception.
Errors are raised by the training function; real losses are in tests/ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import farandole
from farandole import HorovodInternalError, HostsUpdatedInterrupt, Mismatch
from farandole.base.config import Config
from farandole.elastic import HostUpdateResult, ObjectState, notification_manager, run, run_fn
from farandole.world import membership


class Noted(ObjectState):
    """Notes what is done with it."""

    def __init__(self, **values: Any) -> None:
        self.done: list[str] = []
        super().__init__(lambda value: value, lambda: 0, **values)

    def sync(self) -> None:
        self.done.append("sync")
        super().sync()

    def restore(self) -> None:
        self.done.append("restore")
        super().restore()

    def on_reset(self) -> None:
        self.done.append("on_reset")
        super().on_reset()


def attempt(*failures: Exception) -> tuple[Noted, list[int]]:
    """A function that fails with each of these in turn, after a step that is not committed."""
    state, left = Noted(step=0), list(failures)
    seen: list[int] = []

    def train(state: Noted, extra: int, *, more: int) -> int:
        seen.append(state.step)
        state.step += 1
        if left:
            raise left.pop(0)
        return extra + more

    assert run_fn(train, lambda: state.done.append("reset"))(state, 1, more=2) == 3
    return state, seen


def test_the_loop_begins_with_equal_state() -> None:
    assert attempt()[0].done == ["sync"]


def test_an_internal_error_goes_back() -> None:
    state, seen = attempt(HorovodInternalError("x"))
    assert state.done == ["sync", "restore", "reset", "on_reset", "sync"] and seen == [0, 0]


def test_a_membership_update_calls_the_function_again() -> None:
    state, seen = attempt(HostsUpdatedInterrupt(skip_sync=False), HostsUpdatedInterrupt(skip_sync=True))
    assert state.done == ["sync", "reset", "on_reset", "sync", "reset", "on_reset"] and seen == [0, 1, 2]


def test_other_errors_are_raised_in_the_script() -> None:
    with pytest.raises(KeyError):
        attempt(KeyError("x"))


def test_a_mismatch_is_not_retried() -> None:
    for before in ([], [HorovodInternalError("a rank is lost")], [HostsUpdatedInterrupt()]):
        state, failures, calls = Noted(step=0), [*before, Mismatch("x")], []

        def train(state: Noted) -> None:
            calls.append(state)  # noqa: B023
            raise failures.pop(0)  # noqa: B023

        with pytest.raises(Mismatch):
            run_fn(train, lambda: None)(state)
        assert len(calls) == len(before) + 1 and not failures


def test_a_reset_callback_may_fail_too() -> None:
    state = Noted(step=0)
    failures = [HorovodInternalError("first"), HorovodInternalError("second")]
    state.register_reset_callbacks([lambda: failures and (_ for _ in ()).throw(failures.pop())])

    def train(state: Noted) -> int:
        if len(failures) == 2:
            raise failures.pop()
        return 5

    assert run_fn(train, lambda: None)(state) == 5
    assert state.done == ["sync", "restore", "on_reset", "restore", "on_reset", "sync"]


@pytest.fixture
def job() -> Iterator[None]:
    farandole.init()
    yield
    farandole.shutdown()


def test_run_meets_the_others_again(job: None) -> None:
    from farandole.world.runtime import runtime

    worlds = []

    @run
    def train(state: Noted) -> int:
        """What it says."""
        worlds.append(runtime.world)
        if len(worlds) == 1:
            raise HorovodInternalError("x")
        if len(worlds) == 2:
            notification_manager.handle_hosts_updated(1, HostUpdateResult.added)
        state.commit()
        return farandole.size()

    state = Noted(step=0)
    assert train(state) == 1 and train.__doc__ == "What it says."
    assert len({id(world) for world in worlds}) == 3
    assert state.done == ["sync", "restore", "on_reset", "sync", "on_reset", "sync"]
    notification_manager.handle_hosts_updated(2, HostUpdateResult.added)  # nobody listens any more
    state.commit()


@pytest.mark.parametrize("world_ended", [False, True])
def test_a_closed_connection_does_not_mean_that_the_launcher_has_ended(
    world_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that would save something does so only when its agent says that there is no launcher any more."""
    monkeypatch.setattr(membership, "LAUNCHER_GONE_S", 0.3)

    class Revoked:
        def __init__(self) -> None:
            self.texts: list[str] = []

        def revoke(self, code: int, rank: int, text: str) -> None:
            self.texts.append(text)

    word = os.memfd_create("agent")
    os.truncate(word, 4096)
    one, engine = membership.Membership(), Revoked()
    one.opened(Config(agent_pulse_fd=word))
    one.set_saving(True)
    late = threading.Timer(
        0.1, lambda: os.pwrite(word, b"\1", membership.LAUNCHER_GONE_OFFSET) if world_ended else None
    )
    late.start()
    one.hub_lost(engine, "closed")  # type: ignore[arg-type]
    late.join()
    os.close(word)
    assert bool(engine.texts) is not world_ended
    assert (one.notifications.pending()[2] is not None) is world_ended
