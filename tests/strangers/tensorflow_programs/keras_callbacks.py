"""model.fit with a train_step of its own and every callback: schedule in steps, plateau and early stopping on averaged
metrics, best model of rank 0, an epoch to resume from that rank 0 tells. Ends with equal histories and weights."""

import os
import tempfile

import numpy as np
import tensorflow as tf

import horovod.tensorflow as htf
import horovod.tensorflow.keras as hvd

hvd.init()
x = np.random.RandomState(0).rand(8 * hvd.size(), 3).astype("float32")
y = x.sum(1, keepdims=True)
mine = slice(hvd.rank() * 8, hvd.rank() * 8 + 8)
folder = tempfile.mkdtemp()
os.chdir(folder)


class Model(tf.keras.Sequential):
    def train_step(self, data):
        images, labels = data
        with tf.GradientTape() as tape:
            predicted = self(images, training=True)
            loss = self.compute_loss(y=labels, y_pred=predicted)
        tape = htf.DistributedGradientTape(tape)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


resume_from_epoch = 1 if hvd.rank() == 0 else 0
resume_from_epoch = int(hvd.broadcast(resume_from_epoch, 0, name="resume_from_epoch"))
assert resume_from_epoch == 1
tf.keras.utils.set_random_seed(hvd.rank())
model = Model([tf.keras.layers.Input((3,)), tf.keras.layers.Dense(1)])
model.compile(optimizer=tf.keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
best = hvd.callbacks.BestModelCheckpoint(monitor="loss", mode="min", save_weights_only=True)
best.filepath = os.path.join(folder, "best.weights.h5")
rates = []
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=2, steps_per_epoch=2, verbose=0),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.1, start_epoch=2, end_epoch=4, multiplier=1.0),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.1, start_epoch=4, multiplier=1e-1),
    best,
    tf.keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: rates.append(float(model.optimizer.learning_rate))
    ),
    tf.keras.callbacks.EarlyStopping(monitor="loss", min_delta=10.0, patience=5),
]
options = {"batch_size": 4, "epochs": 12, "initial_epoch": resume_from_epoch, "shuffle": False, "verbose": 0}
history = model.fit(x[mine], y[mine], callbacks=callbacks, **options)
assert history.epoch[0] == 1 and len(history.epoch) == 6, history.epoch  # stopped early, everywhere
np.testing.assert_allclose(rates[0], 0.1, rtol=1e-5)
np.testing.assert_allclose(rates[1:4], [0.1, 0.1, 0.1], rtol=1e-5)
np.testing.assert_allclose(rates[4:], [0.01, 0.001], rtol=1e-5)  # a number is raised to the power of the epochs
told = htf.allgather_object((history.history["loss"], [w.tolist() for w in model.get_weights()]))
assert all(one == told[0] for one in told)
assert os.path.exists(best.filepath) == (hvd.rank() == 0)
os.chdir("/")
for name in os.listdir(folder):
    os.remove(os.path.join(folder, name))
os.rmdir(folder)
