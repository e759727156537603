"""A network that solves a differential equation: a Keras model with its own train_step, the derivative by its input,
and a distributed tape over the residual. Ends with the weights of one process."""

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init()


class PINN(tf.keras.Model):
    """u'(t) = -u(t), u(0) = 1."""

    def __init__(self, ranks, wrap):
        super().__init__()
        self.hidden = tf.keras.layers.Dense(4, activation="tanh")
        self.out = tf.keras.layers.Dense(1)
        self.ranks, self.wrap = ranks, wrap

    def call(self, t):
        return self.out(self.hidden(t))

    def residual(self, t):
        with tf.GradientTape() as inner:
            inner.watch(t)
            u = self(t)
        du = inner.gradient(u, t)
        return tf.reduce_mean(tf.square(du + u)) + tf.square(self(tf.zeros((1, 1)))[0, 0] - 1.0)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.add_n([self.residual(data[:, rank]) for rank in self.ranks]) / len(self.ranks)
        tape = self.wrap(tape)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


def train(ranks, wrap):
    tf.keras.utils.set_random_seed(2)
    model = PINN(ranks, wrap)
    model(tf.zeros((1, 1)))
    hvd.broadcast_variables(model.variables, root_rank=0)
    points = np.random.RandomState(3).rand(20, hvd.size(), 1).astype("float32")
    model.compile(optimizer=tf.keras.optimizers.Adam(0.01))
    model.fit(points, batch_size=5, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


found = train([hvd.rank()], hvd.DistributedGradientTape)
wanted = train(range(hvd.size()), lambda tape: tape)
for ours, theirs in zip(found, wanted):
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
