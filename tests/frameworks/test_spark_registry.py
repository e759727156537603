# The registry for tasks of Spark, without Spark: the tasks are processes that this test starts.
# Touches farandole.spark.registry and farandole.spark.task, over real sockets.
"""Tasks, agents and unauthenticated connections."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from farandole.rendezvous.secret import Secret

if importlib.util.find_spec("pyspark") is None:
    pytest.skip("pyspark is not installed", allow_module_level=True)

from farandole.spark.registry import TaskRegistry

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
# The secret comes through a pipe; in Spark it comes with the function.
TASK = """
import sys
from farandole.spark.task import SlotTask, TaskSettings
key = sys.stdin.buffer.read(32)
SlotTask(TaskSettings(key, (sys.argv[1],), 10.0, {}), ["3"], 2).run()
"""


class Task:
    """A process that reports to the registry."""

    def __init__(self, registry: TaskRegistry, secret: Secret) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", TASK, registry.addresses[0]],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(secret.key)
        self.process.stdin.close()

    def end(self) -> tuple[int, str]:
        assert self.process.stderr is not None
        output = self.process.stderr.read().decode()
        self.process.stderr.close()
        return self.process.wait(60), output


@pytest.fixture
def secret() -> Secret:
    return Secret.create()


@pytest.fixture
def registry(secret: Secret) -> Iterator[TaskRegistry]:
    made = TaskRegistry(secret, ["tcp:127.0.0.1"], 4)
    yield made
    made.close()


def test_tasks_take_slots_and_start_agents(registry: TaskRegistry, secret: Secret) -> None:
    tasks = [Task(registry, secret) for _ in range(2)]
    assert registry.await_slots(2, time.monotonic() + 60, lambda: None)
    ((name, slots),) = registry.slots().items()  # both have the same parent process, so they are one executor
    assert [(here.gpus, here.cpus, here.host) for here in slots] == [(("3",), 2, os.uname().nodename)] * 2
    connection, agent = registry.take(name)
    with pytest.raises(OSError, match="has not started an agent yet"):
        registry.take(name)  # which asks for another one
    until(lambda: registry._executors[name].ready)
    assert agent.poll() is None
    connection.close()  # an agent ends when its connection ends
    assert agent.wait(60) == 0
    other, _ = registry.take(name)
    other.close()
    registry.close()
    assert [task.end() for task in tasks] == [(0, "")] * 2


def test_a_killed_task_is_removed_with_its_agent(registry: TaskRegistry, secret: Secret) -> None:
    task = Task(registry, secret)
    assert registry.await_slots(1, time.monotonic() + 60, lambda: None)
    (name,) = registry.slots()
    connection, agent = registry.take(name)
    task.process.kill()
    assert agent.wait(60) == 1 and registry.count() == 0 and registry.slots() == {}
    with contextlib.suppress(ConnectionResetError):
        while _readable(connection) and connection.recv(4096):  # the agent detects this too, and closes the connection
            pass
    connection.close()
    assert task.end()[0] == -9


def test_unauthenticated_connections_are_not_registered(registry: TaskRegistry) -> None:
    code, printed = Task(registry, Secret.create()).end()
    assert code == 1 and "cannot reach the process that called run" in printed
    assert registry.count() == 0 and registry._listeners[0].refused == 1


def test_errors_of_tasks_are_raised_and_the_wait_has_a_timeout(registry: TaskRegistry) -> None:
    with pytest.raises(RuntimeError, match="no Java"):
        registry.await_slots(1, time.monotonic() + 60, lambda: RuntimeError("no Java"))
    assert not registry.await_slots(1, time.monotonic() + 0.1, lambda: None)


def _readable(sock: Any) -> bool:
    import select

    return bool(select.select([sock], [], [], 60)[0])
