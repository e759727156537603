# The registry of the Spark tasks of a job, by executor; agents connect here too.
# Touches listeners and channels of rendezvous/, and a thread.
"""`TaskRegistry(secret, addresses)`: `slots()` are the present tasks; `take(name)` is the connection to an agent."""

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
from farandole.rendezvous.flow import Flow, Loop
from farandole.rendezvous.handshake import NOBODY, Greeting, Proven, Role, VersionMismatch, answer
from farandole.rendezvous.listener import MAX_UNAUTHENTICATED, Listener
from farandole.rendezvous.secret import Secret
from farandole.spark import task_messages
from farandole.spark.task import TASK_NUMBER

log = logging.getLogger("farandole.spark")


class Agent:
    """An agent below a task, with the methods of a process that an AgentConnection needs."""

    stderr = None

    def __init__(self, number: int, task: RegisteredTask) -> None:
        self.number = number
        self.task = task
        self.sock: Any = None
        self.returncode: int | None = None
        self._ended = threading.Event()

    def mark_ended(self, code: int) -> None:
        """Marks it as ended, or as unknown."""
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        """Its exit code if it has ended, else None."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end. Raises TimeoutError after `timeout` seconds."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"agent {self.number} has not ended")
        return self.returncode or 0

    def kill(self) -> None:
        """Dismisses its task, which ends the agent."""
        self.task.dismiss()
        self.mark_ended(1)


class RegisteredTask:
    """A task that has registered."""

    def __init__(self, here: task_messages.TaskReady, channel: Channel, dismiss: Callable[[], None]) -> None:
        self.here = here
        self.channel = channel
        self.dismiss = dismiss


@dataclass
class ExecutorSlots:
    """An executor: its tasks, and the agent that is ready for use."""

    name: str
    tasks: list[RegisteredTask] = field(default_factory=list)
    agent: Agent | None = None  # requested, or ready and not in use yet

    @property
    def ready(self) -> bool:
        """Whether ranks can be started there now."""
        return self.agent is not None and self.agent.sock is not None


class TaskRegistry:
    """Listens from construction on until close()."""

    def __init__(self, secret: Secret, addresses: Sequence[str], most: int) -> None:
        self._secret = secret
        self._loop = Loop()
        self._numbers = itertools.count(TASK_NUMBER + 1)
        self._agents: dict[int, Agent] = {}
        self._executors: dict[str, ExecutorSlots] = {}
        self._used: set[str] = set()  # executors whose agent was used
        self._changed = threading.Condition()
        self._closing = False
        self._failed = ""  # an agent that ended before it was used
        self._listeners: list[Listener[Proven]] = []
        self._channels: set[Channel] = set()
        try:
            for address in addresses:
                self._listeners.append(self._listen(address, most))
        except BaseException:
            self._close_all()
            raise
        self.addresses = tuple(listener.address for listener in self._listeners)
        self._thread = threading.Thread(target=self._run, name="farandole-spark-tasks", daemon=True)
        self._thread.start()

    # Safe from any thread.

    def slots(self) -> dict[str, list[task_messages.TaskReady]]:
        """The tasks by executor, for executors that have or had an agent."""
        with self._changed:
            return {
                name: [task.here for task in executor_slots.tasks]
                for name, executor_slots in self._executors.items()
                if executor_slots.ready or name in self._used
            }

    def count(self) -> int:
        """How many tasks there are."""
        with self._changed:
            return sum(len(executor_slots.tasks) for executor_slots in self._executors.values())

    def await_slots(self, least: int, deadline: float, failure: Callable[[], Exception | None]) -> bool:
        """Waits for this many slots with agents. Raises what `failure` returns meanwhile; False after the deadline."""
        with self._changed:
            while True:
                ready = all(
                    executor_slots.ready or executor_slots.name in self._used
                    for executor_slots in self._executors.values()
                )
                if ready and sum(len(executor_slots.tasks) for executor_slots in self._executors.values()) >= least:
                    return True
                if (error := failure()) is not None:
                    raise error
                if self._failed:
                    raise RuntimeError(f"{self._failed}; the executor's own log says why")
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 0.2))

    def take(self, name: str) -> tuple[Any, Agent]:
        """The connection to an executor's agent. Raises OSError if there is none yet; then one is requested."""
        with self._changed:
            executor_slots = self._executors.get(name)
            agent = executor_slots.agent if executor_slots is not None else None
            if executor_slots is not None and agent is not None and agent.sock is not None:
                executor_slots.agent = None
                self._used.add(name)
                return agent.sock, agent
        self._loop.call(lambda: self._request_agent(name))
        raise OSError(errno.EAGAIN, "its Spark task has not started an agent yet")

    def explain(self, host: str, code: int | None, output: str) -> str:
        """Why there is no agent on an executor."""
        return f"the agent on {host} ended while it was starting; the executor's own log says why"

    def close(self) -> None:
        """Dismisses all tasks."""
        if not self._closing:
            self._closing = True
            self._loop.call(lambda: None)
            self._thread.join()
            self._close_all()
            self._loop.close()

    # On the loop's thread.

    def _run(self) -> None:
        for listener in self._listeners:
            listener.open()
        while not self._closing:
            self._loop.turn()

    def _close_all(self) -> None:
        for listener in self._listeners:
            listener.close()
        for channel in self._channels:
            channel.close()
        for agent in self._agents.values():
            if agent.sock is not None and not self._in_use(agent):
                agent.sock.close()
            agent.mark_ended(1)

    def _in_use(self, agent: Agent) -> bool:
        return all(executor_slots.agent is not agent for executor_slots in self._executors.values())

    def _listen(self, address: str, most: int) -> Listener[Proven]:
        return Listener(self._loop, address, MAX_UNAUTHENTICATED + most, self)

    # What the listeners call.

    def authenticate(self, sock: Any) -> Flow[Proven]:
        """Authenticates a task or an agent."""
        me = Greeting(Role.LAUNCHER, NOBODY, 0)
        return answer(sock, self._secret, me, lambda peer: peer.role is Role.AGENT)

    def other_version(self, error: VersionMismatch) -> None:
        """Reports a task with another version."""
        log.error("a task of this job was refused: %s", error)

    def on_no_descriptors(self, error: OSError) -> None:
        """Reports that no task can connect."""
        log.error("connections of tasks cannot be accepted: %s", sockets.explain(error))

    def authenticated(self, sock: Any, proven: Proven) -> None:
        """Takes over the connection of a task or an agent."""
        number = proven.peer.rank
        if number != TASK_NUMBER:
            self._agent_connected(sock, number)
            return
        task: RegisteredTask | None = None

        def on_message(message: Any) -> None:
            nonlocal task
            if isinstance(message, task_messages.TaskReady) and task is None:
                task = RegisteredTask(message, channel, lambda: self._loop.call(lambda: ended("dismissed")))
                self._add_task(task)
            elif isinstance(message, task_messages.AgentEnded):
                self._agent_ended(message.number, message.code)

        def ended(_reason: str) -> None:
            channel.close()
            self._channels.discard(channel)
            if task is not None:
                self._remove_task(task)

        channel = Channel(self._loop, sock, proven, on_message, ended, codec=task_messages)
        self._channels.add(channel)

    def _add_task(self, task: RegisteredTask) -> None:
        name = task.here.executor
        with self._changed:
            self._executors.setdefault(name, ExecutorSlots(name)).tasks.append(task)
            self._changed.notify_all()
        if name not in self._used:
            self._request_agent(name)

    def _request_agent(self, name: str) -> None:
        """Asks a task of this executor for an agent."""
        with self._changed:
            executor_slots = self._executors.get(name)
            if executor_slots is None or executor_slots.agent is not None:
                return
            task = executor_slots.tasks[0]
            agent = executor_slots.agent = Agent(next(self._numbers), task)
            self._agents[agent.number] = agent
        task.channel.send(task_messages.StartAgent(agent.number))

    def _agent_connected(self, sock: Any, number: int) -> None:
        agent = self._agents.get(number)
        if agent is None or agent.sock is not None:
            sock.close()
            return
        with self._changed:
            agent.sock = sock
            self._changed.notify_all()

    def _agent_ended(self, number: int, code: int, removed: bool = False) -> None:
        """`removed`: it ended with its task, which Spark has removed and may start again."""
        agent = self._agents.pop(number, None)
        if agent is None:
            return
        with self._changed:
            for executor_slots in self._executors.values():
                if executor_slots.agent is agent:  # it was not used, and cannot be used any more
                    executor_slots.agent = None
                    if not removed:
                        self._failed = (
                            f"the agent on {executor_slots.name} ended with exit code {code} while it was starting"
                        )
                    if agent.sock is not None:
                        agent.sock.close()
            agent.mark_ended(code)
            self._changed.notify_all()

    def _remove_task(self, task: RegisteredTask) -> None:
        for agent in [one for one in self._agents.values() if one.task is task]:
            self._agent_ended(agent.number, 1, removed=True)
        with self._changed:
            executor_slots = self._executors[task.here.executor]
            if task in executor_slots.tasks:
                executor_slots.tasks.remove(task)
            if not executor_slots.tasks:
                del self._executors[executor_slots.name]
                self._used.discard(executor_slots.name)
            self._changed.notify_all()
