"""A graph with an embedding whose gradient is sparse, gradients clipped between compute_gradients and apply_gradients,
a checkpoint folder of rank 0 alone, a restart of the session. Ends with the weights of one process."""

import os
import tempfile

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init()
v1 = tf.compat.v1
rows = np.random.RandomState(1).randint(0, 6, (8, hvd.size(), 4))
start = np.random.RandomState(2).rand(6, 2)


def life(checkpoint_dir, last_step):
    with tf.Graph().as_default():
        ids = v1.placeholder(tf.int64, [None])
        with v1.variable_scope("model"):
            table = v1.get_variable("table", initializer=start + hvd.rank(), use_resource=True)
            scale = v1.get_variable("scale", initializer=np.ones(2), use_resource=True)
        loss = tf.reduce_mean(tf.square(tf.gather(table, ids) * scale - 1.0))
        opt = v1.train.MomentumOptimizer(0.1, 0.9)
        opt = hvd.DistributedOptimizer(opt, name="Distributed", compression=hvd.Compression.none)
        step = v1.train.get_or_create_global_step()
        pairs = opt.compute_gradients(loss)
        assert isinstance(pairs[0][0], tf.IndexedSlices)
        clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 0.5)
        train = opt.apply_gradients(zip(clipped, [variable for _, variable in pairs]), global_step=step)
        hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=last_step)]
        if hvd.rank() == 0:
            hooks.append(v1.train.LoggingTensorHook({"step": step, "loss": loss}, every_n_iter=100))
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=checkpoint_dir, hooks=hooks, save_checkpoint_steps=2, log_step_count_steps=None
        ) as session:
            while not session.should_stop():
                number = session.run(step, {ids: rows[0, 0]})
                session.run(train, {ids: rows[number, hvd.rank()]})
        return number


def alone(steps):
    """One process with the rows of all ranks. Only rows that occur have momentum."""
    table, scale = start.copy(), np.ones(2)
    speeds = np.zeros((6, 2)), np.zeros(2)
    for step in range(steps):
        ids = rows[step].reshape(-1)
        error = 2 * (table[ids] * scale - 1) / 8 / hvd.size()
        values, of_scale = error * scale, (error * table[ids]).sum(0)
        factor = 0.5 / max(np.sqrt(np.square(values).sum() + np.square(of_scale).sum()), 0.5)
        of_table = np.zeros((6, 2))
        np.add.at(of_table, ids, values)
        some = np.unique(ids)
        speeds[0][some] = 0.9 * speeds[0][some] + of_table[some] * factor
        speeds[1][:] = 0.9 * speeds[1] + of_scale * factor
        table[some] -= 0.1 * speeds[0][some]
        scale = scale - 0.1 * speeds[1]
    return table, scale


folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, root_rank=0)
mine = folder if hvd.rank() == 0 else None
assert life(mine, 3) == 2
last = life(mine, 6)  # goes on where rank 0's checkpoint is; the broadcast tells the others
assert last == 5, last
with tf.Graph().as_default(), v1.Session() as session:
    assert session.run(hvd.allgather(tf.constant([last]))).tolist() == [5] * hvd.size()
if hvd.rank() == 0:
    reader = tf.train.load_checkpoint(folder)
    told = [reader.get_tensor("model/table"), reader.get_tensor("model/scale"), int(reader.get_tensor("global_step"))]
    assert told[2] == 6
    for ours, theirs in zip(told, alone(6)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-7)
    for name in os.listdir(folder):
        os.remove(os.path.join(folder, name))
    os.rmdir(folder)
