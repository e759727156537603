# How much unauthenticated connections slow down a training job, compared with the same attack on a bare process, which
# only accepts and closes. Touches the bed of tests/bed (root): .venv/bin/python bench/attacked.py
"""Compares medians of the step time; the runs alternate.

The target: while the job is attacked, a step takes at most 5 % longer than while the bare process is attacked. The bare
process runs on the job's first host.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("src", "tests", "tests/ranks", "tests/security")]

import bed  # noqa: E402
from bed import job  # noqa: E402

REPEATS = 5
ATTACKER = [sys.executable, str(ROOT / "tests/security/wire_attacker.py"), "-"]
ENVIRONMENT = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests/security'}"}
BARE_PROCESS = """
import socket, sys
listener = socket.create_server((sys.argv[1], 7777), backlog=1024)
print("ready", flush=True)
while True:
    listener.accept()[0].close()
"""
RANK_PROGRAM = """
while rank == 1 and not os.path.exists("/run/host/go"):
    time.sleep(0.01)
hvd.init()
report(joined=True)
while not os.path.exists("/run/host/measure"):
    time.sleep(0.01)
array, times = np.ones(1 << 18, np.float32), []
hvd.barrier()
for step in range(400):
    began = time.perf_counter()
    hvd.allreduce(array, name="a")
    np.sqrt(array)  # a little work of its own
    times.append(time.perf_counter() - began)
report(step_us=float(np.median(times)) * 1e6)
hvd.shutdown()
"""


@contextlib.contextmanager
def attack(attacker_host: bed.Host, addresses: list[str]) -> Iterator[None]:
    """Attacks the addresses from before the block begins until it ends."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with attacker_host.start([*ATTACKER, *addresses], ENVIRONMENT, **pipes) as attacker:
        assert attacker.stdout is not None
        attacker.stdout.readline()
        try:
            yield
        finally:
            attacker.communicate(timeout=20)  # this closes its input, which ends it


def step_time(hosts: bed.Bed, target: str) -> float:
    """Microseconds of a step. `target` is attacked: "job", "bare" (the bare process) or "" (nothing)."""
    one, two, attacker_host = hosts
    for host in hosts:
        for name in ("go", "measure"):
            (host.files / name).unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(one.start([sys.executable, "-c", BARE_PROCESS, one.address], stdout=subprocess.PIPE))
        stack.callback(bare.kill)
        assert bare.stdout is not None
        bare.stdout.readline()
        ranks = stack.enter_context(job.start([one, two], RANK_PROGRAM))
        # The hub and rank 0 listen until all ranks have joined. Rank 1 joins only after `go`, so that the attack begins
        # before that.
        while len(addresses := [f"{address}:{port}" for address, port in one.listening() if port != 7777]) < 2:
            time.sleep(0.01)
        if target == "job":
            stack.enter_context(attack(attacker_host, addresses))
        if target == "bare":
            stack.enter_context(attack(attacker_host, [f"{one.address}:7777"] * 2))
        for name in ("go", "measure"):
            for host in hosts:
                (host.files / name).touch()
            for rank in range(2):
                ranks.wait_for(rank)
        return statistics.mean(float(report["step_us"]) for report in ranks.results())


def main() -> int:
    if reason := bed.missing_requirement():
        sys.exit(f"attacked: {reason}")
    times: dict[str, list[float]] = {"": [], "bare": [], "job": []}
    with contextlib.closing(bed.Bed(3, [bed.Network()], False, False, [])) as hosts:
        for _ in range(REPEATS):
            for target, measured in times.items():
                measured.append(step_time(hosts, target))
    names = {"": "no attack", "bare": "attack on a bare process", "job": "attack on the job"}
    for target, measured in times.items():
        spread = f"{min(measured):.0f} to {max(measured):.0f}"
        print(f"{names[target]:<26}{statistics.median(measured):8.0f} us a step ({spread}, {REPEATS} runs)")
    ratio = statistics.median(times["job"]) / statistics.median(times["bare"])
    print(f"the job against the bare process: {100 * (ratio - 1):+.1f} % (target: at most +5 %)")
    return 0 if ratio <= 1.05 else 1


if __name__ == "__main__":
    sys.exit(main())
