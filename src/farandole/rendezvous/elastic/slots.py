# The slots of an elastic job: which worker must leave its slot, which slots get a new worker, what a failure costs.
# Pure: changes the state and its list of actions; time is an argument.
"""`Slots(state, draw)` is the part of the driver that starts workers. `draw` gives the random part of cool-downs."""

from __future__ import annotations

import random
from collections import Counter

from farandole.rendezvous.elastic import policy
from farandole.rendezvous.elastic.members import Numbers, Slot, Start, Status, Worker
from farandole.rendezvous.elastic.policy import numbers_of
from farandole.rendezvous.elastic.state import JobState


class Slots:
    """See the module."""

    def __init__(self, state: JobState, draw: random.Random) -> None:
        self._state = state
        self._draw = draw
        self._numbers = 0  # workers that were started
        self._failures: Counter[str] = Counter()  # of workers, by host

    def take_away(self) -> None:
        """Workers whose slot is gone must leave within the time to drain."""
        state = self._state
        for worker in state.workers.values():
            host = state.hosts[worker.host]
            here = (
                host.listed and not host.drained and worker.index < host.slot_count and host.name not in state.left_out
            )
            if here and worker.leaving is not None and not worker.dismissed:
                worker.leaving, worker.must_save = None, False  # it was put back in time
            if not here and worker.leaving is None and worker.status is not Status.ENDED:
                worker.leaving = state.now + state.limits.drain_timeout
                if worker.status is Status.STARTING:
                    worker.leaving = state.now

    def release_silent(self) -> None:
        """Frees the slots of evicted workers that have not joined again."""
        state = self._state
        for worker in state.workers.values():
            if worker.status is Status.OUT and state.now >= worker.changed + state.times.replace:
                slot = state.own_slot(worker)
                if slot is not None and state.hosts[worker.host].up and not state.needed(worker):
                    slot.worker = None

    def fill(self) -> None:
        """Starts workers in free slots."""
        state = self._state
        if state.finishing:
            return
        new = self._new_workers(state.limits.most - len(state.live()))
        for one in new:
            one.first_rank = self._free_rank()
        # When all are known, so that each is told their number.
        for one in new:
            state.actions.append(Start(one.number, one.host, one.index, self._first_numbers(one), state.runs > 0))

    def _new_workers(self, room: int) -> list[Worker]:
        """A worker for each free slot, as many as there is room for."""
        state = self._state
        new: list[Worker] = []
        for host in state.hosts.values():
            while len(host.slots) < host.slot_count:
                host.slots.append(Slot())
            if not state.usable(host) or host.not_before > state.now:
                continue
            for index, slot in enumerate(host.slots[: host.slot_count]):
                if len(new) >= room:
                    return new
                free = slot.worker is None and slot.not_before <= state.now
                if free and slot.failures < policy.MAX_FAILURES:
                    slot.worker = self._numbers
                    worker = Worker(self._numbers, host.name, index, state.now, changed=state.now)
                    state.workers[self._numbers] = worker
                    new.append(worker)
                    self._numbers += 1
        return new

    def _free_rank(self) -> int:
        """A number that no living worker has as its rank, or was started with: the lowest at first, then the next one
        after theirs, so that no newcomer takes itself for rank 0."""
        state = self._state
        living = [one for one in state.workers.values() if one.status is not Status.ENDED]
        taken = {one.first_rank for one in living} | {one.rank for one in living}
        if state.runs:
            return max(taken, default=-1) + 1
        return next(number for number in range(len(taken) + 1) if number not in taken)

    def _first_numbers(self, worker: Worker) -> Numbers:
        """The numbers in its variables when it starts. It gets those of a generation when it joins."""
        state = self._state
        live = state.live()
        numbers = numbers_of([(one.host, one.local) for one in live])[live.index(worker)]
        return (worker.first_rank, max(len(live), worker.first_rank + 1), *numbers[2:])

    def count_failure(self, worker: Worker, slot: Slot | None, from_outside: bool) -> None:
        """A worker has failed: its slot or its host waits, or gets no new worker. `slot`: None if it had lost it."""
        state = self._state
        if slot is not None:
            good = worker.generation > 0 and (from_outside or state.now - worker.started > policy.GOOD_LIFE)
            slot.failures = 1 if good else slot.failures + 1
            slot.not_before = state.now + policy.backoff(slot.failures)
            if slot.failures == policy.MAX_FAILURES:
                where = f"slot {worker.index} of {worker.host}"
                state.say(f"{where} has failed {slot.failures} times in a row: it stays empty")
        host = state.hosts[worker.host]
        self._failures[host.name] += 1
        seconds = float("inf")
        if state.limits.cooldown is not None:
            seconds = policy.cooldown(state.limits.cooldown, self._failures[host.name], self._draw.random())
        if state.limits.leave_hosts_out:
            state.left_out[host.name] = state.now + seconds
            how_long = "" if seconds == float("inf") else f" for {seconds:.0f} s"
            state.say(f"{host.name} is left out{how_long}, because a rank has failed there")
        elif state.limits.cooldown is not None:
            host.not_before = state.now + seconds
            state.say(f"{host.name} gets no new ranks for {seconds:.0f} s, because one has failed there")
