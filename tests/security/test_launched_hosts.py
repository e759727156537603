# Rows 32 and 35 across hosts: while a job started over ssh trains, the secret is visible nowhere, no process listens,
# and another user of a host has access to nothing. Touches the bed of tests/bed, and /proc of every process in it.
from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bed
import jobs
import pytest
from bed.launcher import ENVIRONMENT, SOURCE, launch
from local_ranks import listening
from waiting import in_time, until

from farandole.base.version import package_version
from farandole.launch import ssh
from farandole.launch.hosts import parse

pytestmark = [pytest.mark.security, pytest.mark.ranks]
TRAIN = """
import os, sys, numpy as np, farandole
farandole.init()
done = step = 0
while not done:  # one file on one host ends all ranks in the same step
    mine = np.array([os.path.exists("/run/host/end")], float)
    done = float(farandole.allreduce(mine, name="end", op=farandole.Sum)[0])
    step += 1
    if step == 20:
        sys.stdout.write(f"trains {farandole.size()}\\n")
        sys.stdout.flush()
farandole.shutdown()
"""
# Becomes another user and tries to read what belongs to every other process, and these folders; prints what it got.
SPY = """
import json, os, sys
me = os.getpid()
pids = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) not in (1, me)]
os.setgroups([]); os.setgid(65534); os.setuid(65534)
got = []
for pid in pids:
    for name in ("fd", "environ", "mem", "maps", "cwd"):
        try:
            path = f"/proc/{pid}/{name}"
            if name == "fd":
                for fd in os.listdir(path):
                    os.close(os.open(f"{path}/{fd}", os.O_RDONLY))
            elif name == "cwd":
                os.readlink(path)
            elif not open(path, "rb").read(1):
                continue
            got.append(path)
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            pass
for folder in sys.argv[1:]:
    try:
        got += os.listdir(folder)
    except PermissionError:
        pass
print(json.dumps({"tried": len(pids), "got": got}))
"""


@contextlib.contextmanager
def training(hosts: bed.Bed) -> Iterator[subprocess.Popen[str]]:
    """A job of four ranks on three hosts that trains until the gate is opened."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    words = launch(["host1", "host2", "host2", "host3"], TRAIN)
    with hosts[0].start(words, ENVIRONMENT, **pipes) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def secret_of(hosts: bed.Bed) -> bytes:
    """The job's secret, as root finds it in a rank's memory file."""
    for host in hosts:
        for pid in host.processes():
            with contextlib.suppress(OSError):
                for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    name, _, value = entry.partition(b"=")
                    if name == b"FARANDOLE_SECRET_FD":
                        return Path(f"/proc/{pid}/fd/{int(value)}").read_bytes()
    raise AssertionError("no rank holds the secret")


def forms(secret: bytes) -> list[bytes]:
    return [secret, secret.hex().encode(), base64.b64encode(secret)[:-1], base64.urlsafe_b64encode(secret)[:-1]]


def of_ours(host: bed.Host) -> list[Path]:
    """What a job has on a host's own file systems, by its name."""
    return [path for path in host.own_files() if path.name.startswith("farandole")]


def showing(hosts: bed.Bed, secret: bytes) -> list[str]:
    """Where the secret can be read: arguments and environments of all processes, all files."""
    found = []
    for host in hosts:
        for pid, command in host.processes().items():
            for name in ("cmdline", "environ"):
                with contextlib.suppress(OSError):
                    data = Path(f"/proc/{pid}/{name}").read_bytes()
                    found += [f"{host.name}: {name} of {command}" for form in forms(secret) if form in data]
        for path in host.own_files():
            if path.is_file():
                data = path.read_bytes()
                found += [f"{host.name}: {path}" for form in forms(secret) if form in data]
    return found


def test_rows_32_and_35_what_a_job_over_ssh_shows_to_others() -> None:
    with bed.hosts(3, ssh=True) as hosts, training(hosts) as launcher:
        assert launcher.stdout is not None
        printed = ""
        while printed.count("trains 4") < 4:
            line = launcher.stdout.readline()
            assert line, printed
            printed += line
        secret = secret_of(hosts)
        assert len(secret) == 32
        kinds = {command.split(" ")[0] for host in hosts for command in host.processes().values()}
        assert sum(len(host.processes()) for host in hosts) >= 4 + 1 + 3, kinds  # ranks, launcher, agents at least
        assert not showing(hosts, secret)
        leaky = ["sh", "-c", "echo ready; exec sleep 60"]
        with hosts[1].start(leaky, {"LEAK": secret.hex()}, stdout=subprocess.PIPE) as leak:
            assert leak.stdout is not None and leak.stdout.readline() == b"ready\n"
            seen = showing(hosts, secret)
            leak.kill()
        assert len(seen) == 1, "a leak would be seen"
        for host in hosts:
            assert host.listening() == [("0.0.0.0", 22)], "only sshd listens"
            folders = [str(path.relative_to(f"/proc/{host.pid}/root")) for path in of_ours(host) if path.is_dir()]
            spied = json.loads(host.run([sys.executable, "-c", SPY, *(f"/{folder}" for folder in folders)]).stdout)
            assert spied["tried"] >= 3 and spied["got"] == [], (host.name, spied)
            for path in of_ours(host):
                assert stat.S_IMODE(path.lstat().st_mode) & 0o077 == 0, path
        for host in hosts:
            (host.files / "end").touch()
        printed += launcher.stdout.read()
        assert launcher.wait(60) == 0, printed
        assert not any(form.decode("latin1") in printed for form in forms(secret))
        ended = time.monotonic()
        until(lambda: not any(host.processes() for host in hosts), what=lambda: [host.processes() for host in hosts])
        in_time(time.monotonic() - ended, 2.0, "the end of all processes of the job")
        assert [path for host in hosts for path in of_ours(host)] == []


