# Heartbeats of an elastic job's actors: on each node a watcher reads the numbers that the core of each rank writes.
# Touches Ray, memory files and processes of actors on the watcher's own node, and a thread on each side.
"""Actors that hang are found as in `farandole run`, by their heartbeats (launch/watch.py)."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from farandole.launch.watch import StatusPage, Watcher
from farandole.ray.worker import ActorLocation
from farandole.rendezvous.agent_messages import RankSilent, WatchRanks
from farandole.rendezvous.elastic.policy import Times

ASK_SECONDS = 0.5  # between two calls to the watcher of a node


class NodeWatcher:
    """An actor that watches the ranks of its node on its own thread. It reserves no CPU in Ray."""

    def __init__(self, times: Times) -> None:
        seconds = (times.heartbeat, times.suspect, times.evict, times.give_up, 0.0)
        self._watcher = Watcher(WatchRanks(0, *(int(1000 * one) for one in seconds)))
        self._lock = threading.Lock()
        self._pids: dict[int, int] = {}
        self._seen: list[RankSilent] = []
        threading.Thread(target=self._check, name="farandole-ray-watcher", daemon=True).start()

    def _check(self) -> None:
        while True:
            time.sleep(self._watcher.pause)
            with self._lock:
                self._seen += self._watcher.check(time.monotonic())[1]

    def ask(self, ranks: Mapping[int, tuple[int, int]]) -> list[RankSilent]:
        """The reports since the last call. `ranks`: the processes and descriptors of the ranks to watch."""
        with self._lock:
            for number in [number for number in self._pids if number not in ranks]:
                self._watcher.forget(number)
                del self._pids[number]
            for number, (pid, fd) in ranks.items():
                if number not in self._pids:
                    with contextlib.suppress(OSError):  # it may have ended
                        word = StatusPage(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
                        self._watcher.add(number, pid, word)
                        self._pids[number] = pid
            seen, self._seen = self._seen, []
            return seen

    def kill(self, pid: int) -> None:
        """Kills a process that hangs."""
        if pid in self._pids.values():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


class HeartbeatMonitor:
    """The watchers of all nodes. `tell(worker, seconds, state)` is called for their reports, on a thread."""

    def __init__(self, times: Times, tell: Callable[[int, float, str], None]) -> None:
        self._times = times
        self._tell = tell
        self._lock = threading.Lock()
        self._ranks: dict[int, ActorLocation] = {}
        self._watchers: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}  # node -> the reference to its next answer
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="farandole-ray-pulses", daemon=True)
        self._thread.start()

    def add(self, worker: int, where: ActorLocation) -> None:
        """Watches one more worker."""
        with self._lock:
            self._ranks[worker] = where

    def forget(self, worker: int) -> None:
        """Stops watching a worker that has ended."""
        with self._lock:
            self._ranks.pop(worker, None)

    def kill(self, worker: int) -> None:
        """Kills the process of a worker that hangs."""
        with self._lock:
            where = self._ranks.get(worker)
            watcher = self._watchers.get(where.node) if where is not None else None
        if where is not None and watcher is not None:
            watcher.kill.remote(where.pid)

    def close(self) -> None:
        """Ends the watchers. A second call does nothing."""
        self._closing.set()
        self._thread.join()
        for watcher in self._watchers.values():
            with contextlib.suppress(Exception):  # Ray itself may have ended
                ray.kill(watcher)
        self._watchers.clear()

    def _run(self) -> None:
        while not self._closing.wait(ASK_SECONDS):
            with contextlib.suppress(Exception):  # Ray may not answer for some time
                self._ask()

    def _ask(self) -> None:
        nodes: dict[str, dict[int, tuple[int, int]]] = {node: {} for node in self._watchers}
        with self._lock:
            for worker, where in self._ranks.items():
                nodes.setdefault(where.node, {})[worker] = (where.pid, where.pulse)
        for node, ranks in nodes.items():
            if node not in self._watchers:
                there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
                made = ray.remote(NodeWatcher).options(num_cpus=0, scheduling_strategy=there)
                self._watchers[node] = made.remote(self._times)
            if node not in self._asked:
                self._asked[node] = self._watchers[node].ask.remote(ranks)
        due = {ref: node for node, ref in self._asked.items()}
        for ref in ray.wait(list(due), num_returns=len(due), timeout=ASK_SECONDS)[0] if due else []:
            node = due[ref]
            del self._asked[node]
            try:
                reports = ray.get(ref)
            except Exception:  # the watcher or its node is lost; if the node still has ranks, a new one is started
                del self._watchers[node]
                continue
            for report in reports:
                self._tell(report.rank, report.silent_ms / 1000, report.state)
