"""What reading costs an estimator: TorchEstimator.fit on a DataFrame of a million rows of 200 columns, and the same
rows held in memory. Writes about 0.8 GB of Parquet with Spark: `python bench/spark_million.py --json FILE`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLUMNS = 200
RSS_MB, RATE = 1500, 0.9  # what is to be reached: at most, at least


def session() -> Any:
    """Spark with two slots, on this machine."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark would take whichever python3 comes first
    from pyspark.sql import SparkSession

    return (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "3g")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )


def million(spark: Any, rows: int) -> Any:
    """A DataFrame of so many rows."""
    from pyspark.ml.feature import VectorAssembler
    from pyspark.sql import functions as F

    names = [f"x{n}" for n in range(COLUMNS)]
    columns = [F.rand(n).cast("float").alias(name) for n, name in enumerate(names)]
    frame = spark.range(0, rows, 1, 20).select(*columns).withColumn("y", F.col("x0") + 2 * F.col("x1"))
    return VectorAssembler(inputCols=names, outputCol="features").transform(frame)


def modules() -> tuple[type, type]:
    """Data modules for the ranks: the estimator's own, watched; and one that takes every other epoch from memory."""
    import numpy as np

    import farandole as hvd
    from farandole.spark.common.datamodule import ParquetDataModule
    from farandole.spark.common.reader import WINDOW_BYTES

    class Watched(ParquetDataModule):
        """Writes down what each epoch took, from the first batch that is asked for to the end of the last step."""

        seen: list[dict[str, Any]] | None = None

        def train_data(self, epoch: int) -> Iterator[Any]:
            """The batches of an epoch."""
            source, batches = self.chosen(epoch)
            hvd.barrier()
            began, worked = time.perf_counter(), time.process_time()
            yield from batches
            worked = time.process_time() - worked
            hvd.barrier()
            seconds = time.perf_counter() - began
            (peak,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
            one = {"source": source, "seconds": seconds, "cpu": worked, "peak_mb": int(peak.split()[1]) // 1024}
            self.seen = [*(self.seen or []), one]
            logs = self.task.remote.logs_path
            self.task.remote.store.write_text(f"{logs}/rank{self.rank}.json", json.dumps([self.train_steps, self.seen]))

        def chosen(self, epoch: int) -> tuple[str, Iterator[Any]]:
            """Where they come from, and they."""
            return "store", super().train_data(epoch)

    class ByTurns(Watched):
        """Every other epoch from memory, so that the moods of the machine fall on both."""

        held: dict[str, Any] | None = None

        def chosen(self, epoch: int) -> tuple[str, Iterator[Any]]:
            """Where they come from, and they."""
            return super().chosen(epoch) if epoch % 2 == 0 else ("memory", self.remembered(epoch))

        def remembered(self, epoch: int) -> Iterator[Any]:
            """This rank's rows, shuffled as the reader does it: blocks among each other, and rows inside of each."""
            if self.held is None:
                parts = list(ParquetDataModule.train_data(self, 0))
                self.held = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            held, batch = self.held, self.task.options["batch_size"]
            rows = len(held["y"])
            block = WINDOW_BYTES // (sum(values.nbytes for values in held.values()) // rows)
            draw = np.random.default_rng([self.rank, epoch])
            starts = draw.permutation(np.arange(0, rows, block))
            order = np.concatenate([one + draw.permutation(min(block, rows - one)) for one in starts])
            return ({n: values[order[at : at + batch]] for n, values in held.items()} for at in range(0, rows, batch))

    return Watched, ByTurns


def fit(frame: Any, store: Any, run: str, module: type, batch: int, epochs: int) -> list[list[dict[str, Any]]]:
    """A fit of TorchEstimator; what each rank has seen in its epochs, with the steps per second."""
    import torch

    from farandole.spark.torch import TorchEstimator

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(COLUMNS, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    estimator = TorchEstimator(
        num_proc=2,
        store=store,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=torch.nn.MSELoss(),
        feature_cols=["features"],
        label_cols=["y"],
        batch_size=batch,
        epochs=epochs,
        random_seed=1,
        run_id=run,
        data_module=module,
        verbose=0,
    )
    fitted = estimator.fit(frame)
    losses = [one["train"]["loss"] for one in fitted.getHistory()]
    print(f"{run}: {epochs} epochs, loss from {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
    found = []
    for rank in range(2):
        steps, seen = json.loads(store.read(f"{store.get_logs_path(run)}/rank{rank}.json"))
        found.append([{**one, "steps": steps, "rate": steps / one["seconds"]} for one in seen])
    return found


def compared(found: list[list[dict[str, Any]]], measure: str) -> list[float]:
    """The rate from the store as a part of that from memory, for each turn of each rank but the first ones."""
    return [
        memory[measure] / stored[measure]
        for rank in found
        for stored, memory in zip(rank[2::2], rank[3::2], strict=True)
    ]


def main() -> None:
    """Prints the peak resident set of each rank, and the step rate, with that of data in memory."""
    from farandole.spark.common.store import Store

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=3, help="of the fit whose memory is watched")
    parser.add_argument("--turns", type=int, default=5, help="epochs from the store, and as many from memory")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    watched, by_turns = modules()
    spark = session()
    frame = million(spark, options.rows)
    with tempfile.TemporaryDirectory() as path:
        store = Store.create(path)
        plain = fit(frame, store, "plain", watched, options.batch, options.epochs)
        # The same DataFrame: its Parquet is written once.
        turns = fit(frame, store, "by turns", by_turns, options.batch, 2 * (options.turns + 1))
    spark.stop()
    peaks = [max(one["peak_mb"] for one in rank) for rank in plain]
    rates = {
        name: statistics.median(compared(turns, measure)) for name, measure in (("clock", "seconds"), ("cpu", "cpu"))
    }
    print(
        f"fit of {options.rows} rows, {plain[0][0]['steps']} steps an epoch, {plain[0][-1]['rate']:.0f} steps a second"
    )
    print(f"peak resident set of the ranks: {peaks} MB; at most {RSS_MB} wanted")
    clock, cpu = 100 * rates["clock"], 100 * rates["cpu"]
    print(f"step rate from the store: {clock:.0f} % of memory's; at least {100 * RATE:.0f} wanted")
    print(f"by processor time, which other work on the machine does not blur: {cpu:.0f} %")
    if options.json is not None:
        made = {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "rows": options.rows,
            "columns": COLUMNS,
            "batch": options.batch,
            "limits": {"peak_mb": RSS_MB, "rate": RATE},
            "peak_mb": peaks,
            "rate_of_memory": rates,
            "turns": {name: compared(turns, measure) for name, measure in (("clock", "seconds"), ("cpu", "cpu"))},
            "fits": {"plain": plain, "by turns": turns},
        }
        options.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
