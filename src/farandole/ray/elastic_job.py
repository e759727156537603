# An elastic job of Ray actors: they come and go as the coordinator decides and discovery finds.
# Touches Ray, the meeting point and the thread of discovery; decides through elastic/coordinator.py.
"""`ActorJob` is to actors what `ElasticJob` is to processes: a worker is one actor, from its start to its end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from farandole.elastic.members import Act, Kill, Life, Over, Say, Start
from farandole.elastic.policy import Limits
from farandole.errors import RankFailed
from farandole.launch.discovery import Discovery, DiscoveryError
from farandole.launch.hosts import Host
from farandole.observe.ending import blames
from farandole.ray.meeting import Meeting
from farandole.ray.pulse import Pulses
from farandole.ray.strategy import bundle, shortage
from farandole.ray.utils import detect_nics, nics_to_env_var
from farandole.ray.worker import BaseHorovodWorker, Gone
from farandole.rendezvous.rounds import Sends

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
        self._meeting = Meeting(limits, getattr(settings, "nics", None), self._act)
        self.coordinator = self._meeting.coordinator
        self._crew = Crew()
        self._over: Over | None = None
        self._closing = threading.Event()
        self._looking: threading.Thread | None = None
        self._places: dict[Any, int] = {}  # the reference to a worker's whereabouts -> its number
        self._pulses: Pulses | None = None

    def run(self, turn: Callable[[], None]) -> list[Any]:
        """Until the function has ended everywhere; `turn` is called again and again meanwhile."""
        try:
            self._start()
            while self._over is None and not self._meeting.broken and not self._closing.is_set():
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
        self._meeting.start()
        self._meeting.call(lambda: self._found(found))
        self._looking = threading.Thread(target=self._look, name="farandole-ray-discovery", daemon=True)
        self._looking.start()
        self._pulses = Pulses(self.coordinator.times, self._quiet)

    def _results(self) -> list[Any]:
        crew = self._crew
        if self._meeting.broken:
            raise RuntimeError(f"the executor itself has failed; please report this:\n{self._meeting.broken}")
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
        if self._looking is not None:
            self._looking.join()
        if self._pulses is not None:
            self._pulses.close()
        self._meeting.close()
        for actor in self._crew.actors.values():
            with contextlib.suppress(Exception):  # Ray itself may be gone
                ray.kill(actor)
        self._crew.actors.clear()

    # Threads.

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
            self._meeting.call(lambda found=found: self._found(found))  # type: ignore[misc]

    def _watch(self) -> None:
        """Looks for workers that have answered or died; on the thread that called `run`."""
        for ref in ray.wait(list(self._places), num_returns=1, timeout=0)[0] if self._places else []:
            with contextlib.suppress(Exception):  # it died before it could say where it was
                worker, where = self._places.pop(ref), ray.get(ref)
                assert self._pulses is not None
                self._pulses.add(worker, where)
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
            self._meeting.call(lambda w=worker, c=code, a=answer: self._ended(w, c, a))  # type: ignore[misc]

    def _quiet(self, worker: int, seconds: float, state: str) -> None:
        now = time.monotonic()
        self._meeting.call(lambda: self._deliver(self.coordinator.quiet(worker, seconds, state, now)))

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
        if self._pulses is not None:
            self._pulses.forget(number)
        if code or isinstance(answer, Gone):  # one that has returned stays until the job is over, with what it printed
            actor = self._crew.actors.pop(number, None)
            if actor is not None:
                with contextlib.suppress(Exception):
                    ray.kill(actor)
        text = "killed" if code == KILLED else "has ended"
        self._deliver(self.coordinator.ended(number, code, text, time.monotonic()))

    def _deliver(self, sends: Sends) -> None:
        self._meeting.deliver(sends)

    def _act(self, act: Act) -> None:
        if isinstance(act, Start):
            self._launch(act)
        elif isinstance(act, Kill):
            actor = self._crew.actors.get(act.worker)
            if actor is not None:
                ray.kill(actor)
        elif isinstance(act, Say):
            self._say(act.text)
        elif isinstance(act, Over):
            self._over = act

    def _launch(self, start: Start) -> None:
        make, meeting = self._make, self._meeting
        self._make_room(start)
        variables = meeting.variables(start.worker, start.host, start.index, self.coordinator.hosts[start.host].slots)
        variables.update(nics_to_env_var(detect_nics(self._settings)))
        resources = {"num_cpus": make.cpus, "num_gpus": make.gpus}
        actor: Any = ray.remote(BaseHorovodWorker).options(**_where(start.host), **resources).remote()
        actor.update_env_vars.remote(make.variables)
        actor.set_queue.remote(make.queue)
        place = (variables, meeting.addresses, meeting.secret.key)
        self._crew.actors[start.worker] = actor
        self._places[actor.where.remote()] = start.worker
        self._crew.ends[actor.train.remote(make.function, make.executable, place)] = start.worker

    def _make_room(self, start: Start) -> None:
        """One that has been silent for long has lost its slot, and still has the CPU that the new one needs."""
        for number in self._crew.actors:
            worker = self.coordinator.workers.get(number)
            if worker is not None and (worker.host, worker.index, worker.life) == (start.host, start.index, Life.OUT):
                worker.dismissed = True
                assert self._pulses is not None
                self._pulses.kill(number)


def _where(name: str) -> dict[str, Any]:
    """On the node of this id, or of this address."""
    if any(node["NodeID"] == name for node in ray.nodes()):
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=name, soft=False)}
    return {"resources": {f"node:{name}": 0.001}}
