# `--mpi` and `--jsrun`: the command lines, and a real job through each mpirun that is here.
# Touches processes.
from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.launch import foreign
from farandole.launch.hosts import Host

ENVIRON = {"PATH": "/bin", "HOME": "/home/me", "MINE": "1", "FARANDOLE_RANK": "3", "HOROVOD_CYCLE_TIME": "2"}
SUM = "import farandole as f, numpy as n; f.init(); print('sum', f.allreduce(n.ones(1), op=f.Sum)[0])"


def test_open_mpi() -> None:
    hosts = [Host("a", 2), Host("b", 2)]
    words = foreign.mpirun("openmpi", 4, hosts, ["x", "y z"], ENVIRON, ["eth0"], "-q", "", (22, "k"), root=True)
    text = " ".join(words)
    assert text.startswith("mpirun --allow-run-as-root --tag-output -np 4 -H a:2,b:2 -bind-to none -map-by slot")
    assert "-mca btl_tcp_if_include eth0 -mca plm_rsh_args -p 22 -i k" in text
    assert "-x PATH -x MINE -x HOROVOD_CYCLE_TIME -q x y z" in text and "HOME" not in text and "RANK" not in text
    many = foreign.mpirun("openmpi", 64, [Host(f"h{n}", 1) for n in range(64)], ["x"], {})
    assert "plm_rsh_num_concurrent" in many


def test_mpich_and_unknown_versions_of_mpirun() -> None:
    words = foreign.mpirun("mpich", 2, [Host("a", 2)], ["x"], ENVIRON, binding="-bind-to core")
    assert words == [
        "mpirun",
        "-np",
        "2",
        "-hosts",
        "a:2",
        "-genvlist",
        "PATH,MINE,HOROVOD_CYCLE_TIME",
        "-bind-to",
        "core",
        "x",
    ]
    with pytest.raises(ValueError, match="--gloo"):
        foreign.mpirun("", 2, [], ["x"], {})
    assert foreign.flavour("HYDRA build details: Version: 4.0.2") == "mpich"
    assert foreign.flavour("IBM Spectrum MPI 10") == "spectrum" and foreign.flavour("what?") == ""


def test_jsrun() -> None:
    assert foreign.jsrun(4, [], ["x"], "-q") == ["jsrun", "-n", "4", "-a", "1", "-q", "x"]
    with pytest.raises(ValueError, match="LSF"):
        foreign.jsrun(4, [Host("a", 4)], ["x"])


@pytest.mark.ranks
@pytest.mark.parametrize("flavour", ["openmpi", "mpich"])
def test_a_job_through_mpirun(flavour: str, tmp_path: Path) -> None:
    real = shutil.which(f"mpirun.{flavour}")
    if real is None:
        pytest.skip(f"there is no mpirun.{flavour} on this machine")
    wrapper = tmp_path / "mpirun"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(real)} "$@"\n')
    wrapper.chmod(0o755)
    source = str(Path(foreign.__file__).parents[2])
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": source, "TMPDIR": str(tmp_path)}
    extra = ["--mpi-args=--oversubscribe"] if flavour == "openmpi" else []
    command = [sys.executable, "-m", "farandole", "run", "-np", "2", "--mpi", *extra, sys.executable, "-c", SUM]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.count("2.0") == 2, done.stdout + done.stderr
