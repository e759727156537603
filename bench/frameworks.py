"""The same exchange in every framework: the gradients of 34 million parameters, 64 arrays, averaged over 2 ranks, and
by TensorFlow's own MultiWorkerMirroredStrategy, for comparison.

Each framework is a job of its own and they take turns, so that noise falls on all: `python bench/frameworks.py`.

Processes keep the memory that they free: what the C library gives back and takes again, a page at a time, costs
frameworks that make new results as much as the exchange itself, and is not the exchange.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = "import sys; from farandole.launch.cli import horovodrun; sys.exit(horovodrun())"
# About those of a transformer: many small arrays, a few large ones.
SHAPES: list[tuple[int, ...]] = [*[(768,)] * 32, *[(768, 1024)] * 28, *[(2048, 1536)] * 3, (2368, 960)]
WARM, STEPS = 3, 8
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}

Step = Callable[[], Any]  # exchanges everything once, and returns when the results are there
# The binding, a step, and what of the step is not the exchange; that is measured too and subtracted.
Row = tuple[Any, Step, Step]


def nothing() -> None:
    """The rest of a step that is all exchange."""


def torch_step() -> Row:
    """The binding that the others are measured against."""
    import torch

    import farandole.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    tensors = [torch.ones(shape) for shape in SHAPES]
    return hvd, lambda: hvd.grouped_allreduce(tensors, name="exchange"), nothing


def jax_jit_step() -> Row:
    """A compiled function that is given its arrays for good, as a training step is, and gives back the averages."""
    import jax

    import farandole.jax as hvd

    hvd.init()
    held = [jax.block_until_ready([jax.numpy.ones(shape) for shape in SHAPES])]
    exchange = jax.jit(lambda arrays: hvd.allreduce(arrays, name="exchange"), donate_argnums=0)

    def step() -> None:
        held[0] = jax.block_until_ready(exchange(held[0]))

    return hvd, step, nothing


def jax_step() -> Row:
    """Outside compiled functions."""
    import jax

    import farandole.jax as hvd

    hvd.init()
    arrays = jax.block_until_ready([jax.numpy.ones(shape) for shape in SHAPES])
    return hvd, lambda: jax.block_until_ready(hvd.allreduce(arrays, name="exchange")), nothing


def in_functions(hvd: Any, exchange: Callable[[list[Any]], Any]) -> Row:
    """A function that makes gradients and exchanges them, as a training step does, and one that only makes them."""
    import tensorflow as tf

    variables = [tf.Variable(tf.ones(shape)) for shape in SHAPES]
    scale = tf.constant(1.0)

    def function(then: Callable[[list[Any]], Any]) -> Any:
        made = tf.function(lambda scale: then([variable * scale for variable in variables]), autograph=False)
        return lambda: made(scale)

    return hvd, function(exchange), function(lambda gradients: gradients)


def tensorflow_step() -> Row:
    """What tapes and optimizers do with the gradients of a step, in a function."""
    import farandole.tensorflow as hvd
    from farandole.tensorflow.gradients import Reduction

    hvd.init()
    return in_functions(hvd, lambda gradients: Reduction()(gradients, gradients))


def keras_step() -> Row:
    """The same inside a Keras optimizer, without its update."""
    import keras

    import farandole.keras as hvd
    from farandole import barrier

    hvd.init()
    hvd.barrier = barrier  # type: ignore[attr-defined]  # for in_functions
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    return in_functions(hvd, lambda gradients: optimizer._farandole(gradients, gradients))


def strategy_step() -> Row:
    """TensorFlow's own: the same gradients through a replica context's all_reduce."""
    import farandole as hvd

    hvd.init()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{probe.getsockname()[1]}"
    workers = hvd.allgather_object(own)
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": hvd.rank()}}
    )
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    tensors = [tf.ones(shape) for shape in SHAPES]

    def reduced(gradients: list[Any]) -> Any:
        own = [tf.identity(gradient) for gradient in gradients]  # made on the replica's device, as gradients are
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, own)

    exchange = tf.function(lambda gradients: strategy.run(reduced, (gradients,)), autograph=False)
    return hvd, lambda: exchange(tensors), nothing


# By the name of a row: the module that has to be there, what makes the step, variables of its processes.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "tensorflow"}
ROWS: dict[str, tuple[str, Callable[[], Row], dict[str, str]]] = {
    "torch": ("torch", torch_step, {}),
    "jax, jit": ("jax", jax_jit_step, {"FARANDOLE_JAX_OPS": "compiled", "JAX_PLATFORMS": "cpu"}),
    "jax, jit, callback": ("jax", jax_jit_step, {"FARANDOLE_JAX_OPS": "callback", "JAX_PLATFORMS": "cpu"}),
    "jax, at once": ("jax", jax_step, {"JAX_PLATFORMS": "cpu"}),
    "tensorflow": ("tensorflow", tensorflow_step, {"FARANDOLE_TENSORFLOW_OPS": "compiled", **_QUIET}),
    "tensorflow, callback": ("tensorflow", tensorflow_step, {"FARANDOLE_TENSORFLOW_OPS": "callback", **_QUIET}),
    "keras": ("tensorflow", keras_step, {"FARANDOLE_TENSORFLOW_OPS": "compiled", **_QUIET}),
    "MultiWorkerMirrored": ("tensorflow", strategy_step, _QUIET),
}


def rank(name: str, folder: Path, turns: int) -> None:
    """One rank of a row: some steps whenever its turn has come; rank 0 writes down what a step took."""
    hvd, step, rest = ROWS[name][1]()
    for _ in range(WARM):
        step()
        rest()
    (folder / f"{name}.{hvd.rank()}.ready").touch()
    for turn in range(turns):
        while not (folder / f"{name}.{turn}").exists():
            time.sleep(0.01)
        hvd.barrier()
        step()
        taken = [timed(hvd, step) - timed(hvd, rest) for _ in range(STEPS)]
        if hvd.rank() == 0:
            (folder / "new").write_text(json.dumps(taken))
            (folder / "new").rename(folder / f"{name}.{turn}.done")
    hvd.shutdown()


def timed(hvd: Any, step: Step) -> float:
    """Seconds of one step that all ranks begin together."""
    hvd.barrier()
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def wait(path: Path, job: subprocess.Popen[Any]) -> None:
    """Until the file is there; SystemExit when the job has ended before."""
    while not path.exists():
        if job.poll() is not None:
            sys.exit(f"{path.name}: the job ended with {job.returncode}")
        time.sleep(0.02)


def measure(names: list[str], turns: int) -> dict[str, list[float]]:
    """Seconds of each step, by row."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        jobs = {}
        for name in names:
            environment = {**os.environ, **KEEP, "OMP_NUM_THREADS": "1", **ROWS[name][2]}
            environment["PYTHONPATH"] = f"{ROOT / 'src'}:{environment.get('PYTHONPATH', '')}"
            own = [sys.executable, __file__, "--rank", name, "--folder", folder, "--turns", str(turns)]
            jobs[name] = subprocess.Popen([sys.executable, "-c", LAUNCH, "-np", "2", *own], env=environment)
        try:
            for name, job in jobs.items():
                for number in range(2):
                    wait(path / f"{name}.{number}.ready", job)
            found: dict[str, list[float]] = {name: [] for name in names}
            for turn in range(turns):
                for name, job in jobs.items():
                    (path / f"{name}.{turn}").touch()
                    wait(path / f"{name}.{turn}.done", job)
                    found[name] += json.loads((path / f"{name}.{turn}.done").read_text())
        finally:
            for job in jobs.values():
                try:
                    job.wait(20)
                except subprocess.TimeoutExpired:
                    job.terminate()
                    job.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.folder, options.turns)
        return
    names = [name for name in options.rows if importlib.util.find_spec(ROWS[name][0]) is not None]
    found = measure(names, options.turns)
    count = sum(math.prod(shape) for shape in SHAPES)
    print(f"{count / 1e6:.1f} million parameters in {len(SHAPES)} arrays of float32, 2 ranks, {options.turns} turns")
    first = statistics.median(found[names[0]])
    for name, taken in found.items():
        middle = statistics.median(taken)
        least = min(taken) * 1e3
        print(f"{name:22} {middle * 1e3:8.1f} ms a step, least {least:8.1f}, {middle / first:5.2f} x {names[0]}")


if __name__ == "__main__":
    main()
