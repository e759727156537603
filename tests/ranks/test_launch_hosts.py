# horovodrun over ssh: ranks on several hosts, networks that connect them or not, hosts that lack something, kills.
# Touches the bed of tests/bed.
"""The bed's first host runs the launcher, as a user would; see tests/bed/README.md."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bed
import pytest
from elastic import CHILDREN
from waiting import in_time, until

from farandole.launch import spawn

pytestmark = pytest.mark.ranks
SOURCE = str(bed.ROOT / "src")
ENVIRONMENT = {"PYTHONPATH": SOURCE, "MINE": "a b;c'\"\n"}
RUN = [sys.executable, "-m", "farandole", "run"]
SUM = """
import json, os, socket, numpy as np, farandole as hvd
hvd.init()
total = hvd.allreduce(np.full(1000, hvd.rank() + 1.0), op=hvd.Sum, name="x")
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "HOME", "MINE", "PYTHONUNBUFFERED")
print("said " + json.dumps([socket.gethostname(), hvd.rank(), hvd.local_rank(), hvd.cross_rank(), hvd.cross_size(),
                            float(total[0]), os.getcwd(), {name: os.environ.get(name) for name in names}]))
hvd.shutdown()
"""
WITH_CHILDREN = f"""
{CHILDREN}
fork_children()
print("up", flush=True)
time.sleep(120)  # sleep: until it is killed
"""
MOMENTS = 6 * int(os.environ.get("CHAOS_N", "1"))


def reports(text: str) -> list[list[object]]:
    return sorted(
        (json.loads(line.partition("said ")[2]) for line in text.splitlines() if "said " in line),
        key=lambda one: one[1],
    )


def seconds_until_job_ended(hosts: bed.Bed, seconds: float = 2.0) -> float:
    """The time until no host has a process or a file of the job."""

    def left() -> list[object]:
        files = [path for host in hosts for path in host.own_files() if path.name.startswith("farandole-")]
        return [*((host.name, found) for host in hosts if (found := host.processes())), *files]

    began = time.monotonic()
    until(lambda: not left(), what=left)
    took = time.monotonic() - began
    in_time(took, seconds, "the end of all that belongs to the job")
    return took


def test_ranks_on_three_hosts_have_their_numbers_and_nothing_is_left() -> None:
    with bed.hosts(3, ssh=True) as hosts:
        command = [*RUN, "-np", "5", "-H", "host1:2,host2:1,host3:4", sys.executable, "-c", SUM]
        done = hosts[0].run(command, ENVIRONMENT, cwd="/usr")
        found = reports(done.stdout)
        places = [
            ("host1", 0, 0, 0, 3),
            ("host1", 1, 1, 0, 2),
            ("host2", 2, 0, 1, 3),
            ("host3", 3, 0, 2, 3),
            ("host3", 4, 1, 1, 2),
        ]
        assert [tuple(one[:5]) for one in found] == places
        assert all(one[5:7] == [15.0, "/usr"] for one in found)
        variables = found[3][7]
        assert isinstance(variables, dict) and variables["MINE"] == ENVIRONMENT["MINE"]
        assert (variables["RANK"], variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"]) == ("3", "0", "2")
        assert (variables["MASTER_ADDR"], variables["HOME"]) == (hosts[0].address, bed.HOME)
        seconds_until_job_ended(hosts)


def test_functions_run_on_hosts_and_their_results_are_returned() -> None:
    code = (
        "import farandole, socket\n"
        "def work(data):\n"
        "    farandole.init()\n"
        "    return socket.gethostname(), farandole.rank(), len(data)\n"
        "print(farandole.run(work, (bytes(5 << 20),), hosts='host1:1,host2:2', np=3))\n"
    )
    with bed.hosts(2, ssh=True) as hosts:
        done = hosts[0].run([sys.executable, "-c", code], ENVIRONMENT)
        size = 5 << 20
        assert done.stdout == f"[('host1', 0, {size}), ('host2', 1, {size}), ('host2', 2, {size})]\n"
        seconds_until_job_ended(hosts)


@pytest.mark.parametrize("dead", [0, 1])
def test_of_two_networks_the_one_that_connects_is_found(dead: int) -> None:
    """Docker's bridge is the third: all hosts have the same address on it."""
    pair = [bed.Network("10.77.1", connects=dead == 1), bed.Network("10.77.2", connects=dead == 0)]
    bridge = bed.Network("172.17.0", connects=False, same_address=True)
    with bed.hosts(3, [bridge, *pair], ssh=True) as hosts:
        live = 2 - dead
        before = [host.counters(live) for host in hosts]
        done = hosts[0].run([*RUN, "-np", "3", "-H", "host1,host2,host3", sys.executable, "-c", SUM], ENVIRONMENT)
        found = reports(done.stdout)
        assert [one[5] for one in found] == [6.0] * 3
        assert all(dict(one[7])["MASTER_ADDR"] == hosts[0].addresses[live] for one in found)  # type: ignore[call-overload]
        assert all((host.counters(live) - old).sent > 8000 for host, old in zip(hosts, before, strict=True))
        seconds_until_job_ended(hosts)
        wrong = ["--network-interfaces", f"eth{1 + dead}", "--start-timeout", "15"]
        done = hosts[0].run([*RUN, "-np", "2", *wrong, "-H", "host1,host2", "true"], ENVIRONMENT, check=False)
        assert done.returncode != 0 and "cannot reach the launcher" in done.stderr, done.stderr
        done = hosts[0].run(
            [*RUN, "-np", "2", "--network-interfaces", "eth9", "-H", "host2:2", "true"], ENVIRONMENT, check=False
        )
        assert done.returncode != 0 and "no interface eth9" in done.stderr and "eth1" in done.stderr, done.stderr
        seconds_until_job_ended(hosts)


