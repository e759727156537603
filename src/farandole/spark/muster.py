# Where the tasks of a job on Spark report, and by which executor they sit; agents call here too.
# Touches doors and channels of rendezvous/, and a thread.
"""`Muster(secret, addresses)`: its `slots()` change as tasks come and go; `take(name)` gives the line to an agent."""

from __future__ import annotations

import errno
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from farandole.rendezvous import sockets
from farandole.rendezvous.channel import Channel
from farandole.rendezvous.door import MOST_STRANGERS, Door
from farandole.rendezvous.flow import Flow, Loop
from farandole.rendezvous.handshake import NOBODY, Greeting, Proven, Role, VersionMismatch, answer
from farandole.rendezvous.secret import Secret
from farandole.spark import words
from farandole.spark.task import SEAT

log = logging.getLogger("farandole.spark")


class Agent:
    """An agent below some task, with what a line wants to know of a process."""

    stderr = None

    def __init__(self, number: int, seat: Seat) -> None:
        self.number = number
        self.seat = seat
        self.sock: Any = None
        self.returncode: int | None = None
        self._ended = threading.Event()

    def over(self, code: int) -> None:
        """It has ended, or nobody can know any more."""
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        """Its exit code, when it has ended."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end. TimeoutError when it is late."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"agent {self.number} has not ended")
        return self.returncode or 0

    def kill(self) -> None:
        """Lets its task go, which ends it."""
        self.seat.dismiss()
        self.over(1)


class Seat:
    """A task that has reported."""

    def __init__(self, here: words.Here, channel: Channel, dismiss: Callable[[], None]) -> None:
        self.here = here
        self.channel = channel
        self.dismiss = dismiss


@dataclass
class Bench:
    """An executor: the tasks that sit there, and the agent that waits to be taken."""

    name: str
    seats: list[Seat] = field(default_factory=list)
    agent: Agent | None = None  # ordered, or there and not taken yet

    @property
    def ready(self) -> bool:
        """Whether ranks can be started there now."""
        return self.agent is not None and self.agent.sock is not None


class Muster:
    """Listens from construction on until close()."""

    def __init__(self, secret: Secret, addresses: Sequence[str], most: int) -> None:
        self._secret = secret
        self._loop = Loop()
        self._numbers = itertools.count(SEAT + 1)
        self._agents: dict[int, Agent] = {}
        self._benches: dict[str, Bench] = {}
        self._used: set[str] = set()  # executors whose agent was taken
        self._changed = threading.Condition()
        self._closing = False
        self._failed = ""  # an agent that ended before anybody took it
        self._doors: list[Door[Proven]] = []
        self._channels: set[Channel] = set()
        try:
            for address in addresses:
                self._doors.append(self._door(address, most))
        except BaseException:
            self._shut()
            raise
        self.addresses = tuple(door.address for door in self._doors)
        self._thread = threading.Thread(target=self._run, name="farandole-spark-tasks", daemon=True)
        self._thread.start()

    # From any thread.

    def slots(self) -> dict[str, list[words.Here]]:
        """By executor, the tasks that sit there, of executors that have an agent or had one."""
        with self._changed:
            return {
                name: [seat.here for seat in bench.seats]
                for name, bench in self._benches.items()
                if bench.ready or name in self._used
            }

    def count(self) -> int:
        """How many tasks there are."""
        with self._changed:
            return sum(len(bench.seats) for bench in self._benches.values())

    def await_slots(self, least: int, deadline: float, trouble: Callable[[], Exception | None]) -> bool:
        """Until so many are there with their agents. What `trouble` gives meanwhile is raised; False: too late."""
        with self._changed:
            while True:
                ready = all(bench.ready or bench.name in self._used for bench in self._benches.values())
                if ready and sum(len(bench.seats) for bench in self._benches.values()) >= least:
                    return True
                if (error := trouble()) is not None:
                    raise error
                if self._failed:
                    raise RuntimeError(f"{self._failed}; the executor's own log says why")
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 0.2))

    def take(self, name: str) -> tuple[Any, Agent]:
        """The line to an executor's agent. OSError when there is none yet; then one is asked for."""
        with self._changed:
            bench = self._benches.get(name)
            agent = bench.agent if bench is not None else None
            if bench is not None and agent is not None and agent.sock is not None:
                bench.agent = None
                self._used.add(name)
                return agent.sock, agent
        self._loop.call(lambda: self._order(name))
        raise OSError(errno.EAGAIN, "its Spark task has not started an agent yet")

    def explain(self, host: str, code: int | None, said: str) -> str:
        """Why there is no agent on an executor."""
        return f"the agent on {host} ended before it began; the executor's own log says why"

    def close(self) -> None:
        """Lets all tasks go."""
        if not self._closing:
            self._closing = True
            self._loop.call(lambda: None)
            self._thread.join()
            self._shut()
            self._loop.close()

    # In the loop.

    def _run(self) -> None:
        for door in self._doors:
            door.open()
        while not self._closing:
            self._loop.turn()

    def _shut(self) -> None:
        for door in self._doors:
            door.close()
        for channel in self._channels:
            channel.close()
        for agent in self._agents.values():
            if agent.sock is not None and not self._was_taken(agent):
                agent.sock.close()
            agent.over(1)

    def _was_taken(self, agent: Agent) -> bool:
        return all(bench.agent is not agent for bench in self._benches.values())

    def _door(self, address: str, most: int) -> Door[Proven]:
        return Door(self._loop, address, MOST_STRANGERS + most, self._talk, self._admit, self._other, self._starved)

    def _talk(self, sock: Any) -> Flow[Proven]:
        me = Greeting(Role.LAUNCHER, NOBODY, 0)
        return answer(sock, self._secret, me, lambda peer: peer.role is Role.AGENT)

    def _other(self, error: VersionMismatch) -> None:
        log.error("a task of this job was refused: %s", error)

    def _starved(self, error: OSError) -> None:
        log.error("tasks cannot be heard: %s", sockets.explain(error))

    def _admit(self, sock: Any, proven: Proven) -> None:
        number = proven.peer.rank
        if number != SEAT:
            self._arrived(sock, number)
            return
        seat: Seat | None = None

        def heard(message: Any) -> None:
            nonlocal seat
            if isinstance(message, words.Here) and seat is None:
                seat = Seat(message, channel, lambda: self._loop.call(lambda: ended("dismissed")))
                self._sit(seat)
            elif isinstance(message, words.Ended):
                self._agent_ended(message.number, message.code)

        def ended(_reason: str) -> None:
            channel.close()
            self._channels.discard(channel)
            if seat is not None:
                self._leave(seat)

        channel = Channel(self._loop, sock, proven, heard, ended, codec=words)
        self._channels.add(channel)

    def _sit(self, seat: Seat) -> None:
        name = seat.here.executor
        with self._changed:
            self._benches.setdefault(name, Bench(name)).seats.append(seat)
            self._changed.notify_all()
        if name not in self._used:
            self._order(name)

    def _order(self, name: str) -> None:
        """Asks a task of this executor for an agent."""
        with self._changed:
            bench = self._benches.get(name)
            if bench is None or bench.agent is not None:
                return
            seat = bench.seats[0]
            agent = bench.agent = Agent(next(self._numbers), seat)
            self._agents[agent.number] = agent
        seat.channel.send(words.Carry(agent.number))

    def _arrived(self, sock: Any, number: int) -> None:
        agent = self._agents.get(number)
        if agent is None or agent.sock is not None:
            sock.close()
            return
        with self._changed:
            agent.sock = sock
            self._changed.notify_all()

    def _agent_ended(self, number: int, code: int, left: bool = False) -> None:
        """`left`: with its task, which Spark has taken away and may bring again."""
        agent = self._agents.pop(number, None)
        if agent is None:
            return
        with self._changed:
            for bench in self._benches.values():
                if bench.agent is agent:  # nobody has taken it, and nobody should
                    bench.agent = None
                    if not left:
                        self._failed = f"the agent on {bench.name} ended with exit code {code} before it began"
                    if agent.sock is not None:
                        agent.sock.close()
            agent.over(code)
            self._changed.notify_all()

    def _leave(self, seat: Seat) -> None:
        for agent in [one for one in self._agents.values() if one.seat is seat]:
            self._agent_ended(agent.number, 1, left=True)
        with self._changed:
            bench = self._benches[seat.here.executor]
            if seat in bench.seats:
                bench.seats.remove(seat)
            if not bench.seats:
                del self._benches[bench.name]
                self._used.discard(bench.name)
            self._changed.notify_all()
