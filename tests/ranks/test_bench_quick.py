"""A quick run of the benchmark: every part runs with the other libraries, results are verified, the file is valid.
Starts real jobs; checks no speeds."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.tools.bench import hosts
from farandole.tools.bench.inside.library import OPERATIONS
from farandole.tools.bench.plan import PARTS

ROOT = Path(__file__).resolve().parents[2]


def bench(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """What a run wrote, and what it printed."""
    path = folder / "run.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "farandole.tools.bench", "--quick", "--json", str(path), *arguments]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout + done.stderr


def another_horovod(folder: Path) -> str:
    """An interpreter with a horovodrun in the same folder, as --peer-python needs it; both are Farandole's."""
    folder.mkdir()
    for name, arguments in {"python": "", "horovodrun": "-m farandole run"}.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        program.chmod(0o755)
    return str(folder / "python")


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(540)
def test_every_part_runs_and_is_verified(tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None:  # imported, it would leave files open here
        pytest.skip("needs the list `torch` of scripts/requirements")
    found, output = bench(tmp_path, "--peer-python", another_horovod(tmp_path / "bin"))
    rows = found["rows"]
    reason = hosts.missing_requirement()
    if reason:
        assert reason in output
    parts = [part for part in PARTS if part != "hosts" or not reason]
    assert list(dict.fromkeys(row["part"] for row in rows)) == parts
    assert {row["what"] for row in rows if row["part"] == "collectives"} == set(OPERATIONS)
    for row in rows:
        own_values = [name for name in row["values"] if name.startswith("farandole")]
        # A difference of two single measurements may be anything.
        sure = [name for name in own_values if "less" not in name]
        assert sure and all(row["values"][name] and min(row["values"][name]) >= 0 for name in sure), row
        if row["part"] in ("collectives", "crowd", "halves", "training", "hosts"):
            assert row["checked"] > 0, row
            assert "Gloo" in row["values"] or "DDP on Gloo" in row["values"], row
        if row["part"] == "collectives":
            assert {"farandole", "farandole (NumPy)", "other Horovod", "memcpy", "copy by all"} <= set(row["values"])
    facts = found["machine"]
    assert facts["cores"] >= 1 and facts["kernels"] and facts["versions"]["numpy"]
    assert "allreduce 1 KiB: >= 20 x Gloo" in output or "16 ranks" in output  # the table of targets
    assert not [line for line in output.splitlines() if "cannot be measured" in line and "mpi" not in line], output


@pytest.mark.ranks
def test_one_collective_by_its_name(tmp_path: Path) -> None:
    found, output = bench(tmp_path, "allreduce")
    assert {(row["part"], row["what"]) for row in found["rows"]} == {("collectives", "allreduce")}
    assert all(row["checked"] > 0 and "memcpy" in row["values"] for row in found["rows"])
    assert "memcpy" in output
