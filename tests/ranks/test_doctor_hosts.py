# `farandole doctor -H` between hosts: good hosts, slow networks, and hosts on which no job can run.
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
    with bed.hosts(2, ssh=True) as (one, two):
        two.shape("160mbit")
        done = doctor(one, "host1,host2")
        assert done.returncode == 0 and done.stdout.splitlines()[-1] == "fit: jobs can run here", done
        (rate,) = re.findall(r"ok    host1 - host2 +latency \d+ us \(median \d+\), (\d+) MB/s", done.stdout)
        assert int(rate) < 25, "8 MiB at 20 MB/s, less what a burst lets through at once"
        two.kill()
        done = doctor(one, "host1,host2,nowhere")
        assert done.returncode == 1 and done.stdout.splitlines()[-1] == "unfit: ssh host2, ssh nowhere", done
        assert "Connection refused" in done.stdout and "-> no ssh server listens there" in done.stdout
        assert "-> there is no such host" in done.stdout
        assert not one.processes() and not two.processes()
