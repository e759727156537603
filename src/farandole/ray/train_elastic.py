# Ray Train whose survivors go on: the backend for `HorovodConfig(min_workers=...)`.
# Touches Ray Train's replica groups, one for each worker, and the coordinator of elastic jobs in Train's controller.
"""Ray replaces the worker that was lost (`has_replica_groups`); the others go on meanwhile and take it in."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from types import TracebackType
from typing import Any

import ray
from ray.train.backend import Backend

from farandole import runtime
from farandole.autoload import allowed
from farandole.elastic.members import Act, Life, Over, Say, Start
from farandole.elastic.policy import Limits
from farandole.private import ray_names
from farandole.ray.meeting import Meeting
from farandole.ray.pulse import Pulses
from farandole.ray.train import LEAVE_SECONDS, Rank
from farandole.ray.utils import detect_nics, nics_to_env_var
from farandole.ray.worker import Whereabouts, take_place, whereabouts
from farandole.rendezvous.messages import Sorry

KILLED = 128 + 9
SLOT_SECONDS = 60.0  # for the coordinator to have a place for a worker that Ray has started

log = logging.getLogger("farandole.ray")


class ElasticBackend(Backend):
    """Runs in Train's controller. A slot is one of Train's ranks; its worker may be another process each time."""

    share_cuda_visible_devices = True
    has_replica_groups = True

    def __init__(self) -> None:
        # Made in the driver and sent to the controller: threads and locks begin there.
        self._meeting: Meeting | None = None
        self._changed: Any = None
        self._numbers: dict[str, int] = {}  # slot -> the number of the worker that shall be in it
        self._given: dict[str, int] = {}  # slot -> the number of the worker that is in it
        self._pulses: Pulses | None = None

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """All workers have been started, or one in the place of one that was lost."""
        workers = worker_group.get_workers()
        size = int(workers[0].distributed_context.world_size)
        if len(workers) == size or self._meeting is None:
            self._begin(size, backend_config)
        found = worker_group.execute(whereabouts)
        ready = []
        for index, (worker, place) in enumerate(zip(workers, found, strict=True)):
            arguments = self._place(f"rank-{worker.distributed_context.world_rank}", worker, place, backend_config)
            ready.append(worker_group.execute_single_async(index, take_place, *arguments))
        ray.get(ready)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """All workers shall end, or one that is to be replaced."""
        workers = worker_group.get_workers()
        if len(workers) == int(workers[0].distributed_context.world_size):
            with contextlib.suppress(Exception):
                ray.get(worker_group.execute_async(runtime.shutdown), timeout=LEAVE_SECONDS)
            self._close()

    def _begin(self, size: int, config: Any) -> None:
        self._close()
        self._changed = threading.Condition()
        least = min(config.min_workers, size)
        limits = Limits(size, least, size, elastic_timeout=config.elastic_timeout)
        self._meeting = Meeting(limits, config.nics, self._act)
        self._meeting.start()
        self._pulses = Pulses(self._coordinator.times, self._quiet)
        slots = [(f"rank-{rank}", 1) for rank in range(size)]
        self._call(lambda now: self._coordinator.hosts_found(slots, now))

    @property
    def _coordinator(self) -> Any:
        assert self._meeting is not None
        return self._meeting.coordinator

    def _call(self, decide: Any) -> None:
        meeting = self._meeting
        assert meeting is not None
        meeting.call(lambda: meeting.deliver(decide(time.monotonic())))

    def _place(self, slot: str, worker: Any, place: Whereabouts, config: Any) -> tuple[Any, ...]:
        before = self._given.get(slot)
        if before is not None:
            assert self._pulses is not None
            self._pulses.forget(before)
            self._call(lambda now: self._coordinator.ended(before, KILLED, "killed", now))
        with self._changed:
            if not self._changed.wait_for(lambda: self._numbers.get(slot, before) != before, SLOT_SECONDS):
                raise TimeoutError(f"there was no place for a new worker in {slot} within {SLOT_SECONDS:g} s")
            number = self._given[slot] = self._numbers[slot]
        meeting, context = self._meeting, worker.distributed_context
        assert meeting is not None and self._pulses is not None
        self._pulses.add(number, place)
        variables = meeting.variables(number, place.node, context.local_rank, context.local_world_size)
        variables.update(nics_to_env_var(detect_nics(config)))
        return variables, meeting.addresses, meeting.secret.key

    def _act(self, act: Act) -> None:
        if isinstance(act, Start):
            with self._changed:
                self._numbers[act.host] = act.worker
                self._changed.notify_all()
            if act.host in self._given and self._pulses is not None:
                self._pulses.kill(self._given[act.host])  # silent for long: Ray starts another one when it is dead
        elif isinstance(act, Say):
            log.warning("%s", act.text)
        elif isinstance(act, Over) and act.failed and self._meeting is not None:
            waiting = [w for w in self._coordinator.workers.values() if w.member is not None and w.life is Life.READY]
            self._meeting.deliver([(worker.member, Sorry(act.text)) for worker in waiting])

    def _quiet(self, worker: int, seconds: float, state: str) -> None:
        self._call(lambda now: self._coordinator.quiet(worker, seconds, state, now))

    def _close(self) -> None:
        pulses, self._pulses = self._pulses, None
        if pulses is not None:
            pulses.close()
        meeting, self._meeting = self._meeting, None
        self._numbers.clear()
        self._given.clear()
        if meeting is not None:
            meeting.close()


class ElasticRank(Rank):
    """Around the train function: reports wait until all workers are there again, as `ray.train.report` needs them."""

    def __enter__(self) -> None:
        if allowed():
            ray_names.wrap_reports(_Reports)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)


class _Reports:
    """Ray's own, but for `report`: while a worker is missing it does nothing, since it would wait for that one."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def report(self, *args: Any, **kwargs: Any) -> None:
        """All workers call it equally often, and all see the same size."""
        if runtime.is_initialized() and runtime.size() < self._theirs.get_context().get_world_size():
            log.info("a report is left out: a worker is being replaced")
            return
        self._theirs.report(*args, **kwargs)
