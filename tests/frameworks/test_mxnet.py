# MXNet in its own environment: the battery, cases only for MXNet, a killed rank, the example, the code in the docs.
# Touches farandole.launch and the programs in this folder.
"""MXNet needs an old NumPy, so its ranks run in the environment build/mxnet, which `make test` creates."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jobs
import pytest
from battery.run import check_all, check_case

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = ROOT / "build" / "mxnet" / "bin" / "python"
ENVIRONMENT = {"PYTHONPATH": f"{jobs.SOURCE}:{HERE}", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
JOB_S = 280.0
CASES = re.findall(r"^@case\ndef (\w+)", (HERE / "mxnet_cases.py").read_text(), flags=re.M)
# What horovod.mxnet has.
HOROVOD_NAMES = """allreduce allreduce_ grouped_allreduce grouped_allreduce_ allgather grouped_allgather broadcast
    broadcast_ alltoall reducescatter grouped_reducescatter DistributedOptimizer DistributedTrainer
    broadcast_parameters broadcast_object allgather_object Compression join barrier init shutdown is_initialized
    start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank is_homogeneous
    mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built ddl_built ccl_built cuda_built
    rocm_built nccl_built Average Sum Adasum Min Max Product ProcessSet global_process_set add_process_set
    remove_process_set"""


@functools.cache
def unusable() -> str:
    """Why MXNet cannot be used here; "" if it can."""
    if not PYTHON.exists():
        return "no build/mxnet: scripts/environment.py mxnet makes it, with Python 3.11 and older"
    done = subprocess.run([PYTHON, "-c", "import mxnet"], capture_output=True, text=True, timeout=120)
    return "" if done.returncode == 0 else f"MXNet cannot be imported: {done.stderr.strip().splitlines()[-1]}"


pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300), pytest.mark.skipif(bool(unusable()), reason=unusable())]


def start(program: str, ranks: int, *arguments: str) -> Any:
    # MXNet imports names that NumPy and SciPy have moved, which causes warnings.
    command = [str(PYTHON), "-W", "ignore", str(HERE / program), *arguments]
    return jobs.local.start(command, ranks, None, ENVIRONMENT, stop_on_failure=False)


def results(program: str, ranks: int, *arguments: str) -> dict[str, list[str]]:
    """For each case, one text per rank: what was wrong, or ""."""
    found: dict[str, list[str]] = {}
    with start(program, ranks, *arguments) as job:
        code = job.wait(JOB_S)
        for rank in range(ranks):
            for line in jobs.results(job, rank):
                found.setdefault(line["case"], []).append(line["wrong"])
        wrong = "\n".join(text for texts in found.values() for text in texts if text)
        output = "\n".join(f"rank {rank}: {job.stderr(rank)[-2000:]}" for rank in range(ranks))
        assert code == 0, f"exit codes {job.codes} after {list(found)[-1:]}:\n{wrong}\n{output}"
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_battery(ranks: int) -> None:
    forms = ["nd", "np"]
    check_all(results("mxnet_binding.py", ranks, *forms), ranks, forms, 40)


@pytest.mark.parametrize(("ranks", "cases"), [(2, CASES), (3, CASES[:5])], ids=["2 ranks", "3 ranks"])
def test_cases_only_for_mxnet(ranks: int, cases: list[str]) -> None:
    assert len(CASES) > 7
    found = results("mxnet_cases.py", ranks, *cases)
    for name in cases:
        check_case(found, name, ranks)


def test_a_killed_rank_raises_on_the_others() -> None:
    with start("mxnet_cases.py", 3, "killed") as job:
        job.wait(JOB_S)
        assert job.codes == [0, 0, 137], "\n".join(job.stderr(rank) for rank in range(3))
        for rank in (0, 1):  # in the step in which the rank was killed, and in two calls after it
            assert jobs.results(job, rank)[-1]["seen"] == ["PeerLost"] * 3


def run_python(program: str, interpreter: str | Path = PYTHON) -> subprocess.CompletedProcess[str]:
    command = [interpreter, "-W", "ignore", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **ENVIRONMENT})


def test_every_name_of_horovod_exists() -> None:
    done = run_python(
        "import horovod.mxnet as hvd, farandole.mxnet, horovod.mxnet.mpi_ops, horovod.mxnet.compression\n"
        f"import sys; assert hvd is farandole.mxnet and 'torch' not in sys.modules\n"
        f"assert [n for n in '''{HOROVOD_NAMES}'''.split() if not hasattr(hvd, n)] == []\n"
        "import doctest; sys.exit(doctest.testmod(hvd).failed)"
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_error_names_what_is_missing_or_wrong() -> None:
    for preparation, expected in (
        ("sys.modules['mxnet'] = None", "needs MXNet 1.9.1, and it is not installed: pip install mxnet==1.9.1"),
        ("sys.modules['mxnet'] = Stub(__version__='1.8.0')", "1.9.1 or newer, and older than 2.0.0; this is 1.8.0"),
        ("sys.modules['mxnet'] = Stub(__version__='2.0.0')", "this is 2.0.0"),
        ("import numpy; del numpy.__deprecated_attrs__['bool']", "cannot be imported with NumPy 1.23.5"),
    ):
        done = run_python(f"import sys\nfrom types import SimpleNamespace as Stub\n{preparation}\nimport horovod.mxnet")
        assert done.returncode == 1 and "ImportError" in done.stderr and expected in done.stderr, done.stderr


def test_farandole_alone_imports_no_mxnet() -> None:
    done = run_python("import sys, farandole; sys.exit('mxnet' in sys.modules)")
    assert done.returncode == 0, done.stderr


def run_with_launcher(script: Path, folder: str, *options: str) -> str:
    launcher = "import sys; from farandole.launch.cli import horovodrun; sys.exit(horovodrun())"
    command = [sys.executable, "-c", launcher, "-np", "2", str(PYTHON), "-W", "ignore", str(script), *options]
    environment = {**os.environ, **ENVIRONMENT, "TMPDIR": folder}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_runs_with_and_without_a_launcher() -> None:
    script = ROOT / "examples" / "mxnet_digits.py"
    with tempfile.TemporaryDirectory() as folder:
        # In 25 runs of 8 epochs the worst accuracy was 90%; in 40 runs of 3 epochs one had 67%.
        printed = run_with_launcher(script, folder, "--epochs", "8", "--save", "digits.params")
        assert "digits.params" in os.listdir(folder)
    assert float(re.findall(r"accuracy ([\d.]+)%", printed)[0]) > 80
    done = run_python(f"import sys; sys.argv = ['x', '--epochs', '1']\n{script.read_text()}")
    assert "accuracy" in done.stdout, done.stderr


def test_the_code_of_the_page() -> None:
    [script] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "mxnet.md").read_text(), flags=re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.py")
        path.write_text(script)
        assert "loss below 0.01: True" in run_with_launcher(path, folder)
