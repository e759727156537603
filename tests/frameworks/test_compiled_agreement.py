# TensorFlow and JAX if one rank has no compiler: all ranks use callbacks, until all can use compiled operations.
# Touches farandole.tensorflow, farandole.jax and the harness of tests/ranks.
"""Both frameworks in one job; between two calls of init the test changes which files the ranks find."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import jobs
import pytest
from tensorflow_jobs import CACHE, ENVIRONMENT, needs_tensorflow

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    needs_tensorflow,
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed"),
]
TURNS = """
import json, logging, os
import jax, jax.numpy as jnp
import tensorflow as tf
import farandole.jax as hvj
import farandole.tensorflow as hvd
from farandole.jax import compiled as calls
from farandole.tensorflow import compiled as operations

rank, before = int(os.environ["FARANDOLE_RANK"]), dict(os.environ)
VARIABLES = ("FARANDOLE_TENSORFLOW_OPS", "FARANDOLE_JAX_OPS")
said = []
class Heard(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("farandole").addHandler(Heard())

def turn(wanted):
    said.clear()
    os.environ.update(dict.fromkeys(VARIABLES, wanted), FARANDOLE_LOG_LEVEL="info")
    refused = []
    for module in (hvd, hvj):
        try:
            module.init()
        except RuntimeError as error:
            refused.append(str(error))
    compiled = [operations.library() is not None, calls.ready()]
    if not refused:
        graph = float(tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="graph"))(tf.ones(())))
        jitted = float(jax.jit(lambda x: hvj.allreduce(x, op=hvj.Sum))(jnp.ones(())))
        assert (graph, jitted) == (2, 2), (graph, jitted)
    hvd.shutdown()
    print(json.dumps({"compiled": compiled, "refused": refused, "said": [s for s in said if "callbacks" in s]}))

if rank == 1:  # as on a host of its own, where nothing is installed
    os.environ.update(PATH=os.environ["EMPTY"], FARANDOLE_CACHE_DIRECTORY=os.environ["EMPTY"])
turn("auto")
turn("compiled")
os.environ.update(before)
turn("auto")
"""


@pytest.mark.timeout(300)
def test_one_rank_without_a_compiler(tmp_path: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    environment = {**ENVIRONMENT, "JAX_PLATFORMS": "cpu", "EMPTY": str(tmp_path), "TMPDIR": str(tmp_path)}
    with jobs.local.start([sys.executable, "-c", TURNS], 2, None, environment) as job:
        assert job.wait(280) == 0, [job.stderr(rank)[-4000:] for rank in range(2)]
        found = [jobs.results(job, rank) for rank in range(2)]
    assert [[turn["compiled"] for turn in turns] for turns in found] == [[[False] * 2, [False] * 2, [True] * 2]] * 2
    for turns, reason in zip(found, ("another rank has none", "there is no C++ compiler (c++ or g++)"), strict=True):
        frameworks = ("tensorflow", "jax")
        message = " uses callbacks of Python instead of compiled operations: "
        assert turns[0]["said"] == [f"{name}{message}{reason}" for name in frameworks]
        message = "_OPS=compiled, but the compiled operations cannot be used: "
        assert turns[1]["refused"] == [f"FARANDOLE_{name.upper()}{message}{reason}" for name in frameworks]
        assert turns[2]["said"] == turns[2]["refused"] == []
