"""A layer that each rank has for itself, beside layers in common: PartialDistributedGradientTape.
Ends with averaged gradients for the one and the rank's own, divided, for the other."""

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init()
tf.keras.utils.set_random_seed(4)
shared, private = tf.keras.layers.Dense(3), tf.keras.layers.Dense(1)
model = tf.keras.Sequential([tf.keras.layers.Input((2,)), shared, private])
x = [np.random.RandomState(rank).rand(4, 2).astype("float32") for rank in range(hvd.size())]


def gradients(rank, wrap=lambda tape: tape):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x[rank])))
    return wrap(tape).gradient(loss, model.trainable_variables)


plain = [gradients(rank) for rank in range(hvd.size())]
for scale in (True, False):
    found = gradients(
        hvd.rank(),
        lambda tape, scale=scale: hvd.PartialDistributedGradientTape(
            tape, local_layers=[private], scale_local_gradients=scale
        ),
    )
    for i, gradient in enumerate(found):
        if i < 2:
            wanted = sum(one[i].numpy() for one in plain) / hvd.size()
        else:
            wanted = plain[hvd.rank()][i].numpy() / (hvd.size() if scale else 1)
        np.testing.assert_allclose(gradient.numpy(), wanted, rtol=1e-5, atol=1e-6)
