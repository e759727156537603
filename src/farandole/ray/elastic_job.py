# An elastic job of Ray actors: the elastic driver and host discovery decide which actors run.
# Touches Ray, the hub and the thread of discovery; decides through rendezvous/elastic/driver.py.
"""`ActorJob` does for actors what launch/elastic.py does for processes. A worker is one actor, from start to end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from farandole.base.ending import blames
from farandole.base.errors import RankFailed
from farandole.base.version import package_version
from farandole.launch import environment
from farandole.launch.discovery import Discovery, DiscoveryError, DiscoveryThread
from farandole.launch.hosts import Host
from farandole.launch.slots import RankNumbers
from farandole.ray.heartbeat import HeartbeatMonitor
from farandole.ray.rendezvous import listen_at
from farandole.ray.strategy import bundle, shortage
from farandole.ray.utils import detect_nics, nics_to_env_var
from farandole.ray.worker import ActorRemoved, BaseHorovodWorker
from farandole.rendezvous.elastic.driver import ElasticDriver
from farandole.rendezvous.elastic.hub import ElasticHub
from farandole.rendezvous.elastic.members import Over, Start, Status
from farandole.rendezvous.elastic.policy import Limits
from farandole.rendezvous.phases import Sends
from farandole.rendezvous.secret import Secret

TURN_SECONDS = 0.05  # between two checks for ended workers
KILLED = 128 + 9  # the exit code for an actor that died; the driver may start a new one


@dataclass(frozen=True)
class ActorSpec:
    """How an actor is made."""

    cpus: float
    gpus: float
    executable: tuple[Any, ...]
    variables: Mapping[str, Any]
    function: Callable[[Any], Any]
    queue: Any


@dataclass
class ActorGroup:
    """The present actors, their results, and their errors."""

    actors: dict[int, Any] = field(default_factory=dict)
    ends: dict[Any, int] = field(default_factory=dict)  # the reference to a worker's result -> its number
    results: dict[int, tuple[int, Any]] = field(default_factory=dict)  # worker -> its rank and its result
    failures: list[Exception] = field(default_factory=list)


class ActorJob:
    """Runs one function in an elastic job; `run()` returns the results by rank."""

    def __init__(
        self, limits: Limits, discovery: Discovery, settings: Any, actor_spec: ActorSpec, say: Callable[[str], None]
    ) -> None:
        self._limits = limits
        self._discovery = discovery
        self._discovery_thread = DiscoveryThread(discovery, self._hosts_discovered, self._not_found)
        self._settings = settings
        self._actor_spec = actor_spec
        self._say = say
        self.driver = ElasticDriver(limits, package_version())
        self._elastic = ElasticHub(self.driver, Secret.create(), listen_at(getattr(settings, "nics", None)), self)
        self._actors = ActorGroup()
        self._over: Over | None = None
        self._closing = threading.Event()
        self._locations: dict[Any, int] = {}  # the reference to a worker's location -> its number
        self._heartbeats: HeartbeatMonitor | None = None

    def run(self, turn: Callable[[], None]) -> list[Any]:
        """Runs until the function has ended on all workers. Calls `turn` repeatedly meanwhile."""
        try:
            self._start()
            while self._over is None and not self._elastic.broken and not self._closing.is_set():
                self._watch()
                turn()
            return self._results()
        finally:
            self.close()

    def _start(self) -> None:
        try:
            found = self._discovery.find()
        except DiscoveryError as error:
            raise RuntimeError(str(error)) from None
        self._elastic.start()
        self._hosts_discovered(found)
        self._discovery_thread.start()
        self._heartbeats = HeartbeatMonitor(self.driver.state.times, self._actor_silent)

    def _results(self) -> list[Any]:
        actors = self._actors
        if self._elastic.broken:
            raise RuntimeError(f"the executor itself has failed; please report this:\n{self._elastic.broken}")
        if self._over is not None and not self._over.failed and actors.results:
            return [value for _, value in sorted(actors.results.values(), key=lambda one: one[0])]
        root_causes = sorted(actors.failures, key=lambda error: blames(getattr(error, "cause", None)) is not None)
        if root_causes and not isinstance(root_causes[0], RayActorError):
            raise root_causes[0]
        text = self._over.text if self._over is not None else "the executor was shut down"
        if self._over is not None and not self.driver.state.runs:
            text += f"; {shortage([bundle(self._actor_spec.cpus, self._actor_spec.gpus)] * self._limits.min_np)}"
        last = f": {' '.join(str(root_causes[0]).split())[:300]}" if root_causes else ""
        raise RankFailed(f"{text or 'the workers ended before they answered'}{last}")

    def close(self) -> None:
        """Ends everything. Safe from any thread; a second call does nothing."""
        self._closing.set()
        self._discovery_thread.close()
        if self._heartbeats is not None:
            self._heartbeats.close()
        self._elastic.close()
        for actor in self._actors.actors.values():
            with contextlib.suppress(Exception):  # Ray itself may have ended
                ray.kill(actor)
        self._actors.actors.clear()

    # On other threads.

    def _hosts_discovered(self, found: list[Host]) -> None:
        self._elastic.call(lambda now: self._found(found))

    def _not_found(self, text: str) -> None:
        self._say(f"{text}; the job continues on the present nodes")

    def _watch(self) -> None:
        """Checks for workers that have returned or died, on the thread that called `run`."""
        for ref in ray.wait(list(self._locations), num_returns=1, timeout=0)[0] if self._locations else []:
            with contextlib.suppress(Exception):  # it died before it could report its location
                worker, where = self._locations.pop(ref), ray.get(ref)
                assert self._heartbeats is not None
                self._heartbeats.add(worker, where)
        pending = list(self._actors.ends)
        if not pending:
            self._closing.wait(TURN_SECONDS)
            return
        for ref in ray.wait(pending, num_returns=1, timeout=TURN_SECONDS)[0]:
            worker = self._actors.ends.pop(ref)
            try:
                code, answer = 0, ray.get(ref)
            except RayTaskError as error:
                code, answer = 1, error
            except Exception as error:
                code, answer = KILLED, error
            self._elastic.call(lambda now, w=worker, c=code, a=answer: self._ended(w, c, a, now))  # type: ignore[misc]

    def _actor_silent(self, worker: int, seconds: float, state: str) -> None:
        self._elastic.call(lambda now: self.driver.silence_reported(worker, seconds, state, now))

    # On the loop's thread.

    def _found(self, found: list[Host]) -> Sends:
        def in_use(name: str) -> bool:
            workers = self.driver.state.workers.values()
            return any(one.host == name and one.number in self._actors.actors for one in workers)

        self._elastic.hosts_found([(one.name, one.slots) for one in found], in_use, "Ray")
        return []

    def _ended(self, number: int, code: int, answer: Any, now: float) -> Sends:
        worker = self.driver.state.workers.get(number)
        rank = worker.rank if worker is not None else -1
        if code == 0 and isinstance(answer, ActorRemoved):
            if worker is not None:
                worker.dismissed = True
        elif code == 0:
            self._actors.results[number] = (rank, answer)
        elif worker is not None and not worker.dismissed:
            self._actors.failures.append(answer)
            first = " ".join(str(answer).split())[:200] if code == KILLED else f"raised {type(answer).__name__}"
            self._say(f"{self.driver.state.name(worker)} has ended: {first}")
        if self._heartbeats is not None:
            self._heartbeats.forget(number)
        # An actor that has returned stays until the job ends, so that its output is not lost.
        if code or isinstance(answer, ActorRemoved):
            actor = self._actors.actors.pop(number, None)
            if actor is not None:
                with contextlib.suppress(Exception):
                    ray.kill(actor)
        text = "killed" if code == KILLED else "has ended"
        return self.driver.ended(number, code, text, now)

    # The decisions of the driver.

    def kill_worker(self, worker: int) -> None:
        """Kills an actor, if it still runs."""
        actor = self._actors.actors.get(worker)
        if actor is not None:
            ray.kill(actor)

    def say(self, text: str) -> None:
        """Tells the user."""
        self._say(text)

    def job_over(self, over: Over) -> None:
        """Lets `run` return."""
        self._over = over

    def start_worker(self, start: Start) -> None:
        """Starts an actor on the node of the slot."""
        spec = self._actor_spec
        self._make_room(start)
        variables = environment.of_worker(start.worker, RankNumbers(*start.numbers, start.host), None, start.newcomer)
        variables.update(nics_to_env_var(detect_nics(self._settings)))
        resources = {"num_cpus": spec.cpus, "num_gpus": spec.gpus}
        actor: Any = ray.remote(BaseHorovodWorker).options(**_where(start.host), **resources).remote()
        actor.update_env_vars.remote(spec.variables)
        actor.set_queue.remote(spec.queue)
        rendezvous = (variables, self._elastic.addresses, self._elastic.secret.key)
        self._actors.actors[start.worker] = actor
        self._locations[actor.where.remote()] = start.worker
        self._actors.ends[actor.train.remote(spec.function, spec.executable, rendezvous)] = start.worker

    def _make_room(self, start: Start) -> None:
        """Kills an evicted actor in the same slot: it still holds the CPU that the new actor needs."""
        for number in self._actors.actors:
            worker = self.driver.state.workers.get(number)
            if worker is not None and (worker.host, worker.index, worker.status) == (
                start.host,
                start.index,
                Status.OUT,
            ):
                worker.dismissed = True
                assert self._heartbeats is not None
                self._heartbeats.kill(number)


def _where(name: str) -> dict[str, Any]:
    """The options that place an actor on the node with this id or address."""
    if any(node["NodeID"] == name for node in ray.nodes()):
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=name, soft=False)}
    return {"resources": {f"node:{name}": 0.001}}
