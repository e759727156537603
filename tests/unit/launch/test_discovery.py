# Where the hosts of an elastic job come from: a list, a file, a script; the errors for wrong ones.
# Touches files and short programs.
"""Lines that are no hosts never reach ssh: the corpus of hostile names is in test_hosts.py."""

from __future__ import annotations

import shlex
import threading
from pathlib import Path

import pytest
from waiting import until

from farandole.launch.discovery import DiscoveryError, FixedHosts, Hostfile, Script, parse
from farandole.launch.hosts import Host


def script(folder: Path, body: str) -> str:
    path = folder / "hosts.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_a_script_prints_hosts_with_and_without_slots(tmp_path: Path) -> None:
    found = Script(script(tmp_path, "echo a:2; echo b; echo '# none'; echo"), 3).find()
    assert found == [Host("a", 2), Host("b", 3)]
    assert Script(script(tmp_path, "echo a"), None).find() == [Host("a", 1)]
    assert Script(script(tmp_path, "true"), 3).find() == []  # no host at this moment is an answer


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo oops >&2; exit 3", "exit code 3: oops"),
        ("exit 1", "exit code 1: it printed nothing"),
        ("echo -- -oProxyCommand=x", "line 1"),
        ("echo a:x", "not a number of slots"),
        ("kill -9 $$", "exit code 137"),
    ],
)
def test_a_script_that_fails_says_why(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(DiscoveryError, match=message):
        Script(script(tmp_path, body)).find()


def test_a_script_may_have_arguments_and_hosts_without_slots(tmp_path: Path) -> None:
    path = script(tmp_path, 'echo "$1:2"; echo gone:0')
    assert Script(f"{path} a | grep -v b").find() == [Host("a", 2)]
    spaced = tmp_path / "two words"
    spaced.mkdir()
    assert Script(script(spaced, "echo c:1")).find() == [Host("c", 1)]


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryError, match="No such file"):
        Script(str(tmp_path / "none")).find()


def test_a_script_that_hangs_ends_with_the_job(tmp_path: Path) -> None:
    hanging = Script(script(tmp_path, f"touch {shlex.quote(str(tmp_path))}/up; sleep 60"))
    failures: list[DiscoveryError] = []

    def find() -> None:
        try:
            hanging.find()
        except DiscoveryError as error:
            failures.append(error)

    thread = threading.Thread(target=find)
    thread.start()
    until(lambda: (tmp_path / "up").exists())
    hanging.close()
    thread.join(30)  # the script itself takes a minute
    assert not thread.is_alive() and failures


def test_a_hostfile_may_be_edited(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\n")
    hosts = Hostfile(str(path))
    assert hosts.find() == [Host("a", 2)] and not hosts.fixed
    path.write_text("a slots=2\nb slots=1\n")
    assert hosts.find() == [Host("a", 2), Host("b", 1)]
    path.write_text("a slots=x\n")
    with pytest.raises(DiscoveryError, match="line 1"):
        hosts.find()
    path.unlink()
    with pytest.raises(DiscoveryError, match="cannot read"):
        hosts.find()


def test_fixed_hosts_and_the_lines_of_a_file() -> None:
    assert FixedHosts([Host("a", 1)]).find() == [Host("a", 1)] and FixedHosts([]).fixed
    assert parse("a:2\n[::1]:3\n", "x", 9) == [Host("a", 2), Host("::1", 3)]
