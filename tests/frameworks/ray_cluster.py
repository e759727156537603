# A Ray cluster for tests, in a separate process that also runs the cases: Ray's threads and files stay out of pytest.
# Touches processes that carry its mark, and a temporary directory.
"""`Cluster` in the test's process, `main()` in the other: a line of JSON asks for a case, a line of JSON answers."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import waiting
from entry_point import install

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MARK = "CLUSTER_OF_A_TEST"
ANSWER = "answer: "


class Cluster:
    """Ray nodes with these resources; `ask` runs a case of ray_cases.py or ray_patterns.py in a connected driver."""

    address: str
    client: Any

    def __init__(self, nodes: Sequence[dict[str, Any]], client: bool) -> None:
        self.mark = uuid.uuid4().hex
        self._place = tempfile.TemporaryDirectory(prefix="r")
        self.home = Path(self._place.name)
        # As if the package were installed: torch finds the backend by its entry point.
        places = (ROOT / "src", HERE, HERE.parent / "ranks", install(self.home))
        self.environment = {
            **os.environ,
            MARK: self.mark,
            "PYTHONPATH": os.pathsep.join(map(str, places)),
            "HOME": str(self.home),  # Ray keeps its token there, and results
            "TMPDIR": str(self.home),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # 15 by default: tests would starve beside others
            "RAY_TRAIN_METRICS_ENABLED": "0",
            "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "90",
            "OMP_NUM_THREADS": "1",
        }
        self._output_file = open(self.home / "output", "w+b")  # noqa: SIM115
        command = [sys.executable, str(HERE / "ray_cluster.py"), json.dumps(list(nodes)), str(int(client))]
        self._begin_driver(command, ROOT)

    def _begin_driver(self, command: Sequence[str], directory: Path) -> None:
        pipe, environment = subprocess.PIPE, self.environment
        self._process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=self._output_file, cwd=directory
        )

    @classmethod
    def started(cls, nodes: Sequence[dict[str, Any]], client: bool = False) -> Cluster:
        """A cluster that answers. Ray gives up when its processes take 30 s to start; where others had the processors
        for so long, it begins again."""
        for left in reversed(range(waiting.TRIES)):
            before, made = waiting.Moment.now(), cls(nodes, client)
            try:
                made.address, made.client = made._answer()
                made.environment["RAY_ADDRESS"] = made.address
                return made
            except AssertionError as error:
                spent = before.since()
                with contextlib.suppress(AssertionError):
                    made.close()
                if not left or not spent.busy or "timed out during startup" not in str(error):
                    raise
                waiting.repeated.append(f"Ray's processes were not there in time; {spent}")
        raise AssertionError("not reached")

    def ask(self, case: str, **arguments: Any) -> Any:
        """What the case returned; its failure is the test's."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([case, arguments]).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def printed(self) -> str:
        """The last that the driver and the workers printed."""
        self._output_file.flush()
        return (self.home / "output").read_text(errors="replace")[-6000:]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER.encode()):
                good, value = json.loads(line[len(ANSWER) :])
                assert good, value + "\n----- printed:\n" + self.printed()
                return value
        raise AssertionError(f"the driver has ended:\n{self.printed()}")

    def run(self, *command: str, **variables: str) -> str:
        """What a program printed that is connected to the cluster."""
        environment = {**self.environment, **variables}
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=500)
        logs = self.home.glob("ray/session_latest/logs/ray_client_server*.err")
        assert done.returncode == 0, done.stdout + done.stderr + "".join(log.read_text()[-2000:] for log in logs)
        return done.stdout

    def close(self) -> None:
        """Ends it, and looks that nothing of it is left."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._output_file.close()
        deadline = time.monotonic() + 20
        while (left := marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.1)  # sleep: between two looks
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        self._place.cleanup()
        assert not left, f"left behind: {list(left.values())}"


def marked(mark: str) -> dict[int, str]:
    """The processes of a cluster that run."""
    found = {}
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and f"{MARK}={mark}".encode() in Path(f"/proc/{entry}/environ").read_bytes().split(
                b"\0"
            ):
                found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:150]
        except OSError:
            continue
    return found


def cluster_fixture(*nodes: dict[str, Any], client: bool = False) -> Any:
    """A fixture of pytest: a cluster of these nodes for the tests of one module."""
    import pytest  # only in the test's process

    @pytest.fixture(scope="module")
    def cluster() -> Iterator[Cluster]:
        made = Cluster.started(nodes, client=client)
        yield made
        made.close()

    return cluster


def answering() -> Callable[[bool, Any], None]:
    """A driver's function that sends an answer. What the driver prints from now on is no answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(good: bool, value: Any) -> None:
        answers.write(ANSWER + json.dumps([good, value]) + "\n")
        answers.flush()

    return answer


def main() -> None:
    answer = answering()
    import ray
    from ray.cluster_utils import Cluster as Nodes

    import farandole.rendezvous.sockets as sockets

    first, *others = json.loads(sys.argv[1])
    first = {**first, "include_dashboard": False}
    client = ""
    if int(sys.argv[2]):
        held, port = sockets.hold_port()
        held.close()
        first["ray_client_server_port"], client = port, f"ray://127.0.0.1:{port}"
    nodes = Nodes(initialize_head=True, head_node_args=first)
    added = [nodes.add_node(**one) for one in others]
    nodes.wait_for_nodes()
    ray.init(address=nodes.address, logging_level=logging.ERROR)
    answer(True, [nodes.address, client])
    import ray_cases

    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            if name == "add_node":
                added.append(nodes.add_node(**arguments))
                answer(True, len(added) - 1)
            elif name == "remove_node":
                nodes.remove_node(added[arguments["index"]], allow_graceful=False)
                answer(True, None)
            else:
                case = getattr(ray_cases, name, None) or getattr(importlib.import_module("ray_patterns"), name)
                answer(True, case(**arguments))
        except BaseException:
            answer(False, traceback.format_exc())
    ray.shutdown()
    nodes.shutdown()


if __name__ == "__main__":
    main()