def test_hosts_with_a_problem_are_named_with_a_remedy() -> None:
    with bed.hosts(2, ssh=True) as hosts:
        old = hosts[1].files / "old"
        old.write_text("#!/bin/sh\necho 'farandole needs Python 3.11 or newer, this is 3.6' >&2\nexit 1\n")
        old.chmod(0o755)
        cases = [
            (["-H", "nowhere.example:2"], "Could not resolve", "check the name"),
            (["-H", "host2:2", "-p", "2222"], "Connection refused", "--ssh-port"),
            (["-H", "10.77.1.99:2", "--start-timeout", "4"], "cannot start ranks on 10.77.1.99", ""),
            (["-H", "host2:2", "--remote-python", "/no/python"], "host2", "--remote-python"),
            (["-H", "host2:2", "--remote-python", "/run/host/old"], "needs Python 3.11", "--remote-python"),
            (["-H", "host2:2"], "no-such-program", "on host2"),
        ]
        for command, said, remedy in cases:
            began = time.monotonic()
            done = hosts[0].run([*RUN, "-np", "2", *command, "no-such-program"], ENVIRONMENT, check=False)
            assert done.returncode != 0 and said in done.stderr and remedy in done.stderr, (command, done.stderr)
            assert "Traceback" not in done.stderr
            in_time(time.monotonic() - began, 12.0, f"saying what is wrong with {command}")
            seconds_until_job_ended(hosts)
        (hosts[1].files / "authorized_keys").write_text("")
        done = hosts[0].run([*RUN, "-np", "2", "-H", "host2:2", "true"], ENVIRONMENT, check=False)
        assert done.returncode != 0 and "Permission denied" in done.stderr and "ssh-copy-id" in done.stderr
        home = Path(f"/proc/{hosts[0].pid}", "root", bed.HOME.lstrip("/"), ".ssh", "known_hosts")
        home.write_text("")
        done = hosts[0].run([*RUN, "-np", "2", "-H", "host2:2", "true"], ENVIRONMENT, check=False)
        assert done.returncode != 0 and "--ssh-accept-new" in done.stderr, done.stderr
        seconds_until_job_ended(hosts)


