# Ray Train with survivors that continue: the backend for `HorovodConfig(min_workers=...)`.
# Touches Ray Train's replica groups, one for each worker, and the elastic driver in Train's controller.
"""Ray replaces a lost worker (`has_replica_groups`); the others continue and include the new one later."""

from __future__ import annotations

import contextlib
import logging
import threading
from types import TracebackType
from typing import Any

import ray
from ray.train.backend import Backend

from farandole.autoload import patching_allowed
from farandole.base.version import package_version
from farandole.bindings.private import ray_names
from farandole.launch import environment
from farandole.launch.slots import RankNumbers
from farandole.ray.heartbeat import HeartbeatMonitor
from farandole.ray.rendezvous import listen_at
from farandole.ray.train_rank import LEAVE_SECONDS, Rank
from farandole.ray.utils import detect_nics, nics_to_env_var
from farandole.ray.worker import ActorLocation, location, take_place
from farandole.rendezvous.elastic.driver import ElasticDriver
from farandole.rendezvous.elastic.hub import ElasticHub
from farandole.rendezvous.elastic.members import Over, Start, Status
from farandole.rendezvous.elastic.policy import Limits
from farandole.rendezvous.messages import Rejected
from farandole.rendezvous.phases import Sends
from farandole.rendezvous.secret import Secret
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
        self._elastic: ElasticHub | None = None
        self._changed: Any = None  # notified when `_starts` changes
        self._starts: dict[str, Start] = {}  # slot -> the worker that must start there
        self._given: dict[str, int] = {}  # slot -> the number of its worker
        self._heartbeats: HeartbeatMonitor | None = None

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Ray calls it when it has started all workers, or one that replaces a lost worker."""
        workers = worker_group.get_workers()
        size = int(workers[0].distributed_context.world_size)
        if len(workers) == size or self._elastic is None:
            self._begin(size, backend_config)
        found = worker_group.execute(location)
        ready = []
        for index, (worker, host) in enumerate(zip(workers, found, strict=True)):
            arguments = self._place(f"rank-{worker.distributed_context.world_rank}", worker, host, backend_config)
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
        driver = ElasticDriver(limits, package_version())
        self._elastic = ElasticHub(driver, Secret.create(), listen_at(config.nics), self)
        self._elastic.start()
        self._heartbeats = HeartbeatMonitor(driver.state.times, self._actor_silent)
        slots = [(f"rank-{rank}", 1) for rank in range(size)]
        self._elastic.call(lambda now: driver.hosts_found(slots, now))

    def _place(self, slot: str, worker: Any, host: ActorLocation, config: Any) -> tuple[Any, ...]:
        elastic, heartbeats = self._elastic, self._heartbeats
        assert elastic is not None and heartbeats is not None
        driver = elastic.driver
        before = self._given.get(slot)
        if before is not None:
            heartbeats.forget(before)
            elastic.call(lambda now: driver.ended(before, KILLED, "killed", now))
        with self._changed:
            if not self._changed.wait_for(lambda: slot in self._starts, SLOT_SECONDS):
                raise TimeoutError(f"there were no free resources for a new worker in {slot} within {SLOT_SECONDS:g} s")
            start = self._starts.pop(slot)
        number = self._given[slot] = start.worker
        heartbeats.add(number, host)
        context = worker.distributed_context
        local, count = int(context.local_rank), int(context.local_world_size)

        def set_local_rank(now: float) -> Sends:  # the driver treats each slot as a host
            if number in driver.state.workers:
                driver.state.workers[number].local = local
            return []

        elastic.call(set_local_rank)
        numbers = (*start.numbers[:2], local, max(count, local + 1), 0, 1)
        variables = environment.of_worker(number, RankNumbers(*numbers, host.node), None, start.newcomer)
        variables.update(nics_to_env_var(detect_nics(config)))
        return variables, elastic.addresses, elastic.secret.key

    # The decisions of the driver.

    def start_worker(self, start: Start) -> None:
        """Ray starts the process; `_place` waits until it may have the slot."""
        with self._changed:
            self._starts[start.host] = start
            self._changed.notify_all()
        if start.host in self._given and self._heartbeats is not None:
            self._heartbeats.kill(self._given[start.host])  # it was evicted, and Ray replaces it when it is dead

    def kill_worker(self, worker: int) -> None:
        """Nothing: Ray ends its workers."""

    def say(self, text: str) -> None:
        """Tells the user."""
        log.warning("%s", text)

    def job_over(self, over: Over) -> None:
        """Tells the workers that wait for a generation why there will be none."""
        elastic = self._elastic
        if over.failed and elastic is not None:
            workers = elastic.driver.state.workers.values()
            waiting = [one.member for one in workers if one.member is not None and one.status is Status.READY]
            elastic.deliver([(member, Rejected(over.text)) for member in waiting])

    def _actor_silent(self, worker: int, seconds: float, state: str) -> None:
        elastic = self._elastic
        if elastic is not None:
            elastic.call(lambda now: elastic.driver.silence_reported(worker, seconds, state, now))

    def _close(self) -> None:
        heartbeats, self._heartbeats = self._heartbeats, None
        if heartbeats is not None:
            heartbeats.close()
        elastic, self._elastic = self._elastic, None
        self._starts.clear()
        self._given.clear()
        if elastic is not None:
            elastic.close()


class ElasticRank(Rank):
    """Wraps the train function: while a worker is missing, reports are skipped (see _Reports)."""

    def __enter__(self) -> None:
        if patching_allowed():
            ray_names.wrap_reports(_Reports)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)


class _Reports:
    """Ray's object, but `report` does nothing while a worker is missing, because Ray would wait for that worker."""

    def __init__(self, original: Any) -> None:
        self._theirs = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def report(self, *args: Any, **kwargs: Any) -> None:
        """Reports, unless a worker is missing. All workers make the same choice, because all have the same size."""
        if basics.is_initialized() and basics.size() < self._theirs.get_context().get_world_size():
            log.info("a report is skipped: a worker is being replaced")
            return
        self._theirs.report(*args, **kwargs)