HOSTILE = [
    "a b", "; touch /run/owned", "$(touch /run/owned)", "`touch /run/owned`", "'", '"', "\n", "\\", "*", "%h", "é",
    "-oProxyCommand=touch /run/owned", "&& touch /run/owned", "| touch /run/owned", "\udcff", "", "#", "~", "!!",
]  # fmt: skip
TELL = """
import json, os, sys
print("told " + json.dumps([sys.argv[1:], os.environ["EVIL"], os.environ.get("EMPTY"), os.getcwd()]))
"""


def test_row_32_hostile_arguments_arrive_unchanged_and_run_nothing() -> None:
    with bed.hosts(2, ssh=True) as hosts:
        odd, evil = "a b;$(touch owned)'\n", "".join(HOSTILE)
        for host in hosts:
            (host.files / odd).mkdir()
        variables = {**ENVIRONMENT, "EVIL": evil, "EMPTY": ""}
        output = hosts[0].run(launch(["host2"], TELL, *HOSTILE), variables, cwd=f"/run/host/{odd}").stdout
        assert json.loads(output.partition("told ")[2]) == [HOSTILE, evil, "", f"/run/host/{odd}"]
        for host in hosts:
            assert [path for path in host.own_files() if path.name == "owned"] == []
            assert not list(host.files.rglob("owned"))


def test_row_31_another_version_on_a_host_is_named_with_the_remedy() -> None:
    with bed.hosts(2, ssh=True) as hosts:
        versions = [package_version(), "9.9.9"]
        for host, version in zip(hosts, versions, strict=True):
            checkout = host.files / "checkout"
            skip = shutil.ignore_patterns("*.so")  # no rank is ever started
            shutil.copytree(Path(SOURCE, "farandole"), checkout / "src" / "farandole", ignore=skip)
            (checkout / "VERSION").write_text(version + "\n")
        began = time.monotonic()
        done = hosts[0].run(launch(["host2"], TELL), {"PYTHONPATH": "/run/host/checkout/src"}, check=False)
        assert done.returncode != 0 and "told" not in done.stdout
        assert all(word in done.stderr for word in (*versions, "host2")), done.stderr
        in_time(time.monotonic() - began, 10.0, "saying that a host has another version")
        assert not hosts[1].processes()


@pytest.mark.parametrize(
    "name",
    [
        "-oProxyCommand=x",
        "a b",
        "a;b",
        "$(x)",
        "`x`",
        "a\nb",
        "a\0b",
        "",
        "-",
        "@host",
        "a@-x",
        "x" * 300,
        "a/b",
        "a'b",
    ],
)
def test_row_32_what_is_no_host_name_never_reaches_ssh(name: str) -> None:
    with pytest.raises(ValueError, match="is not a host name"):
        ssh.SshOptions(sys.executable, SOURCE).command(name)


@pytest.mark.parametrize("slots", ["0", "-1", "1e9", "9" * 400, "000000001999999999", "4097", "²", "1;x"])
def test_row_32_slots_that_are_no_small_number_are_refused(slots: str) -> None:
    with pytest.raises(ValueError, match="is not a number of slots"):
        parse(f"a:{slots}")


def test_a_static_job_on_one_host_listens_nowhere_once_it_runs() -> None:
    body = """
hvd.init()
report(runs=True)
hvd.recv(np.zeros(1), 1 - rank)  # until the test kills it
"""
    with jobs.start(body, 2, hosts=["a", "b"]) as job:
        jobs.look_until(lambda: all(jobs.results(job, rank) for rank in range(2)), job)
        pids = [*job.pids, *(int(word) for pid in job.pids for word in parents(pid)), os.getpid()]
        until(lambda: not listening(pids) and not os.listdir(job.directory), what=lambda: listening(pids))


def parents(pid: int) -> list[str]:
    """The agent of a rank."""
    return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]]
