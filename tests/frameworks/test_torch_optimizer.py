# Runs torch_optimizer_cases.py on 2 and 3 ranks, and with the engine in Python.
# Touches farandole.launch and the cases.
"""One job per number of ranks: importing torch costs more than all cases together."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from farandole.launch import local

pytest.importorskip("torch")
HERE = Path(__file__).parent
ENVIRONMENT = {"PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"}


@pytest.mark.ranks
@pytest.mark.parametrize("ranks, engine", [(2, "native"), (3, "native"), (2, "python")])
def test_cases(ranks: int, engine: str, tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "torch_optimizer_cases.py")]
    # What torch.compile leaves goes where the test cleans up.
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    environment = {**ENVIRONMENT, **cache, "FARANDOLE_ENGINE": engine}
    with local.start(command, ranks, env=environment, stop_on_failure=False) as job:
        job.wait(200)
        output = [f"rank {rank}: {job.stdout(rank)[-4000:]} {job.stderr(rank)[-2000:]}" for rank in range(ranks)]
        assert list(job.codes) == [0] * ranks, "\n".join(output).replace("\\n", "\n")
        for rank in range(ranks):
            found = json.loads(job.stdout(rank).splitlines()[-1])
            assert found.pop("left behind") == 0
            assert {name: result for name, result in found.items() if result != "ok"} == {}
