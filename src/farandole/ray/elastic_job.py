# An elastic job of Ray actors: they come and go as the coordinator decides and discovery finds.
# Touches Ray, the hub, the loop's thread and the thread of discovery; decides through elastic/coordinator.py.
"""`ActorJob` is to actors what `ElasticJob` is to processes: a worker is one actor, from its start to its end."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from farandole.elastic.coordinator import Coordinator
from farandole.elastic.members import Drop, Kill, Over, Say, Start
from farandole.elastic.policy import Limits, Times
from farandole.errors import RankFailed
from farandole.launch import environment
from farandole.launch.discovery import Discovery, DiscoveryError
from farandole.launch.hosts import Host
from farandole.launch.slots import Place
from farandole.observe.ending import blames
from farandole.ray.rendezvous import listen_at
from farandole.ray.strategy import bundle, shortage
from farandole.ray.utils import detect_nics, nics_to_env_var
from farandole.ray.worker import BaseHorovodWorker, Gone
from farandole.rendezvous.flow import Loop
from farandole.rendezvous.hub import Hub
from farandole.rendezvous.secret import Secret
from farandole.version import package_version

LOOK_SECONDS = 1.0  # between two looks for nodes
TURN_SECONDS = 0.05  # between two looks at what has ended
KILLED = 128 + 9  # the code of an actor that died: a new one may do better


@dataclass(frozen=True)
class Make:
    """How a worker is made."""

    cpus: float
    gpus: float
    executable: tuple[Any, ...]
    variables: Mapping[str, Any]
    function: Callable[[Any], Any]
    queue: Any


@dataclass
class Crew:
    """The actors of this moment. What they have given, and how they failed."""

    actors: dict[int, Any] = field(default_factory=dict)
    ends: dict[Any, int] = field(default_factory=dict)  # the reference to a worker's answer -> its number
    results: dict[int, tuple[int, Any]] = field(default_factory=dict)  # worker -> its rank and what it returned
    failures: list[Exception] = field(default_factory=list)


class ActorJob:
    """One function in an elastic job; `run()` gives what it returned, by rank."""

    def __init__(
        self, limits: Limits, discovery: Discovery, settings: Any, make: Make, say: Callable[[str], None]
    ) -> None:
        self._limits = limits
        self._discovery = discovery
        self._settings = settings
        self._make = make
        self._say = say
        self._secret = Secret.create()
        self._loop = Loop()
        self.coordinator = Coordinator(limits, package_version(), Times())
        self._hub: Hub | None = None
        self._crew = Crew()
        self._over: Over | None = None
        self._broken = ""  # what our own thread fell over
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def run(self, turn: Callable[[], None]) -> list[Any]:
        """Until the function has ended everywhere; `turn` is called again and again meanwhile."""
        try:
            self._start()
            while self._over is None and not self._broken and not self._closing.is_set():
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
        addresses = listen_at(getattr(self._settings, "nics", None))
        self._hub = Hub(
            self._secret, self._limits.np, addresses, package_version(), self.coordinator, self._loop, self._act
        )
        self._hub.start()
        self._found(found)
        for name, work in (("job", self._run), ("discovery", self._look)):
            thread = threading.Thread(target=work, name=f"farandole-ray-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _results(self) -> list[Any]:
        crew = self._crew
        if self._broken:
            raise RuntimeError(f"the executor itself has failed; please report this:\n{self._broken}")
        if self._over is not None and not self._over.failed and crew.results:
            return [value for _, value in sorted(crew.results.values(), key=lambda one: one[0])]
        guilty = sorted(crew.failures, key=lambda error: blames(getattr(error, "cause", None)) is not None)
        if guilty and not isinstance(guilty[0], RayActorError):
            raise guilty[0]
        text = self._over.text if self._over is not None else "the executor was shut down"
        if self._over is not None and not self.coordinator.runs:
            text += f"; {shortage([bundle(self._make.cpus, self._make.gpus)] * self._limits.min_np)}"
        last = f": {' '.join(str(guilty[0]).split())[:300]}" if guilty else ""
        raise RankFailed(f"{text or 'the workers ended before they answered'}{last}")

    def close(self) -> None:
        """Ends everything. Safe from any thread; calling it again does nothing."""
        self._closing.set()
        self._discovery.close()
        self._loop.call(lambda: None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        for actor in self._crew.actors.values():
            with contextlib.suppress(Exception):  # Ray itself may be gone
                ray.kill(actor)
        self._crew.actors.clear()
        hub, self._hub = self._hub, None
        if hub is not None:
            hub.close()
        self._loop.close()

    # Threads.

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._loop.turn()
        except Exception:
            self._broken = traceback.format_exc()

    def _look(self) -> None:
        said = ""
        while not self._closing.wait(LOOK_SECONDS):
            try:
                found = self._discovery.find()
            except DiscoveryError as error:
                if str(error) != said:
                    said = str(error)
                    self._say(f"{said}; the nodes stay as they are")
                continue
            self._loop.call(lambda found=found: self._found(found))  # type: ignore[misc]

    def _watch(self) -> None:
        """Looks for workers that have answered or died; on the thread that called `run`."""
        pending = list(self._crew.ends)
        if not pending:
            self._closing.wait(TURN_SECONDS)
            return
        for ref in ray.wait(pending, num_returns=1, timeout=TURN_SECONDS)[0]:
            worker = self._crew.ends.pop(ref)
            try:
                code, answer = 0, ray.get(ref)
            except RayTaskError as error:
                code, answer = 1, error
            except Exception as error:
                code, answer = KILLED, error
            self._loop.call(lambda w=worker, c=code, a=answer: self._ended(w, c, a))  # type: ignore[misc]

    # In the loop.

    def _found(self, found: list[Host]) -> None:
        coordinator = self.coordinator
        self._deliver(coordinator.hosts_found([(one.name, one.slots) for one in found], time.monotonic()))
        for name in [name for name, host in coordinator.hosts.items() if not host.listed]:
            if not any(one.host == name and one.number in self._crew.actors for one in coordinator.workers.values()):
                self._deliver(coordinator.host_lost(name, "Ray does not list it any more", time.monotonic()))
                del coordinator.hosts[name]

    def _ended(self, number: int, code: int, answer: Any) -> None:
        worker = self.coordinator.workers.get(number)
        rank = worker.rank if worker is not None else -1
        if code == 0 and isinstance(answer, Gone):
            if worker is not None:
                worker.dismissed = True
        elif code == 0:
            self._crew.results[number] = (rank, answer)
        elif worker is not None and not worker.dismissed:
            self._crew.failures.append(answer)
            first = " ".join(str(answer).split())[:200] if code == KILLED else f"raised {type(answer).__name__}"
            self._say(f"{self.coordinator.name(worker)} has ended: {first}")
        actor = self._crew.actors.pop(number, None)
        # One that has returned may still be needed by others, who wait for what it has sent: it ends with the job.
        if actor is not None and code == 0 and not isinstance(answer, Gone):
            actor.leave.remote()
            self._crew.actors[number] = actor
        elif actor is not None:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        text = "killed" if code == KILLED else "has ended"
        self._deliver(self.coordinator.ended(number, code, text, time.monotonic()))

    def _deliver(self, sends: Any) -> None:
        if self._hub is not None:
            self._hub.deliver(sends)

    def _act(self) -> None:
        for act in self.coordinator.take_acts():
            if isinstance(act, Start):
                self._launch(act)
            elif isinstance(act, Kill):
                actor = self._crew.actors.get(act.worker)
                if actor is not None:
                    ray.kill(actor)
            elif isinstance(act, Drop) and self._hub is not None:
                self._hub.drop(act.member)
            elif isinstance(act, Say):
                self._say(act.text)
            elif isinstance(act, Over):
                self._over = act

    def _launch(self, start: Start) -> None:
        make, np = self._make, self._limits.np
        slots = self.coordinator.hosts[start.host].slots
        place = Place(min(start.worker, np - 1), np, start.index, max(slots, start.index + 1), 0, 1, start.host)
        variables = {
            **environment.of_place(place, ("127.0.0.1", 0)),
            "FARANDOLE_ELASTIC": "1",
            "HOROVOD_ELASTIC": "1",
            "FARANDOLE_WORKER": str(start.worker),
            **nics_to_env_var(detect_nics(self._settings)),
        }
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            del variables[name]  # rank 0 changes: torch.distributed meets where the ranks do
        assert self._hub is not None
        actor = (
            ray.remote(BaseHorovodWorker).options(**_where(start.host), num_cpus=make.cpus, num_gpus=make.gpus).remote()
        )
        actor.update_env_vars.remote(make.variables)
        actor.set_queue.remote(make.queue)
        ready = (variables, self._hub.addresses, self._secret.key)
        self._crew.actors[start.worker] = actor
        self._crew.ends[actor.train.remote(make.function, make.executable, ready)] = start.worker


def _where(name: str) -> dict[str, Any]:
    """On the node of this id, or of this address."""
    if any(node["NodeID"] == name for node in ray.nodes()):
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=name, soft=False)}
    return {"resources": {f"node:{name}": 0.001}}
