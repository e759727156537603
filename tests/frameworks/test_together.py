# torch, TensorFlow and JAX in one process: each waits only for its own operations, and gets only their results.
# Touches farandole.launch and the harness of tests/ranks.
"""10,000 collectives of three frameworks, interleaved."""

from __future__ import annotations

import sys

import jobs
import pytest
from tensorflow_jobs import ENVIRONMENT, needs_tensorflow

pytestmark = [pytest.mark.ranks, pytest.mark.slow, needs_tensorflow]

ROUNDS, EACH = 417, 8  # of three frameworks: 10,008 collectives
JOB = f"""
import json, threading
import jax, numpy as np, tensorflow as tf, torch
from farandole.world.runtime import runtime
import farandole.jax as for_jax, farandole.tensorflow as for_tensorflow, farandole.torch as for_torch
for_torch.init()
for_tensorflow.init()
for_jax.init()
size, rank, done, failures = for_torch.size(), for_torch.rank(), {{}}, []
jax_step = jax.jit(lambda x: [for_jax.allreduce(x + i, op=for_jax.Sum, name=f"j{{i}}") for i in range({EACH})])
tf_sum = for_tensorflow.Sum
tf_step = tf.function(lambda x: [for_tensorflow.allreduce(x + i, op=tf_sum, name=f"t{{i}}") for i in range({EACH})])

def with_torch(number):
    tensors = [torch.full((5,), float(number + i + rank)) for i in range({EACH})]
    handles = [for_torch.allreduce_async(tensor, op=for_torch.Sum, name=f"p{{i}}") for i, tensor in enumerate(tensors)]
    return [for_torch.synchronize(handle).numpy() for handle in reversed(handles)][::-1]

STEPS = {{
    "torch": with_torch,
    "tensorflow": lambda number: [one.numpy() for one in tf_step(tf.fill([5], float(number + rank)))],
    "jax": lambda number: [np.asarray(one) for one in jax_step(np.full(5, number + rank, np.float32))],
}}

def run(framework):
    count = 0
    try:
        for number in range({ROUNDS}):
            for i, found in enumerate(STEPS[framework](number)):
                wanted = sum(number + i + other for other in range(size))
                assert found.tolist() == [wanted] * 5, (framework, number, i, found)
                count += 1
    except BaseException as error:
        failures.append(repr(error))
    done[framework] = count

threads = [threading.Thread(target=run, args=(framework,)) for framework in STEPS]
for thread in threads: thread.start()
for thread in threads: thread.join()
engine = runtime.world.engine
print(json.dumps({{"done": done, "failures": failures, "pending": engine.pending}}), flush=True)
for_torch.shutdown()
"""


@pytest.mark.timeout(300)
def test_three_frameworks_in_one_process() -> None:
    environment = {**ENVIRONMENT, "FARANDOLE_TENSORFLOW_OPS": "compiled", "FARANDOLE_JAX_OPS": "compiled"}
    with jobs.local.start([sys.executable, "-c", JOB], 2, None, environment) as job:
        code = job.wait(280)
        assert code == 0, f"exit codes {job.codes}:\n" + "\n".join(job.stderr(rank)[-4000:] for rank in range(2))
        found = [jobs.last_result(job, rank) for rank in range(2)]
    each = ROUNDS * EACH
    assert found == [{"done": dict.fromkeys(("torch", "tensorflow", "jax"), each), "failures": [], "pending": 0}] * 2