def test_a_host_that_answers_after_the_timeout() -> None:
    with bed.hosts(2, ssh=True) as hosts:
        slow = "#!/bin/sh\nsleep 30\n"
        program = hosts[1].files / "slow"
        program.write_text(slow)
        program.chmod(0o755)
        command = ["--start-timeout", "2", "-H", "host2:2", "--remote-python", "/run/host/slow", "true"]
        began = time.monotonic()
        done = hosts[0].run([*RUN, "-np", "2", *command], ENVIRONMENT, check=False)
        assert done.returncode != 0 and "did not answer in time" in done.stderr and "--start-timeout" in done.stderr
        in_time(time.monotonic() - began, 10.0, "a start with a timeout of 2 s")
        hosts[1].kill()  # the slow program itself is the host's: it never became an agent


SAYS_WHY = """
import os, sys, time
import farandole, numpy
farandole.init()
farandole.allreduce(numpy.ones(4), name="all are here")
print("up", flush=True)
try:
    while True:
        farandole.allreduce(numpy.ones(4), name="for ever")
except farandole.PeerLost as error:
    for line in range(20):
        time.sleep(0.01)  # sleep: a long traceback takes its time
        print("line", line, type(error).__name__, flush=True)
os._exit(3)
"""


def test_when_an_agent_is_lost_ranks_of_other_hosts_have_time_to_report_their_error() -> None:
    with bed.hosts(2, ssh=True) as hosts:
        command = [*RUN, "-np", "3", "--survivor-grace-seconds", "50", "-H", "host1:1,host2:2"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with hosts[0].start([*command, sys.executable, "-c", SAYS_WHY], ENVIRONMENT, **pipes) as launcher:
            try:
                assert launcher.stdout is not None
                assert all("up" in launcher.stdout.readline() for _ in range(3))
                [agent] = victims(hosts, "agent")
                os.kill(agent, signal.SIGKILL)
                output, complained = launcher.communicate(timeout=40)
            finally:
                launcher.kill()
        assert launcher.returncode == 1, complained
        assert [line.partition("line ")[2] for line in output.splitlines()] == [f"{one} PeerLost" for one in range(20)]
        assert "the agent on host2 was lost, and its ranks 1, 2 with it" in complained
        assert "failed first" not in complained
        seconds_until_job_ended(hosts)


def victims(hosts: bed.Bed, who: str) -> list[int]:
    found = {pid: (host.name, command) for host in hosts for pid, command in host.processes().items()}
    names = {}
    for pid in found:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
    if who == "launcher":
        return [pid for pid, (_, command) in found.items() if "-m farandole run" in command]
    if who == "ssh":
        return [pid for pid, name in names.items() if name == "ssh"]
    if who == "rank":
        agents = [pid for pid, name in names.items() if name == "farandole-agent"]
        return [pid for agent in agents for pid in spawn.children(agent)]
    return [pid for pid, name in names.items() if name == f"farandole-{who}" and found[pid][0] != "host1"]


@pytest.mark.parametrize("who", ["launcher", "guard", "agent", "ssh", "rank"])
def test_rows_21_22_whoever_is_killed_nothing_is_left_on_any_host(who: str) -> None:
    seed = os.environ.get("CHAOS_SEED") or str(secrets.randbits(32))
    print(f"CHAOS_SEED={seed} draws the same moments")
    draw = random.Random(seed)
    worst = 0.0
    with bed.hosts(2, ssh=True) as hosts:
        for turn in range(MOMENTS):
            command = [*RUN, "-np", "3", "-H", "host1:1,host2:2", sys.executable, "-c", WITH_CHILDREN]
            pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
            with hosts[0].start(command, ENVIRONMENT, **pipe) as launcher:
                try:
                    assert launcher.stdout is not None
                    if turn == 0:
                        assert all(launcher.stdout.readline() for _ in range(3))
                    else:
                        time.sleep(draw.uniform(0.0, 1.0))  # sleep: the fault comes at any moment
                    found = until(lambda: victims(hosts, who), 60.0, f"no {who}", lambda: launcher.poll() is None)
                    os.kill(draw.choice(found), signal.SIGKILL)
                    worst = max(worst, seconds_until_job_ended(hosts))
                    assert launcher.wait(60) != 0
                finally:
                    launcher.kill()
    print(f"{who}: {MOMENTS} moments over ssh, all gone after at most {worst:.2f} s")
