# Elastic training with TensorFlow and Keras while a rank is killed: real processes, real losses.
# Touches tests/ranks/elastic_runs.py and tensorflow_elastic_training.py.
"""The survivor continues from its last commit, a new rank joins, and the weights are those of the number of steps."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from elastic_runs import ElasticRun
from tensorflow_jobs import CACHE, ENVIRONMENT, needs_tensorflow

pytestmark = [pytest.mark.ranks, pytest.mark.chaos, pytest.mark.slow, needs_tensorflow]
TRAINING = str(Path(__file__).with_name("tensorflow_elastic_training.py"))
START_S = 200.0  # TensorFlow starts slowly


@pytest.mark.timeout(700)
@pytest.mark.parametrize(("mode", "way", "killed_rank"), [("loop", "compiled", 0), ("fit", "callback", 1)])
def test_training_goes_on_after_a_kill(mode: str, way: str, killed_rank: int, tmp_path: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    more = {key: value for key, value in ENVIRONMENT.items() if key != "PYTHONPATH"}
    with ElasticRun(tmp_path, [TRAINING, mode], 2, FARANDOLE_TENSORFLOW_OPS=way, **more) as run:
        now = run.until(lambda now: now["size"] == 2 and now["step"] > 20, START_S)
        os.kill(now["pids"][killed_rank], signal.SIGKILL)
        after = run.until(lambda later: later["generation"] > now["generation"], START_S)
        assert now["pids"][1 - killed_rank] in after["pids"]
        later = run.until(lambda last: last["size"] == 2 and last["generation"] > now["generation"], START_S)
        run.until(lambda last: last["step"] > later["step"] + 20, START_S)
        assert run.finish(START_S) == 0, run.output()
        results = run.results()
    assert len(results) == 2 and any(len(one["sizes"]) > 1 for one in results)
    for one in results:
        assert one["same"] and one["error"] < 1e-9 and one["steps"] > now["step"], results
        assert one["compiled"] is (way == "compiled") and one["sum"] == 2
