# `farandole doctor -H` between hosts: fit, slow, and unfit ones.
# Touches the bed of tests/bed.
from __future__ import annotations

import re
import subprocess
import sys

import bed
import pytest

pytestmark = pytest.mark.ranks


def doctor(host: bed.Host, hosts: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "farandole", "doctor", "-H", hosts]
    return host.run(command, {"PYTHONPATH": str(bed.ROOT / "src")}, timeout=100, check=False)


def test_doctor_measures_between_hosts_and_says_what_is_wrong_with_one() -> None:
    with bed.hosts(3, ssh=True) as (one, two, three):
        two.shape("160mbit")
        done = doctor(one, "host1,host2,host3")
        assert done.returncode == 0 and done.stdout.splitlines()[-1] == "fit", done
        pairs = dict(re.findall(r"ok    (host\d - host\d) +latency \d+ us \(median \d+\), (\d+) MB/s", done.stdout))
        assert pairs.keys() == {"host1 - host2", "host1 - host3", "host2 - host3"}, done
        # 8 MiB at 20 MB/s, less what a burst lets through at once.
        assert int(pairs["host1 - host2"]) < 25 and int(pairs["host2 - host3"]) < 25, pairs
        three.kill()
        done = doctor(one, "host1,host2,host3,nowhere")
        assert done.returncode == 1 and done.stdout.splitlines()[-1] == "unfit: ssh host3, ssh nowhere", done
        assert "Connection refused" in done.stdout and "-> no ssh server listens there" in done.stdout
        assert "-> there is no such host" in done.stdout
        for host in (one, two, three):
            assert not host.processes()
