# What strangers cost a job that trains: its step time under attack, beside the same attack on a bare accept-and-close
# process. Touches the bed of tests/bed (root): .venv/bin/python bench/attacked.py
"""Medians of interleaved runs; the target is at most 5 % more than beside the bare process."""

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
PATH = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests/security'}"}
BARE = """
import socket, sys
listener = socket.create_server((sys.argv[1], 7777), backlog=1024)
print("ready", flush=True)
while True:
    listener.accept()[0].close()
"""
BODY = """
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
def attack(stranger: bed.Host, addresses: list[str]) -> Iterator[None]:
    """Under way when the block begins."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with stranger.start([*ATTACKER, *addresses], PATH, **pipes) as attacker:
        assert attacker.stdout is not None
        attacker.stdout.readline()
        try:
            yield
        finally:
            attacker.communicate(timeout=20)  # the end of its input ends it


def step_time(hosts: bed.Bed, aim: str) -> float:
    """Microseconds of a step. `aim`: "job" attacks what it listened on, "bare" the other process, "" nobody."""
    one, two, stranger = hosts
    for host in hosts:
        for name in ("go", "measure"):
            (host.files / name).unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(one.start([sys.executable, "-c", BARE, one.address], stdout=subprocess.PIPE))
        stack.callback(bare.kill)
        assert bare.stdout is not None
        bare.stdout.readline()
        ranks = stack.enter_context(job.start([one, two], BODY))
        while len(doors := [f"{address}:{port}" for address, port in one.listening() if port != 7777]) < 2:
            time.sleep(0.01)
        if aim == "job":
            stack.enter_context(attack(stranger, doors))
        if aim == "bare":
            stack.enter_context(attack(stranger, [f"{one.address}:7777"] * 2))
        for name in ("go", "measure"):
            for host in hosts:
                (host.files / name).touch()
            for rank in range(2):
                ranks.wait_for(rank)
        return statistics.mean(float(report["step_us"]) for report in ranks.results())


def main() -> int:
    if reason := bed.unfit():
        sys.exit(f"attacked: {reason}")
    found: dict[str, list[float]] = {"": [], "bare": [], "job": []}
    with contextlib.closing(bed.Bed(3, [bed.Network()], False, False, [])) as hosts:
        for _ in range(REPEATS):
            for aim, times in found.items():
                times.append(step_time(hosts, aim))
    names = {"": "no attack", "bare": "attack on a bare process", "job": "attack on the job"}
    for aim, times in found.items():
        spread = f"{min(times):.0f} to {max(times):.0f}"
        print(f"{names[aim]:<26}{statistics.median(times):8.0f} us a step ({spread}, {REPEATS} runs)")
    ratio = statistics.median(found["job"]) / statistics.median(found["bare"])
    print(f"the job against the bare process: {100 * (ratio - 1):+.1f} % (target: at most +5 %)")
    return 0 if ratio <= 1.05 else 1


if __name__ == "__main__":
    sys.exit(main())
