# `farandole doctor` and `farandole env` on this host: without and with problems, as far as a test can cause them.
# Touches processes, limits, control groups, a false Horovod in a temporary directory.
from __future__ import annotations

import os
import platform
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.base import tested
from farandole.base.version import package_version
from farandole.engine import library
from farandole.tools import checks, doctor, env

ROOT = Path(__file__).resolve().parents[2]
DESCRIPTORS_OF = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)); "


def tool(*arguments: str, before: str = "", path: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `farandole WORDS`, after some code in the same process."""
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep if path else ''}{ROOT / 'src'}", **variables}
    code = f"{before}import sys; from farandole.launch.cli import main; sys.exit(main({list(arguments)}))"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


def test_doctor_finds_no_problem_on_this_host_and_measures_it() -> None:
    done = tool("doctor")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == "fit: jobs can run here", done
    assert all(line.startswith(("ok ", "note ", " ")) for line in lines[:-1]), lines
    named = {line[6:26].strip() for line in lines if line.startswith(("ok", "note"))}
    assert {*checks.CHECKS, "two ranks", "between them"} - {"compiler", "nccl"} <= named, named
    assert "latency" in lines[-2] and "MB/s" in lines[-2]


def test_another_installed_horovod_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("")
    info = tmp_path / "horovod-0.28.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    (info / "RECORD").write_text("horovod/__init__.py,,\n")
    done = tool("doctor", path=str(tmp_path))
    assert done.returncode == 1 and done.stdout.splitlines()[-1] == "unfit: horovod", done
    assert "Horovod 0.28.1 is installed as well" in done.stdout
    assert "-> `python -m pip uninstall horovod" in done.stdout
    assert "two ranks" not in done.stdout, "no job is started on an unfit host"


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("99.1.0", f"torch 99.1.0 is newer than {tested.TESTED['torch']}, the newest release"),
        ("2.1.0", f"farandole works with torch {tested.OLDEST['torch']} or newer"),
    ],
)
def test_a_framework_newer_or_older_than_tested_is_noted(version: str, why: str, tmp_path: Path) -> None:
    info = tmp_path / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    done = tool("doctor", path=str(tmp_path))
    assert done.returncode == 0, done
    assert f"note  frameworks          torch {version}" in done.stdout, done.stdout
    assert f"-> {why}" in done.stdout, done.stdout


def test_few_descriptors_are_noted_with_the_remedy() -> None:
    done = tool("doctor", before=DESCRIPTORS_OF)
    assert done.returncode == 0, done
    assert "note  descriptors         200 file descriptors" in done.stdout and "`ulimit -n 4096`" in done.stdout


def test_a_missing_library_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "libfarandole.so")
    library.load.cache_clear()
    with pytest.raises(checks.Problem, match="does not exist") as problem:
        checks.native_library()
    assert "pip install" in problem.value.remedy and not problem.value.note
    library.load.cache_clear()


def test_a_check_that_raises_is_a_finding_and_the_others_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> str:
        raise KeyError("surprise")

    monkeypatch.setattr(checks, "CHECKS", {"first": breaks, "second": lambda: "well"})
    first, second = checks.this_host()
    assert first.state == checks.UNFIT and "KeyError" in first.found and second.state == checks.OK


def test_a_quota_below_the_cores_is_seen() -> None:
    group = Path("/sys/fs/cgroup/cpu") / f"farandole-test-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group of version 1 can be made here: {error}")
    try:
        (group / "cpu.cfs_quota_us").write_text("50000")
        move = f"import os, pathlib; pathlib.Path('{group}/cgroup.procs').write_text(str(os.getpid())); "
        done = tool("env", before=move)
        assert ", quota 0.5" in done.stdout, done
    finally:
        group.rmdir()


def test_different_versions_and_clocks_are_named() -> None:
    abouts = [{"host": "a", "farandole": "1", "torch": "2.1"}, {"host": "b", "farandole": "2"}]
    states = {check.name: (check.state, check.found) for check in doctor.compare(abouts)}
    assert states == {"farandole": (checks.UNFIT, "a: 1, b: 2"), "torch": (checks.NOTE, "a: 2.1, b: none")}
    late = {"pair": [0, 1], "latency_us": 10.0, "typical_us": 12.0, "rate": 1e9, "clock_ms": 5000.0}
    assert [check.state for check in doctor.judge_link(late, ["a", "b"])] == [checks.OK, checks.NOTE]


def test_malformed_sections_are_refused() -> None:
    done = tool("doctor", "-H", "good,-oProxyCommand=x")
    assert done.returncode == 2 and "is not a host name" in done.stderr and not done.stdout


def test_env_is_a_block_without_secrets_names_or_addresses() -> None:
    inherited = {
        "FARANDOLE_SECRET_FD": "987654",
        "FARANDOLE_RENDEZVOUS": "tcp:10.9.8.7:1",
        "FARANDOLE_CYCLE_TIME": "2.5",
    }
    done = tool("env", **inherited, TOKEN="hush", FARANDOLE_SECRET_FILE="/hush")
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    assert lines[0] == lines[-1] == "```"
    assert f"farandole:      {package_version()} in " in done.stdout
    assert "settings:       FARANDOLE_CYCLE_TIME=2.5" in lines
    for hidden in ("hush", "10.9.8.7", "987654", platform.node(), "TOKEN"):
        assert hidden not in done.stdout.replace(str(ROOT), ""), hidden


def test_paths_lose_the_name_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/jane")
    assert env.tilde("/home/jane/x and /home/jane/y") == "~/x and ~/y"
