# Tests that failed on a busy machine run once more, alone: in which runs this happens, and what is printed.
# Starts pytest with tests/conftest.py on small tests that this file writes.
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import alone
import pytest

CONFTEST = Path(alone.__file__).with_name("conftest.py")
TESTS = """
import pathlib, sys
import pytest, waiting

@pytest.mark.parametrize("number", range({count}))
def test_it(number):
    waiting.BUSY, waiting.STOLEN = ({busy}, 1e9)
    tries = pathlib.Path({place!r}, f"tries{{number}}")
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    assert number >= {failing} or len(tries.read_text()) > {bad}

def test_another():
    pass
"""


def tried(folder: Path, workers: list[str], count: int = 2, failing: int = 1, bad: int = 1, busy: float = -1.0) -> str:
    """The output of such a run, after its exit code. Of `count` tests, `failing` fail the first `bad` times."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    ours = f"import runpy\nours = runpy.run_path({str(CONFTEST)!r})\n"
    ours += "globals().update({name: one for name, one in ours.items() if not name.startswith('__')})\n"
    (folder / "conftest.py").write_text(ours)
    text = TESTS.format(count=count, failing=failing, bad=bad, busy=busy, place=str(folder))
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--alone", *workers, str(folder)]
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    return f"{done.returncode}\n{done.stdout}{done.stderr}"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("workers", [[], ["-n", "2", "--dist", "loadgroup"]], ids=["one process", "workers"])
def test_a_test_that_passes_alone_counts_as_passed(tmp_path: Path, workers: list[str]) -> None:
    output = tried(tmp_path, workers)
    assert output.startswith("0\n"), output
    assert "failed on a busy machine and passed alone: 1: test_it.py::test_it[0]" in output, output
    assert "test_it.py::test_it[0]: 0." in output and "went to others" in output, output
    assert [(tmp_path / f"tries{number}").read_text() for number in range(2)] == ["xx", "x"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("run", "tries"),
    [({"bad": 9}, "xx"), ({"busy": 1e9}, "x"), ({"count": alone.MOST + 1, "failing": alone.MOST + 1}, "x")],
    ids=["fails again", "nobody else had the processors", "too many"],
)
def test_a_failed_engine_stays_failed(tmp_path: Path, run: dict[str, float], tries: str) -> None:
    output = tried(tmp_path, [], **run)  # type: ignore[arg-type]
    assert output.startswith("1\n") and "passed alone" not in output, output
    assert (tmp_path / "tries0").read_text() == tries
