# Signs of life of an elastic job's actors: on each node a watcher reads what the core of each rank writes.
# Touches Ray, memory files and processes of actors on the watcher's own node, and a thread on either side.
"""An actor that is frozen, not dead, is noticed as a process of `farandole run` is: by its pulse (launch/watch.py)."""

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

from farandole.elastic.policy import Times
from farandole.launch.watch import Watcher, Word
from farandole.ray.worker import Whereabouts
from farandole.rendezvous.orders import Quiet, Watch

ASK_SECONDS = 0.5  # between two questions to a node's watcher


class NodeWatcher:
    """An actor that needs no CPU of Ray's: looks after the ranks of its node, at its own pace."""

    def __init__(self, times: Times) -> None:
        seconds = (times.beat, times.suspect, times.evict, times.stubborn, 0.0)
        self._watcher = Watcher(Watch(0, *(int(1000 * one) for one in seconds)))
        self._lock = threading.Lock()
        self._pids: dict[int, int] = {}
        self._seen: list[Quiet] = []
        threading.Thread(target=self._look, name="farandole-ray-watcher", daemon=True).start()

    def _look(self) -> None:
        while True:
            time.sleep(self._watcher.pause)
            with self._lock:
                self._seen += self._watcher.look(time.monotonic())[1]

    def ask(self, ranks: Mapping[int, tuple[int, int]]) -> list[Quiet]:
        """What was seen since the last question; `ranks` are those to watch: their processes and descriptors."""
        with self._lock:
            for number in [number for number in self._pids if number not in ranks]:
                self._watcher.forget(number)
                del self._pids[number]
            for number, (pid, fd) in ranks.items():
                if number not in self._pids:
                    with contextlib.suppress(OSError):  # it has ended meanwhile
                        word = Word(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
                        self._watcher.add(number, pid, word)
                        self._pids[number] = pid
            seen, self._seen = self._seen, []
            return seen

    def kill(self, pid: int) -> None:
        """Ends a process that does not listen any more."""
        if pid in self._pids.values():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


class Pulses:
    """The watchers of all nodes. `tell(worker, seconds, state)` is called for what they saw, in a thread of its own."""

    def __init__(self, times: Times, tell: Callable[[int, float, str], None]) -> None:
        self._times = times
        self._tell = tell
        self._lock = threading.Lock()
        self._ranks: dict[int, Whereabouts] = {}
        self._watchers: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}  # node -> the answer that is due
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="farandole-ray-pulses", daemon=True)
        self._thread.start()

    def add(self, worker: int, where: Whereabouts) -> None:
        """One more to watch."""
        with self._lock:
            self._ranks[worker] = where

    def forget(self, worker: int) -> None:
        """It has ended."""
        with self._lock:
            self._ranks.pop(worker, None)

    def kill(self, worker: int) -> None:
        """Ends the process of one that is not heard any more."""
        with self._lock:
            where = self._ranks.get(worker)
            watcher = self._watchers.get(where.node) if where is not None else None
        if where is not None and watcher is not None:
            watcher.kill.remote(where.pid)

    def close(self) -> None:
        """Ends the watchers. Calling it again does nothing."""
        self._closing.set()
        self._thread.join()
        for watcher in self._watchers.values():
            with contextlib.suppress(Exception):  # Ray itself may be gone
                ray.kill(watcher)
        self._watchers.clear()

    def _run(self) -> None:
        while not self._closing.wait(ASK_SECONDS):
            with contextlib.suppress(Exception):  # Ray may be away for a while
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
            except Exception:  # it is gone, with its node or alone; another one takes its place while there are ranks
                del self._watchers[node]
                continue
            for report in reports:
                self._tell(report.rank, report.silent_ms / 1000, report.state)
