# A user's master program: it starts RendezvousServer, assigns ranks, and starts them with address, port and key.
# Touches processes and sockets of this host.
"""Like the masters of other projects: many rendezvous on one server, each with other ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import horovod
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.common.util.secret import HOROVOD_SECRET_KEY
from horovod.runner.http.http_server import RendezvousServer

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]
SOURCE = str(Path(horovod.__file__).resolve().parents[1])
PROGRAM = """
import json, os, sys
import numpy as np
import farandole as hvd
for line in sys.stdin:  # the master sends the rank and size for each rendezvous
    os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"] = line.split()
    hvd.init()
    total = hvd.allreduce(np.full(100, 1.0 + hvd.rank()), op=hvd.Sum, name="sum")
    numbers = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
    sys.stdout.write(json.dumps([numbers, float(total[0])]) + "\\n")
    sys.stdout.flush()
    hvd.shutdown()
"""


class Master:
    """Starts ranks, and sends each rank its number before each rendezvous."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(HOROVOD_SECRET_KEY, "")  # so that it is removed after the test
        monkeypatch.delenv(HOROVOD_SECRET_KEY)
        self.server = RendezvousServer(verbose=1)
        self.port = self.server.start()
        self.workers: list[subprocess.Popen[str]] = []

    def start(self, **more: str | None) -> subprocess.Popen[str]:
        variables: dict[str, str | None] = {
            **os.environ,
            "PYTHONPATH": SOURCE,
            "OMP_NUM_THREADS": "1",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.port),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_HOSTNAME": "master",
            **more,
        }
        worker = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM],
            env={name: text for name, text in variables.items() if text is not None},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.workers.append(worker)
        return worker

    def rendezvous(self, workers: list[subprocess.Popen[str]], hosts: str) -> list[Any]:
        """A new plan; these workers take its ranks in order."""
        self.server.init(get_host_assignments(parse_hosts(hosts), len(workers)))
        for rank, worker in enumerate(workers):
            assert worker.stdin is not None
            worker.stdin.write(f"{rank} {len(workers)}\n")
            worker.stdin.flush()
        found = []
        for worker in workers:
            assert worker.stdout is not None and worker.stderr is not None
            line = worker.stdout.readline()
            assert line, worker.stderr.read()
            found.append(json.loads(line))
        return found

    def close(self) -> None:
        for worker in self.workers:
            worker.communicate(timeout=60)
        self.server.stop()


def test_ranks_of_another_master_program_join_repeatedly(monkeypatch: pytest.MonkeyPatch) -> None:
    master = Master(monkeypatch)
    try:
        first = [master.start(), master.start()]
        assert master.rendezvous(first, "one:2") == [[[0, 2, 0, 2, 0, 1], 3.0], [[1, 2, 1, 2, 0, 1], 3.0]]
        more = [
            *reversed(first),
            master.start(),
        ]  # the ranks are assigned in another order, and there is a third worker
        assert master.rendezvous(more, "one:2,two:1") == [
            [[0, 3, 0, 2, 0, 2], 6.0],
            [[1, 3, 1, 2, 0, 1], 6.0],
            [[2, 3, 0, 1, 1, 2], 6.0],
        ]
        assert [numbers[0] for numbers, _ in master.rendezvous(first, "one:2")] == [0, 1]  # one worker less
        assert [numbers[:2] for numbers, _ in master.rendezvous(first, "one:2")] == [
            [0, 2],
            [1, 2],
        ]  # the same once more
    finally:
        master.close()
    assert [worker.returncode for worker in master.workers] == [0, 0, 0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({HOROVOD_SECRET_KEY: None}, "_HOROVOD_SECRET_KEY is not: ranks join only where they can prove"),
        ({HOROVOD_SECRET_KEY: "abc"}, "expected 32 bytes in base64"),
        ({"HOROVOD_GLOO_RENDEZVOUS_PORT": "x"}, "is not a number"),
        (
            {HOROVOD_SECRET_KEY: "A" * 43 + "=", "HOROVOD_START_TIMEOUT": "1"},
            "cannot join through the RendezvousServer",
        ),
        ({"HOROVOD_START_TIMEOUT": "1"}, "its plan is for 1 ranks"),
    ],
)
def test_a_rank_that_cannot_join_gets_the_reason(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, str | None], message: str
) -> None:
    master = Master(monkeypatch)
    try:
        master.server.init(get_host_assignments(parse_hosts("one:1"), 1))
        worker = master.start(**more)
        _, errors = worker.communicate("0 2\n", timeout=60)
        assert worker.returncode != 0 and message in errors, errors
    finally:
        master.close()
