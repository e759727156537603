# A training script with the data service, as Horovod's users have it; the compute job runs at the same time.
# Touches horovod.tensorflow.data as they know it.
"""Prints which elements this job got, over all ranks; ends the compute job."""

import sys

import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service

hvd.init()
rank, size = hvd.rank(), hvd.size()
config = TfDataServiceConfig.read(sys.argv[1], wait_for_file_creation=True)
dataset = tf.data.Dataset.range(60).map(lambda x: x * x)
if config.dispatcher_side == "compute":
    shared = dataset.send_to_data_service(config, rank, size, reuse_dataset=True)
    local = [int(x) for x in shared]  # the ranks share one pass
    turns = dataset.repeat().batch(2).send_to_data_service(config, rank, size, reuse_dataset=True, round_robin=True)
    assert len(list(turns.take(4))) == 4
    try:
        dataset.send_to_data_service(config, rank, round_robin=True)
    except ValueError as error:
        assert "reuse_dataset" in str(error)
else:
    try:
        dataset.send_to_data_service(config, rank)
    except RuntimeError as error:
        assert "tf_data_service" in str(error)
    with tf_data_service(config, rank) as address:
        local = [int(x) for x in dataset.apply(tf.data.experimental.service.distribute("parallel_epochs", address))]
all_values = hvd.allgather_object(local)
if rank == 0:
    config.compute_client(verbose=2).shutdown()
    found = sorted(x for part in all_values for x in part)
    print("all of them once:", found == [x * x for x in range(60)])
hvd.shutdown()
