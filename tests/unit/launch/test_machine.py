# What a host allows its ranks: a real quota of a control group, and a launcher that has no descriptors left.
# Touches a control group of its own (root), and this process's limit of descriptors.
from __future__ import annotations

import contextlib
import os
import resource
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.launch import machine, ssh
from farandole.launch.agent_connection import AgentConnection, StartError, package_place
from farandole.rendezvous.flow import Loop
from farandole.rendezvous.secret import Secret

V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


@contextlib.contextmanager
def control_group(period: str, share: str) -> Iterator[Path]:
    first = (V1 / "cpu.cfs_quota_us").exists()
    group = (V1 if first else V2) / f"farandole-test-{secrets.token_hex(4)}"
    try:
        group.mkdir()
        if first:
            (group / "cpu.cfs_period_us").write_text(period)
            (group / "cpu.cfs_quota_us").write_text(share)
        else:
            (group / "cpu.max").write_text(f"{share} {period}")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group with a quota of processor time can be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def test_a_quota_counts_as_cores() -> None:
    assert machine.usable_cores() >= 1
    code = "import os; from farandole.launch import machine; print(machine.usable_cores(), machine.quota())"
    with control_group("100000", "50000") as group:
        done = subprocess.run(
            ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$0" -c "$1"', sys.executable, code],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": package_place()},
            timeout=60,
        )
    assert done.stdout.split() == ["1", "0.5"], done.stderr


def test_a_launcher_without_descriptors_says_so() -> None:
    """It is the end of one attempt, not of the job."""
    loop, secret = Loop(), Secret.create()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
    try:
        with pytest.raises(StartError, match="Too many open files"):
            AgentConnection(
                loop, "", ssh.SshOptions(sys.executable, package_place()), secret, lambda *_: None, lambda *_: None
            )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        loop.close()
