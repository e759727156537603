# Elastic training with JAX while ranks are killed inside compiled steps: real processes, real losses.
# Touches tests/ranks/elastic_runs.py and jax_elastic_training.py.
"""The survivor continues from its last commit, a new rank joins, and the weights fit the number of steps."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from elastic_runs import ElasticRun
from tensorflow_jobs import CACHE, ENVIRONMENT

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("optax") is None, reason="JAX with optax is not installed"),
]
TRAINING = str(Path(__file__).with_name("jax_elastic_training.py"))
START_S = 150.0


# How it trains; compiled calls or callbacks in the first processes and in later ones; which rank to kill. In an elastic
# job each rank uses compiled calls if it can: a host without a compiler may join a host with one.
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("mode", "first", "later", "victim"),
    [("gradient", "compiled", "callback", 0), ("optimizer", "callback", "compiled", 1)],
)
def test_training_goes_on_after_a_kill(mode: str, first: str, later: str, victim: int, tmp_path: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    more = {key: value for key, value in ENVIRONMENT.items() if key != "PYTHONPATH"}
    more |= {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
    with ElasticRun(tmp_path, [TRAINING, mode, first, later], 2, **more) as run:
        now = run.until(lambda now: now["size"] == 2 and now["step"] > 20, START_S)
        (tmp_path / "die.new").write_text(str(now["pids"][victim]))
        (tmp_path / "die.new").rename(tmp_path / "die")
        run.until(lambda later: later["generation"] > now["generation"], START_S)
        again = run.until(lambda last: last["size"] == 2 and last["generation"] > now["generation"], START_S)
        assert set(now["pids"]) & set(again["pids"]) == {now["pids"][1 - victim]}
        run.until(lambda last: last["step"] > again["step"] + 20, START_S)
        assert run.finish(START_S) == 0, run.output()
        results = run.results()
    assert len(results) == 2
    for one in results:
        assert one["same"] and one["error"] < 1e-9 and one["steps"] > now["step"], results
    ways = {"compiled": True, "callback": False}
    survivor, newcomer = sorted(results, key=lambda one: len(one["sizes"]), reverse=True)
    assert survivor["errors"][0] == "PeerLost" and survivor["compiled"] is ways[first], results
    assert newcomer["errors"] == [] and newcomer["compiled"] is ways[later], results
