# A real SLURM over the hosts of a bed: munge and slurmd on each, slurmctld on the first. All of it ends with the bed.
# Touches processes inside the bed's hosts, and files of the bed.
"""`with slurm.cluster(hosts) as run: run(["-N", "2", "-n", "2", "hostname"])` is srun on the first host."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import bed
from waiting import until

PROGRAMS = {"srun": "slurm-client", "slurmctld": "slurmctld", "slurmd": "slurmd", "munged": "munge"}
ENVIRONMENT = {"SLURM_CONF": "/run/host/slurm.conf"}
CONFIGURATION = """
ClusterName=bed
SlurmctldHost=host1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge.socket
StateSaveLocation=/run/slurm-state
SlurmdSpoolDir=/run/slurm-spool
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
PartitionName=main Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:8
"""


def missing_requirement() -> str:
    """Why SLURM cannot run here, or nothing."""
    missing = sorted({package for name, package in PROGRAMS.items() if shutil.which(name, path=bed.PATH) is None})
    return f"needs the packages {', '.join(missing)}" if missing else ""


Run = Callable[..., subprocess.CompletedProcess[str]]


@contextlib.contextmanager
def cluster(hosts: bed.Bed) -> Iterator[Run]:
    """Starts the daemons and waits until every node is idle."""
    started: list[subprocess.Popen[bytes]] = []
    lines = [f"NodeName={host.name} CPUs=4 State=UNKNOWN" for host in hosts]
    first = hosts[0]

    def daemon(host: bed.Host, *command: str) -> None:
        with open(host.files / f"{command[0]}.log", "wb") as log:
            started.append(host.start(command, ENVIRONMENT, stdout=log, stderr=log))

    def srun(
        arguments: Sequence[str | Path], timeout: float = 60.0, check: bool = True, **more: str
    ) -> subprocess.CompletedProcess[str]:
        return first.run(["srun", *map(str, arguments)], {**ENVIRONMENT, **more}, bed.ROOT, timeout, check)

    key = os.urandom(1024)
    try:
        for host in hosts:
            (host.files / "slurm.conf").write_text("\n".join([CONFIGURATION.strip(), *lines, ""]))
            (host.files / "munge.key").write_bytes(key)
            (host.files / "munge.key").chmod(0o400)
            words = ["--key-file=/run/host/munge.key", "--socket=/run/munge.socket", "--pid-file=/run/munge.pid"]
            daemon(host, "munged", "-F", "--force", *words, "--seed-file=/run/munge.seed", "--log-file=/run/munge.log")
        host_ready(hosts, lambda host: host.run(["test", "-S", "/run/munge.socket"], check=False).returncode == 0)
        first.run(["mkdir", "-p", "/run/slurm-state"])
        daemon(first, "slurmctld", "-D", "-c")
        for host in hosts:
            daemon(host, "slurmd", "-D", "-N", host.name)
        host_ready(
            hosts, lambda host: "idle" in first.run(["sinfo", "-h", "-n", host.name], ENVIRONMENT, check=False).stdout
        )
        yield srun
    finally:
        for process in reversed(started):
            process.kill()
            process.wait()


def host_ready(hosts: bed.Bed, ready: Callable[[bed.Host], bool]) -> None:
    """Looks at every host until it is so."""

    def logs() -> str:
        return "\n".join(path.read_text() for host in hosts for path in host.files.glob("*.log"))

    for host in hosts:
        until(lambda host=host: ready(host), 60.0, logs, every=0.05)  # type: ignore[misc]
