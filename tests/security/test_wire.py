# Rows 28, 29 and 33 across hosts: an attacker on the network, from the first listening socket to the last step.
# Touches the bed of tests/bed.
"""Every listening socket of every host is found through the kernel and attacked; the job's result keeps its bits."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bed
import pytest
from bed import job
from waiting import until

pytestmark = [pytest.mark.security, pytest.mark.ranks]
BOMB = "/run/bomb"
ATTACKER = [sys.executable, str(Path(__file__).with_name("wire_attacker.py"))]
PATH = {"PYTHONPATH": f"{bed.ROOT / 'src'}:{Path(__file__).parent}"}
TRAIN = """
import hashlib
while rank == 1 and not os.path.exists("/run/host/go"):
    time.sleep(0.01)  # sleep: looks for the gate; until then the others wait for this rank, and listen
hvd.init()
report(joined=True)
draw = np.random.default_rng(rank)
weights = np.ones(50_000, np.float32)
began = time.monotonic()
for step in range(150):
    weights -= 0.01 * hvd.allreduce(draw.standard_normal(50_000).astype(np.float32) * weights, name="gradient")
print(time.monotonic() - began, file=sys.stderr)
while not os.path.exists("/run/host/end"):
    time.sleep(0.01)  # sleep: looks for the gate
report(digest=hashlib.sha256(weights.tobytes()).hexdigest())
hvd.shutdown()
"""


@contextlib.contextmanager
def recorder(host: bed.Host) -> Iterator[subprocess.Popen[str]]:
    """Listens to what passes through this host."""
    with host.start([*ATTACKER, "record"], PATH, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def open_gates(hosts: bed.Bed, name: str) -> None:
    for host in hosts:
        (host.files / name).touch()


def close_gates(hosts: bed.Bed) -> None:
    for host in hosts:
        for name in ("go", "end"):
            (host.files / name).unlink(missing_ok=True)


def unix_listeners(host: bed.Host) -> list[str]:
    """Unix sockets of this host's network that accept connections."""
    lines = Path(f"/proc/{host.pid}/net/unix").read_text().splitlines()[1:]
    return [line for line in lines if int(line.split()[3], 16) & 0x10000]


def digests(ranks: job.Ranks) -> set[str]:
    return {report["digest"] for report in ranks.results()}


def test_rows_28_29_33_an_attacker_on_the_network_changes_no_bit() -> None:
    with bed.hosts(3) as hosts:
        one, two, stranger = hosts
        open_gates(hosts, "go")
        open_gates(hosts, "end")
        with job.start([one, two], TRAIN) as ranks:
            undisturbed = digests(ranks)
        close_gates(hosts)
        with recorder(one) as recording, job.start([one, two], TRAIN) as ranks:
            assert recording.stdout is not None
            recorded = recording.stdout.readline().strip()  # rank 0 was accepted with these bytes
            assert len(recorded) == 2 * 92
            doors = until_listening(one, 2)
            command = [*ATTACKER, recorded, *(f"{address}:{port}" for address, port in doors)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            with stranger.start(command, PATH, **pipes) as attacker:
                assert attacker.stdout is not None and attacker.stdin is not None
                first = json.loads(attacker.stdout.readline())
                open_gates(hosts, "go")
                for rank in range(2):
                    assert ranks.wait_for(rank) == {"joined": True}
                # A static job that runs listens nowhere, so that nothing can be attacked any more.
                until_silent([one, two])
                open_gates(hosts, "end")
                disturbed = digests(ranks)
                attacker.stdin.close()
                last = json.loads(attacker.stdout.readline())
                assert attacker.wait(60) == 0
        for kind in (
            "noise",
            "pickle",
            "another job's rank",
            "replay",
            "reflection",
            "flood",
            "slow-loris",
            "http",
            "tls",
        ):
            assert first.get(kind, 0) >= 2, (kind, first)
        assert "nobody listens" not in first and last["nobody listens"] > 0, last
        assert not last.get("accepted"), last
        assert disturbed == undisturbed and len(disturbed) == 1
        assert not any(os.path.exists(f"/proc/{host.pid}/root{BOMB}") for host in hosts)


def until_listening(host: bed.Host, count: int) -> list[tuple[str, int]]:
    until(lambda: len(host.listening()) >= count, what=lambda: host.listening())
    found = host.listening()
    assert all(address == host.address for address, _ in found), "one chosen address, and never all of them"
    return found


def until_silent(hosts: list[bed.Host]) -> None:
    def listeners() -> list[object]:
        return [one for host in hosts for one in (*host.listening(), *unix_listeners(host))]

    until(lambda: not listeners(), what=listeners)
