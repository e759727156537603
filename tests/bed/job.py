# A job on the hosts of a bed without a launcher: one hub, and ranks started by the test, each in its host.
# Touches the bed, the hub's room, and memory files.
"""`with job.start(places, body) as ranks: ranks.results()`: for tests of the network that need no ssh."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jobs  # tests/ranks
from waiting import until

from bed import Host
from farandole.launch.slots import rank_numbers
from farandole.rendezvous.secret import Secret

# A hub without a launcher.
HUB = [sys.executable, "-m", "farandole.tools.bench.hub"]


class Ranks:
    """The processes of a job; rank r runs in `places[r]`."""

    def __init__(self, places: Sequence[Host], body: str, env: Mapping[str, str], network: int) -> None:
        self.places = list(places)
        self.secret = Secret.create()
        self.processes: list[subprocess.Popen[str]] = []
        self._fd = self.secret.to_descriptor()
        self._files = places[0].files.parent
        first = self.places[0]
        environment = {"PYTHONPATH": f"{jobs.SOURCE}:{jobs.HERE}", **env}
        command = [*HUB, str(self._fd), str(len(places)), f"tcp:{first.addresses[network]}"]
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "text": True,
            "pass_fds": [self._fd],
        }
        self.hub = first.start(command, environment, **pipes)
        assert self.hub.stdout is not None
        self.address = self.hub.stdout.readline().strip()
        for place in rank_numbers([host.name for host in self.places]):
            worker = {**environment, **place.environment(), "FARANDOLE_RENDEZVOUS": self.address}
            worker["FARANDOLE_SECRET_FD"] = str(self._fd)
            with (
                open(self._output(place.rank), "w") as output,
                open(self._output(place.rank, "err"), "w") as complained,
            ):
                words = [sys.executable, "-c", jobs.PRELUDE + body]
                more: dict[str, Any] = {"stdout": output, "stderr": complained, "pass_fds": [self._fd]}
                self.processes.append(self.places[place.rank].start(words, worker, **more))

    def printed(self, rank: int, kind: str = "out") -> str:
        """What a rank has printed so far ("err": to its standard error)."""
        return self._output(rank, kind).read_text()

    def reports(self, rank: int) -> list[dict[str, Any]]:
        """What a rank has reported so far."""
        return [json.loads(line) for line in self.printed(rank).splitlines() if line.startswith("{")]

    def wait_for(self, rank: int, count: int = 1, timeout: float = 30.0) -> dict[str, Any]:
        """The `count`-th report of a rank."""
        found = until(
            lambda: self.reports(rank)[count - 1 : count],
            timeout,
            lambda: self.printed(rank, "err"),
            lambda: self.processes[rank].poll() is None,
        )
        return found[0]

    def results(self, timeout: float = 60.0) -> list[dict[str, Any]]:
        """The last report of every rank of a job that must end well."""
        deadline = time.monotonic() + timeout
        codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        assert not any(codes), [codes, *(self.printed(rank, "err") for rank in range(len(codes)))]
        return [self.reports(rank)[-1] for rank in range(len(codes))]

    def close(self) -> None:
        """Kills what still runs."""
        for process in [*self.processes, self.hub]:
            process.kill()
            process.wait()
        for pipe in (self.hub.stdin, self.hub.stdout):
            assert pipe is not None
            pipe.close()
        os.close(self._fd)

    def _output(self, rank: int, kind: str = "out") -> Path:
        return self._files / f"rank{rank}.{kind}"


@contextlib.contextmanager
def start(places: Sequence[Host], body: str, env: Mapping[str, str] | None = None, network: int = 0) -> Iterator[Ranks]:
    """Ranks that run `body` after the prelude of tests/ranks/jobs.py; they connect over this network of the bed."""
    ranks = Ranks(places, body, env or {}, network)
    try:
        yield ranks
    finally:
        ranks.close()
