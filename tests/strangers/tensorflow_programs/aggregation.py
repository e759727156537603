"""Gradients of several backward passes before one reduction, in a Keras optimizer that is driven by hand.
Ends with the weights of one process that adds up the same passes, and with a warning about one that reduces nothing."""

import warnings

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init()
PASSES = 2
x = np.random.RandomState(7).randn(hvd.size(), 6, 4, 3)


def gradient_of(weight, rank, step):
    error = x[rank, step] @ weight
    return 2 * x[rank, step].T @ error / error.size


for average in (True, False):
    weight = tf.Variable(np.ones((3, 2)), dtype=tf.float64)
    opt = hvd.DistributedOptimizer(
        tf.keras.optimizers.SGD(0.1), backward_passes_per_step=PASSES, average_aggregated_gradients=average
    )

    @tf.function
    def step(data, weight=weight, opt=opt):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.matmul(data, weight)))
        opt.apply_gradients([(tape.gradient(loss, weight), weight)])

    for number in range(6):
        step(x[hvd.rank(), number])
    wanted, total = np.ones((3, 2)), 0.0
    for number in range(6):
        total = total + sum(gradient_of(wanted, rank, number) for rank in range(hvd.size())) / hvd.size()
        if (number + 1) % PASSES == 0:
            wanted, total = wanted - 0.1 * total / (PASSES if average else 1), 0.0
    np.testing.assert_allclose(weight.numpy(), wanted, rtol=1e-7)

plain = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    plain.apply_gradients([(tf.ones([3, 2], tf.float64), weight)])  # as tf_keras's fit does with such an optimizer
assert hvd.size() == 1 or any("the ranks train alone" in str(one.message) for one in caught)
