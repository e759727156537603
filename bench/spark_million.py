"""What reading costs an estimator's ranks: a million rows of 200 columns from a store, and the same rows in memory.
Writes about 0.8 GB of Parquet with Spark, then trains in two ranks, both ways by turns."""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from typing import Any

COLUMNS = 200


def prepare(store: Any, rows: int) -> str:
    """A DataFrame of that many rows, written as `fit` writes it; the number of the data set."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark would take whichever python3 comes first
    from pyspark.ml.feature import VectorAssembler
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    from farandole.spark.common.writing import Wanted, prepare

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "3g")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    names = [f"x{n}" for n in range(COLUMNS)]
    columns = [F.rand(n).cast("float").alias(name) for n, name in enumerate(names)]
    frame = spark.range(0, rows, 1, 20).select(*columns).withColumn("y", F.col("x0") + 2 * F.col("x1"))
    frame = VectorAssembler(inputCols=names, outputCol="features").transform(frame)
    index = prepare(frame, Wanted(store, ("features", "y"), None, 0, None, False))
    spark.stop()
    return index


def lane(store: Any, data: Any, batch: int, turns: int, steps: int) -> dict[str, Any]:
    """A rank: epochs from the store and from memory by turns, so that the machine's moods fall on both."""
    import numpy as np
    import torch

    import farandole.torch as hvd
    from farandole.spark.common.reader import Reader

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(COLUMNS, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    reader = Reader(store, data, batch, hvd.rank(), hvd.size(), 1, steps=steps)

    def train(batches: Any) -> tuple[float, float]:
        hvd.barrier()
        began, worked = time.perf_counter(), time.process_time()
        for one in batches:
            optimizer.zero_grad()
            target = torch.from_numpy(one["y"]).float().reshape(-1, 1)
            torch.nn.functional.mse_loss(model(torch.from_numpy(one["features"])), target).backward()
            optimizer.step()
        worked = time.process_time() - worked
        hvd.barrier()
        return time.perf_counter() - began, worked

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def memory() -> Any:
        for _ in range(steps):
            order = draw.integers(0, len(held["y"]), batch)
            yield {name: values[order] for name, values in held.items()}

    train(reader.epoch(0))  # warm
    train(reader.epoch(1))
    peak_reading = peak()
    # As much as this rank's share of a few windows: enough that no cache holds it.
    draw = np.random.default_rng(hvd.rank())
    parts = list(Reader(store, data, batch, hvd.rank(), hvd.size(), 1, steps=200).epoch(0))
    held = {name: np.concatenate([part[name] for part in parts]) for name in ("features", "y")}
    times = [(train(reader.epoch(turn + 2)), train(memory())) for turn in range(turns)]
    return {"times": times, "rss_mb": peak_reading, "pid": os.getpid()}


def main() -> None:
    """Prints the peak resident set of each rank, and the step rate beside that of memory."""
    import farandole
    from farandole.spark.common.parquet import inspect
    from farandole.spark.common.store import Store

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        store = Store.create(place)
        began = time.perf_counter()
        data = inspect(store, store.get_train_data_path(prepare(store, options.rows)), ["features", "y"])
        print(
            f"{data.rows} rows written in {time.perf_counter() - began:.0f} s, {len(data.pieces)} row groups",
            flush=True,
        )
        found = farandole.run(lane, (store, data, options.batch, options.turns, options.steps), num_proc=2)
    peaks = ", ".join(f"{one['rss_mb']:.0f} MB" for one in found)
    print(f"peak resident set while training from the store: {peaks}")
    # Processor time is the fairer measure on a machine that has other work.
    for place, what in enumerate(("steps per second", "steps per second of processor time")):
        ratios = sorted(memory[place] / stored[place] for one in found for stored, memory in one["times"])
        rate = options.steps / min(stored[place] for one in found for stored, _ in one["times"])
        shown = ", ".join(f"{100 * one:.0f}" for one in ratios)
        print(f"{what}: {rate:.0f} from the store, {100 * ratios[len(ratios) // 2]:.0f} % of memory's (turns: {shown})")


if __name__ == "__main__":
    main()
