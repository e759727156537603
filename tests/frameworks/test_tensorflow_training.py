# Training with TensorFlow on 2 and 3 ranks, with compiled operations and with callbacks; a rank that is killed.
# Touches farandole.launch, tensorflow_training_cases.py and the harness of tests/ranks.
"""Training on shards of the batch gives the same as training on the whole batch."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest
from battery.run import check_case
from tensorflow_jobs import TENSORFLOW, needs_tensorflow, results

pytestmark = [pytest.mark.ranks, pytest.mark.slow, needs_tensorflow]
HERE = Path(__file__).parent


@pytest.mark.timeout(600)
@pytest.mark.parametrize("steps", ["40", pytest.param("200", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("way", "ranks"), [("compiled", 3), ("callback", 2)])
def test_training(way: str, ranks: int, steps: str) -> None:
    more = {**TENSORFLOW, "FARANDOLE_TENSORFLOW_OPS": way, "SLOW_STEPS": steps}
    found = results("tensorflow_training_cases.py", ranks, **more)
    assert len(found) == 21
    for name in found:
        check_case(found, name, ranks)


KILLED = """
import json, os, sys
import tensorflow as tf
import farandole.tensorflow as hvd
from farandole.tensorflow.failures import translated
hvd.init()
step = tf.function(lambda x: [hvd.allreduce(x + i, name=f"part{i}") for i in range(4)])
step(tf.ones(1000))
print(json.dumps({"pid": os.getpid()}), flush=True)
try:
    while True:
        step(tf.ones(1000))
except tf.errors.OpError as error:
    print(json.dumps({"error": type(translated(error)).__name__}), flush=True)
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("way", ["compiled", "callback"])
def test_a_killed_rank_raises_on_the_others(way: str) -> None:
    environment = {**TENSORFLOW, "FARANDOLE_TENSORFLOW_OPS": way}
    jobs.kill_one_of_three(KILLED, environment)
