# The code in a Spark task: it registers with the leader of the job, and starts an agent when the leader asks.
# Touches the environment of Spark's Python worker, sockets through rendezvous/, processes through launch/spawn.py.
"""`attend(settings)` holds a slot until the leader dismisses it. Ranks are separate processes below an agent:

[executor] -> [Spark's Python worker] -> guard -> agent -> ranks. The guard dies with the Python worker.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farandole.base.config import Config
from farandole.launch import spawn
from farandole.launch.agent_connection import package_place
from farandole.launch.ssh import start_code
from farandole.rendezvous import sockets
from farandole.rendezvous.channel import Channel
from farandole.rendezvous.flow import Flow, Loop
from farandole.rendezvous.handshake import NOBODY, Greeting, Proven, Role, call
from farandole.rendezvous.secret import Secret
from farandole.spark import task_messages

TASK_NUMBER = 0  # the number of every task; agents have other numbers
CHECK_SECONDS = 0.1  # between two checks of an agent
# Variables with which Spark identifies its own workers: ranks do not get them.
PYTHON = "SPARK_RANK_PYTHON"  # the interpreter of this host's ranks
OF_SPARK = ("PYTHON_WORKER_FACTORY_", "PYSPARK_GATEWAY_", "SPARK_AUTH_SOCKET_", "PYTHON_UNIX_DOMAIN_")
END_SECONDS = 20.0  # for an agent to kill everything below it


@dataclass(frozen=True)
class TaskSettings:
    """The settings of a task; they are pickled with the function that Spark runs."""

    key: bytes = field(repr=False)
    addresses: tuple[str, ...]
    seconds: float  # time limit to reach the leader
    env: Mapping[str, str] = field(repr=False)
    executable: str | None = None  # the interpreter of the ranks; None: the one of Spark's Python worker


def get_available_devices() -> list[str]:
    """Called in a rank: its own GPU among those that it sees; empty if Spark assigned none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    local = Config.from_environment().local_rank
    return [str(local)] if visible and local < len(visible.split(",")) else []


class Unreachable(Exception):
    """The leader of the job does not answer."""


class SlotTask:
    """A slot of the job."""

    def __init__(self, settings: TaskSettings, gpus: Sequence[str], cpus: int) -> None:
        self._settings = settings
        self._secret = Secret(settings.key)
        self._loop = Loop()
        self._agents: dict[int, Any] = {}
        self._over = False
        deadline = time.monotonic() + settings.seconds
        self._address, sock, proven = self._dial(settings.addresses, TASK_NUMBER, deadline)
        self._channel = Channel(self._loop, sock, proven, self._on_message, self._ended, codec=task_messages)
        # All Python workers of an executor are children of one process, so its id names the executor.
        host = os.uname().nodename
        python = settings.executable or sys.executable
        self._channel.send(
            task_messages.TaskReady(host, f"{host} (executor {os.getppid()})", python, cpus, tuple(gpus))
        )

    def run(self) -> None:
        """Works until the leader dismisses it. When it returns, everything that it started has ended."""
        try:
            while not self._over:
                self._loop.turn()
        finally:
            self.close()

    def close(self) -> None:
        """Ends the agent, if one was started."""
        self._channel.close()
        deadline = time.monotonic() + END_SECONDS
        for process in self._agents.values():
            with contextlib.suppress(Exception):  # subprocess.TimeoutExpired: only spawn.py knows it by name
                process.wait(max(0.1, deadline - time.monotonic()))
            process.kill()  # this is the guard; the agent notices it and ends everything
            process.wait()
        self._loop.close()

    def _dial(self, addresses: Sequence[str], number: int, deadline: float) -> tuple[str, Any, Proven]:
        """Tries all addresses at the same time. Returns the first at which the leader of this job answers."""
        found: list[tuple[str, Any, Proven]] = []
        reasons: list[str] = []

        def spawn_flow(address: str) -> None:
            def done(result: tuple[Any, Proven] | None, error: Exception | None) -> None:
                if result is None:
                    reasons.append(f"{address}: {sockets.explain(error or EOFError())}")
                elif found:
                    result[0].close()
                else:
                    found.append((address, *result))

            tasks.append(self._loop.spawn(self._greet(address, number), deadline, done))

        tasks: list[Any] = []
        for address in addresses:
            spawn_flow(address)
        while not found and len(reasons) < len(addresses):
            self._loop.turn(deadline)
        for task in tasks:
            self._loop.cancel(task)
        if not found:
            raise Unreachable(
                f"{os.uname().nodename} cannot reach the process that called run ({'; '.join(reasons)}); "
                "executors must be able to open connections to it: check firewalls, or name its interface with nics="
            )
        return found[0]

    def _greet(self, address: str, number: int) -> Flow[tuple[Any, Proven]]:
        sock = yield from sockets.connect(address)
        try:
            proven = yield from call(sock, self._secret, Greeting(Role.AGENT, number, NOBODY), Role.LAUNCHER)
        except BaseException:
            sock.close()
            raise
        return sock, proven

    def _on_message(self, message: Any) -> None:
        if isinstance(message, task_messages.StartAgent):
            try:
                self._carry(message.number)
            except (OSError, Unreachable) as error:
                print(f"farandole: cannot start an agent: {error}", file=sys.stderr, flush=True)
                self._channel.send(task_messages.AgentEnded(message.number, 1))

    def _ended(self, _reason: str) -> None:
        self._over = True

    def _carry(self, number: int) -> None:
        deadline = time.monotonic() + self._settings.seconds
        _, sock, _ = self._dial([self._address], number, deadline)
        secret = self._secret.to_descriptor()
        try:
            sock.setblocking(True)
            command = [sys.executable, "-c", start_code(package_place(), "farandole.launch.called"), str(secret)]
            self._agents[number] = spawn.start_tied_agent(command, sock.fileno(), secret, self._environment())
        finally:
            sock.close()
            os.close(secret)
        self._loop.at("agents", time.monotonic() + CHECK_SECONDS, self._check)

    def _check(self) -> None:
        for number, process in list(self._agents.items()):
            if process.poll() is not None:
                del self._agents[number]
                self._channel.send(task_messages.AgentEnded(number, process.returncode))
        if self._agents:
            self._loop.at("agents", time.monotonic() + CHECK_SECONDS, self._check)

    def _environment(self) -> dict[str, str]:
        """The variables of Spark's worker, with Spark's files on the path, and those that the user added."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_SPARK)}
        if self._settings.executable in (None, sys.executable):
            environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        return {**environment, **self._settings.env, PYTHON: self._settings.executable or sys.executable}


def attend(settings: TaskSettings, barrier: bool) -> str:
    """Runs a task until it ends. Returns "" or an error text for the leader. It never raises: Spark would retry."""
    from pyspark import BarrierTaskContext, TaskContext

    context: Any = BarrierTaskContext.get() if barrier else TaskContext.get()
    task_error, slot = "", None
    try:
        gpu = context.resources().get("gpu")
        slot = SlotTask(settings, list(gpu.addresses) if gpu is not None else [], context.cpus())
    except Exception as error:
        task_error = str(error) or type(error).__name__
    if barrier:  # all tasks start together
        found = [text for text in context.allGather(task_error) if text]
        task_error = found[0] if found else ""
    if slot is not None:
        if task_error:
            slot.close()
        else:
            slot.run()
    return task_error
