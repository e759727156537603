# Ray Train with survivors that continue: the backend for `HorovodConfig(min_workers=...)`.
# Touches Ray Train's replica groups, one for each worker, and the elastic driver in Train's controller.
"""Ray replaces a lost worker (`has_replica_groups`); the others continue and include the new one later."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from types import TracebackType
from typing import Any

import ray
from ray.train.backend import Backend

from farandole.autoload import allowed
from farandole.bindings.private import ray_names
from farandole.ray.elastic_hub import ElasticHub
from farandole.ray.heartbeat import HeartbeatMonitor
from farandole.ray.train_rank import LEAVE_SECONDS, Rank
from farandole.ray.utils import detect_nics, nics_to_env_var
from farandole.ray.worker import ActorLocation, location, take_place
from farandole.rendezvous.elastic.members import Act, Life, Over, Say, Start
from farandole.rendezvous.elastic.policy import Limits
from farandole.rendezvous.messages import Rejected
from farandole.world import basics

KILLED = 128 + 9
SLOT_SECONDS = 60.0  # a worker that Ray has started waits this long for a slot from the elastic driver

log = logging.getLogger("farandole.ray")


class ElasticBackend(Backend):
    """Runs in Train's controller. A slot is one of Train's ranks. The process in a slot may be replaced."""

    share_cuda_visible_devices = True
    has_replica_groups = True

    def __init__(self) -> None:
        # The object is made in Ray's driver and pickled to the controller, so it makes threads and locks later.
        self._elastic_hub: ElasticHub | None = None
        self._changed: Any = None
        self._starts: dict[str, Start] = {}  # slot -> the worker that must start there
        self._given: dict[str, int] = {}  # slot -> the number of its worker
        self._heartbeats: HeartbeatMonitor | None = None

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Ray calls it when it has started all workers, or one that replaces a lost worker."""
        workers = worker_group.get_workers()
        size = int(workers[0].distributed_context.world_size)
        if len(workers) == size or self._elastic_hub is None:
            self._begin(size, backend_config)
        found = worker_group.execute(location)
        ready = []
        for index, (worker, place) in enumerate(zip(workers, found, strict=True)):
            arguments = self._place(f"rank-{worker.distributed_context.world_rank}", worker, place, backend_config)
            ready.append(worker_group.execute_single_async(index, take_place, *arguments))
        ray.get(ready)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Ray calls it to end all workers, or one that will be replaced."""
        workers = worker_group.get_workers()
        if len(workers) == int(workers[0].distributed_context.world_size):
            with contextlib.suppress(Exception):
                ray.get(worker_group.execute_async(basics.shutdown), timeout=LEAVE_SECONDS)
            self._close()

    def _begin(self, size: int, config: Any) -> None:
        self._close()
        self._changed = threading.Condition()
        least = min(config.min_workers, size)
        limits = Limits(size, least, size, elastic_timeout=config.elastic_timeout)
        self._elastic_hub = ElasticHub(limits, config.nics, self._act)
        self._elastic_hub.start()
        self._heartbeats = HeartbeatMonitor(self._coordinator.times, self._quiet)
        slots = [(f"rank-{rank}", 1) for rank in range(size)]
        self._call(lambda now: self._coordinator.hosts_found(slots, now))

    @property
    def _coordinator(self) -> Any:
        assert self._elastic_hub is not None
        return self._elastic_hub.driver

    def _call(self, decide: Any) -> None:
        elastic_hub = self._elastic_hub
        assert elastic_hub is not None
        elastic_hub.call(lambda: elastic_hub.deliver(decide(time.monotonic())))

    def _place(self, slot: str, worker: Any, place: ActorLocation, config: Any) -> tuple[Any, ...]:
        before = self._given.get(slot)
        if before is not None:
            assert self._heartbeats is not None
            self._heartbeats.forget(before)
            self._call(lambda now: self._coordinator.ended(before, KILLED, "killed", now))
        with self._changed:
            if not self._changed.wait_for(lambda: slot in self._starts, SLOT_SECONDS):
                raise TimeoutError(f"there was no place for a new worker in {slot} within {SLOT_SECONDS:g} s")
            start = self._starts.pop(slot)
        number = self._given[slot] = start.worker
        elastic_hub, context = self._elastic_hub, worker.distributed_context
        assert elastic_hub is not None and self._heartbeats is not None
        self._heartbeats.add(number, place)
        local, count = int(context.local_rank), int(context.local_world_size)

        def number_on_node() -> None:  # the driver treats each slot as a host
            if number in elastic_hub.driver.workers:
                elastic_hub.driver.workers[number].local = local

        elastic_hub.call(number_on_node)
        start = dataclasses.replace(start, place=(*start.place[:2], local, max(count, local + 1), 0, 1))
        variables = elastic_hub.variables(start, place.node)
        variables.update(nics_to_env_var(detect_nics(config)))
        return variables, elastic_hub.addresses, elastic_hub.secret.key

    def _act(self, act: Act) -> None:
        if isinstance(act, Start):
            with self._changed:
                self._starts[act.host] = act
                self._changed.notify_all()
            if act.host in self._given and self._heartbeats is not None:
                self._heartbeats.kill(self._given[act.host])  # it was evicted, and Ray replaces it when it is dead
        elif isinstance(act, Say):
            log.warning("%s", act.text)
        elif isinstance(act, Over) and act.failed and self._elastic_hub is not None:
            waiting = [w for w in self._coordinator.workers.values() if w.member is not None and w.life is Life.READY]
            self._elastic_hub.deliver([(worker.member, Rejected(act.text)) for worker in waiting])

    def _quiet(self, worker: int, seconds: float, state: str) -> None:
        self._call(lambda now: self._coordinator.quiet(worker, seconds, state, now))

    def _close(self) -> None:
        pulses, self._heartbeats = self._heartbeats, None
        if pulses is not None:
            pulses.close()
        elastic_hub, self._elastic_hub = self._elastic_hub, None
        self._starts.clear()
        self._given.clear()
        if elastic_hub is not None:
            elastic_hub.close()


class ElasticRank(Rank):
    """Wraps the train function: while a worker is missing, reports are skipped (see _Reports)."""

    def __enter__(self) -> None:
        if allowed():
            ray_names.wrap_reports(_Reports)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)


class _Reports:
    """Ray's object, but `report` does nothing while a worker is missing, because Ray would wait for that worker."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def report(self, *args: Any, **kwargs: Any) -> None:
        """Reports, unless a worker is missing. All workers make the same choice, because all have the same size."""
        if basics.is_initialized() and basics.size() < self._theirs.get_context().get_world_size():
            log.info("a report is left out: a worker is being replaced")
            return
        self._theirs.report(*args, **kwargs)
