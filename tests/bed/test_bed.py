# The bed itself: hosts are separate, reach each other as configured, and leave nothing, even if the test is killed.
# Touches only the bed.
from __future__ import annotations

import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import until

import bed

pytestmark = pytest.mark.ranks
NAP = "import time; print('ready', flush=True); time.sleep(60)"  # sleep: until it is killed


def test_hosts_have_names_files_and_processes_of_their_own_and_reach_each_other_by_ssh() -> None:
    with bed.hosts(3, ssh=True) as (one, two, three):
        names = [one.run(["ssh", other.name, "hostname"]).stdout.strip() for other in (one, two, three)]
        assert names == ["host1", "host2", "host3"]
        name = secrets.token_hex(8)  # no other process on this machine has this name
        for path in (f"/tmp/{name}", f"/dev/shm/{name}", f"{bed.HOME}/{name}"):
            one.run(["touch", path])
            assert not os.path.exists(path), "the machine does not see the file either"
            assert two.run(["test", "-e", path], check=False).returncode == 1
        assert len([path for path in one.own_files() if path.name == name]) == 3
        assert "inside.py" in one.run(["cat", "/proc/1/cmdline"]).stdout
        assert not one.processes() and not two.processes()


def test_a_home_can_be_shared_and_paths_can_be_shown(tmp_path: Path) -> None:
    (tmp_path / "greeting").write_text("hello")
    with bed.hosts(2, shared_home=True, visible=[tmp_path]) as (one, two):
        one.run(["sh", "-c", "echo here > ~/note"])
        assert two.run(["sh", "-c", f"cat ~/note {shlex.quote(str(tmp_path))}/greeting"]).stdout == "here\nhello"


def test_of_two_networks_only_one_connects() -> None:
    networks = [bed.Network("10.77.1", connects=False), bed.Network("10.77.2")]
    probe_hub = ["timeout", "1", "bash", "-c"]
    with bed.hosts(2, networks, ssh=True) as (one, two):
        assert one.addresses == ["10.77.1.1", "10.77.2.1"]
        assert one.run([*probe_hub, f": < /dev/tcp/{two.addresses[0]}/22"], check=False).returncode == 124
        one.run([*probe_hub, f": < /dev/tcp/{two.addresses[1]}/22"])
        assert one.run(["ssh", "host2", "hostname"]).stdout == "host2\n", (
            "host names have the addresses of the network that connects"
        )


def test_links_can_be_slow_cut_and_healed_and_bytes_are_counted() -> None:
    send = ["ssh", "host2", "head -c 2000000 /dev/zero"]
    with bed.hosts(3, ssh=True) as hosts:
        one, two, three = hosts
        two.shape("20mbit")
        before, began = (one.counters(), three.counters()), time.monotonic()
        one.run(send)
        assert time.monotonic() - began > 0.6, "16 Mbit at 20 Mbit/s, less a burst"
        moved = one.counters() - before[0]
        assert 2_000_000 < moved.received < 2_200_000 and moved.sent < 200_000, moved
        assert (three.counters() - before[1]).received < 1000
        two.unshape()
        ask = ["ssh", "-o", "ConnectTimeout=1", "host2", "hostname"]
        hosts.partition([one])
        assert "timed out" in one.run(ask, check=False).stderr
        three.run(ask)
        hosts.heal()
        one.run(ask)
        two.link(up=False)
        assert one.run(ask, check=False).returncode == 255
        two.link(up=True)
        one.run(ask)


def test_signals_and_exit_codes_pass_and_a_killed_host_can_be_used_again() -> None:
    with bed.hosts(2) as (one, two):
        assert one.run([sys.executable, "-c", "raise SystemExit(7)"], check=False).returncode == 7
        assert one.run(["no-such-program"], check=False).returncode == 127
        for number in (signal.SIGTERM, signal.SIGKILL):
            with one.start([sys.executable, "-c", NAP], stdout=subprocess.PIPE) as process:
                assert process.stdout is not None and process.stdout.readline() == b"ready\n"
                process.send_signal(number)
                assert process.wait(60) == -number
        with two.start(["sh", "-c", "setsid sleep 60 & echo ready; sleep 60"], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            assert len(two.processes()) >= 2
            two.kill()
            assert process.wait(60) == -signal.SIGKILL
        assert two.run(["hostname"]).stdout == "host2\n"


def test_a_killed_test_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that made the bed gets SIGKILL: hosts, their commands and the switch end; files go next time."""
    code = f"""
import sys, time
sys.path[:0] = {[str(bed.HERE.parent), str(bed.HERE.parent / "ranks")]!r}
import bed, pathlib
bed.PLACE = pathlib.Path({str(tmp_path)!r}) / "beds"  # other runs on this machine remove what dead ones left, too
with bed.hosts(2, ssh=True) as hosts:
    command = hosts[0].start(["sh", "-c", "setsid sleep 60 & echo ready; sleep 60"], stdout=-1)
    assert command.stdout.readline() == b"ready\\n"
    print(hosts.files.name, hosts.switch, *(host.pid for host in hosts), flush=True)
    time.sleep(60)  # sleep: until it is killed
"""
    if reason := bed.missing_requirement(ssh=True):
        pytest.skip(reason)
    monkeypatch.setattr(bed, "PLACE", tmp_path / "beds")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        name, *pids = maker.stdout.readline().split()
        spaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
        assert len(spaces) == 3 and in_networks(spaces)
        maker.kill()
    until(lambda: not in_networks(spaces), 10.0, lambda: in_networks(spaces))
    assert (bed.PLACE / name).exists()
    assert name in bed.sweep()
    assert not (bed.PLACE / name).exists()


def in_networks(spaces: set[str]) -> list[str]:
    """The processes that live in one of these networks."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{entry}/ns/net") in spaces:
                found.append(Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found
