"""A graph of TensorFlow 1: an optimizer of tf.compat.v1, a monitored session, the broadcast hook, StopAtStepHook.
Ends with the weights of one process after the same number of steps."""

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init()
x = np.random.RandomState(0).randn(10 * hvd.size(), 3)
y = x.sum(1, keepdims=True)
v1 = tf.compat.v1
with tf.Graph().as_default():
    image = v1.placeholder(tf.float64, [None, 3], name="image")
    label = v1.placeholder(tf.float64, [None, 1], name="label")
    weight = v1.get_variable("weight", initializer=np.full((3, 1), float(hvd.rank())), use_resource=True)
    bias = v1.get_variable("bias", initializer=np.zeros(1), use_resource=True)
    loss = v1.losses.mean_squared_error(label, tf.matmul(image, weight) + bias)
    opt = v1.train.GradientDescentOptimizer(0.01 * hvd.size())
    opt = hvd.DistributedOptimizer(opt, op=hvd.Average)
    global_step = v1.train.get_or_create_global_step()
    train_op = opt.minimize(loss, global_step=global_step)
    mean_loss = hvd.allreduce(loss)
    with tf.control_dependencies([train_op]):
        after = [weight.read_value(), bias.read_value()]
    hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=6 // hvd.size())]
    rows = slice(hvd.rank() * 10, (hvd.rank() + 1) * 10)
    checkpoint_dir = None  # of rank 0 alone, where there is one
    with v1.train.MonitoredTrainingSession(checkpoint_dir=checkpoint_dir, hooks=hooks) as session:
        while not session.should_stop():
            _, average, found, number = session.run(
                [train_op, mean_loss, after, global_step], {image: x[rows], label: y[rows]}
            )

w, b = np.zeros((3, 1)), np.zeros(1)
for _ in range(6 // hvd.size()):
    before = np.square(x @ w + b - y).mean()
    error = x @ w + b - y
    w, b = w - 0.01 * hvd.size() * 2 * x.T @ error / len(x), b - 0.01 * hvd.size() * 2 * error.mean(0)
assert np.isfinite(average)

with tf.Graph().as_default(), v1.Session() as session:
    place, many, included = hvd.rank_op(), hvd.size_op(), hvd.process_set_included_op()
    rows = hvd.allgather(tf.fill([hvd.rank() + 1, 2], hvd.rank()))
    told = hvd.broadcast(tf.constant([hvd.rank(), 7]), root_rank=hvd.size() - 1)
    assert session.run([place, many, included]) == [hvd.rank(), hvd.size(), 1]
    assert session.run(rows)[:, 0].tolist() == [rank for rank in range(hvd.size()) for _ in range(rank + 1)]
    assert session.run(told).tolist() == [hvd.size() - 1, 7]
    value = v1.get_variable("value", initializer=np.full(2, float(hvd.rank())), use_resource=True)
    session.run(v1.global_variables_initializer())
    session.run(hvd.broadcast_global_variables(0))
    assert session.run(value).tolist() == [0.0, 0.0]
    final = hvd.allreduce(tf.constant(found[0]))
    np.testing.assert_allclose(session.run(final), found[0], rtol=1e-12)  # the same everywhere
np.testing.assert_allclose(found[0], w, rtol=1e-6)
np.testing.assert_allclose(found[1], b, atol=1e-6)  # the loss is float32
