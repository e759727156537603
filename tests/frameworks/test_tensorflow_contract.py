# What other people's programs expect of horovod.tensorflow on 2 and 3 ranks, by both ways through graphs.
# Touches tensorflow_contract_cases.py and the battery's runner; names in a process of their own.
"""Errors, sparse tensors in groups, tapes and optimizers that libraries wrap, private names of Horovod's modules."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from battery.run import check_case
from tensorflow_jobs import TENSORFLOW, needs_tensorflow, results

pytestmark = [pytest.mark.ranks, pytest.mark.slow, needs_tensorflow]


@pytest.mark.timeout(450)
@pytest.mark.parametrize(("way", "ranks"), [("compiled", 3), ("callback", 2)])
def test_cases(way: str, ranks: int) -> None:
    found = results("tensorflow_contract_cases.py", ranks, **TENSORFLOW, FARANDOLE_TENSORFLOW_OPS=way)
    assert len(found) == 8
    for name in found:
        check_case(found, name, ranks)


# Horovod's own modules have them, and programs of others import them from there.
INNER = """
import tensorflow as tf
import horovod.tensorflow as hvd
from horovod import _keras
from horovod._keras import callbacks, elastic
from horovod.common.util import _cache, check_extension, gpu_available, split_list
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.util import _cache as again, _executing_eagerly, _make_subgraph, refs_to_vars, vars_to_refs

hvd.init()
assert again is _cache and hvd._executing_eagerly is _executing_eagerly and _executing_eagerly() is True
with tf.Graph().as_default():
    assert _executing_eagerly() is False
calls = []
cached = _cache(lambda one, more=0: calls.append(one) or len(calls))
assert [cached(1), cached(1), cached(1, more=2), cached(2)] == [1, 1, 2, 3]
assert int(_make_subgraph(lambda: tf.constant(3))()) == 3
old, new = tf.Variable(1.0), tf.keras.layers.Dense(1)
new.build((1, 1))
refs = vars_to_refs([old, [new.kernel, new.bias]])
assert len({refs: 1}) == 1 and refs == vars_to_refs([old, [new.kernel, new.bias]])
first, [kernel, bias] = refs_to_vars(refs)
assert first is old and kernel is new.kernel and bias is new.bias

assert mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0]}
assert mpi_ops.allreduce is hvd.allreduce and mpi_ops._executing_eagerly is _executing_eagerly
ones = tf.ones((2, 2))
for name in ("_allreduce", "_reducescatter"):
    assert tf.reduce_all(getattr(hvd, name)(ones, name="x") == ones) and getattr(mpi_ops, name)
for name in ("_grouped_allreduce", "_grouped_reducescatter"):
    assert tf.reduce_all(getattr(hvd, name)([ones], op=hvd.Sum)[0] == ones)
assert mpi_ops._normalize_name("a/b:0") == "a_b_0"

tape = hvd.DistributedGradientTape(tf.GradientTape())
assert isinstance(tape, hvd._DistributedGradientTape) and isinstance(tape, tf.GradientTape)
class Own(hvd._DistributedGradientTape):
    def _allreduce_grads(self, grads, vars, use_generic_names=False):
        return [2 * grad for grad in super()._allreduce_grads(grads, vars)]
with tf.GradientTape() as inner:
    loss = old * 3.0
assert float(Own(inner, "", "", hvd.Compression.none, False, hvd.Average, 1.0, None).gradient(loss, old)) == 6.0

V1 = tf.compat.v1
class Mine(hvd._DistributedOptimizer):
    def _allreduce_grads(self, grads, vars):
        return [4 * grad for grad in super()._allreduce_grads(grads, vars)]
with tf.Graph().as_default(), V1.Session() as session:
    weight = V1.get_variable("w", initializer=1.0, use_resource=True)
    made = Mine(V1.train.GradientDescentOptimizer(1.0))
    assert isinstance(made, hvd._DistributedOptimizer) and made.get_name() == "DistributedGradientDescentOptimizer"
    assert isinstance(hvd.DistributedOptimizer(made._optimizer), hvd._DistributedOptimizer)
    assert isinstance(hvd.DistributedOptimizer(made._optimizer, op=hvd.Adasum), hvd._DistributedAdasumOptimizer)
    step = made.minimize(weight * 2.0)
    session.run(V1.global_variables_initializer())
    session.run(step)
    assert session.run(weight) == 1.0 - 4 * 2.0

backend = tf.keras.backend
class Told(callbacks.BroadcastGlobalVariablesCallbackImpl, tf.keras.callbacks.Callback):
    def on_batch_end(self, batch, logs=None):
        calls.append(("batch", batch))
        super().on_batch_end(batch, logs)
model = tf.keras.Sequential([tf.keras.layers.Input((1,)), tf.keras.layers.Dense(1)])
options = ("d", "", "", hvd.Compression.none, False, 1.0, hvd.Average)
optimizer = _keras.create_distributed_optimizer(tf.keras, tf.keras.optimizers.SGD(0.1), *options)
model.compile(optimizer=optimizer, loss="mse")
rates = callbacks.LearningRateWarmupCallbackImpl
class Warm(rates, tf.keras.callbacks.Callback): pass
told = Told(backend, 0)
model.fit(tf.ones((4, 1)), tf.ones((4, 1)), batch_size=2, verbose=0, callbacks=[told, Warm(backend, 0.1, 1)])
assert calls[-2:] == [("batch", 0), ("batch", 1)] and told.broadcast_done
assert elastic.CommitStateCallbackImpl(backend, object(), 3).batches_per_commit == 3
assert float(_keras.allreduce(backend, 2.0, None, None, 1.0, 1.0, hvd.Sum, hvd.Compression.none)) == 2.0
check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", "")
assert isinstance(gpu_available("tensorflow"), bool) and split_list([1, 2, 3], 2) == [[1, 2], [3]]
print("all there")
"""


@pytest.mark.timeout(200)
def test_names_behind_the_operations() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INNER], env={**os.environ, **TENSORFLOW}, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0 and "all there" in done.stdout, done.stderr[-3000:]
