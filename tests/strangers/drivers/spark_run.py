"""horovod.spark.run in an application that is there already.
Ends with what each task returned, by rank."""

from pyspark.sql import SparkSession

import horovod.spark


def train(factor):
    import torch

    import horovod.torch as hvd

    hvd.init()
    return hvd.rank(), hvd.allreduce(torch.tensor([float(factor * (hvd.rank() + 1))]), op=hvd.Sum).item()


if __name__ == "__main__":
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    results = horovod.spark.run(train, args=(2,), num_proc=2, verbose=0)
    assert results == [(0, 6.0), (1, 6.0)], results
    spark.stop()
