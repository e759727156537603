"""What Ray costs a training step: the same loop under our own launcher, in a RayExecutor and in a HorovodTrainer.
The three take turns, so that the noise of the machine falls on all alike: `python bench/ray_overhead.py`."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

WARM, STEPS = 30, 150


def lane(config: dict[str, Any]) -> None:
    """One of the three: trains so many steps whenever its turn has come, and writes down what a step took."""
    import torch
    from torch.nn.functional import cross_entropy

    import farandole.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    x, y = torch.randn(128, 256), torch.randint(10, (128,))
    place, name = Path(config["place"]), config["name"]
    for turn in range(config["turns"]):
        while not (place / f"{name}.{turn}").exists():
            time.sleep(0.01)
        for step in range(WARM + STEPS):
            if step == WARM:
                hvd.barrier()
                began = time.perf_counter()
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        seconds = (time.perf_counter() - began) / STEPS
        if hvd.rank() == 0:
            (place / f"{name}.{turn}.new").write_text(str(seconds))
            (place / f"{name}.{turn}.new").rename(place / f"{name}.{turn}.done")


def begin(name: str, config: dict[str, Any]) -> threading.Thread:
    """Starts a lane, with two ranks."""
    import farandole
    from farandole.ray import HorovodTrainer, RayExecutor

    def work() -> None:
        if name == "launcher":
            farandole.run(lane, (config,), num_proc=2)
        elif name == "RayExecutor":
            with RayExecutor(RayExecutor.create_settings(120), num_workers=2) as executor:
                executor.run(lane, args=[config])
        else:
            from ray.train import RunConfig, ScalingConfig

            scaling, run = ScalingConfig(num_workers=2), RunConfig(storage_path=config["place"])
            HorovodTrainer(lane, train_loop_config=config, scaling_config=scaling, run_config=run).fit()

    thread = threading.Thread(target=work, name=name)
    thread.start()
    return thread


def main() -> None:
    """Prints the median of each lane, and how far it is from the launcher's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=12)
    turns = parser.parse_args().turns
    import ray

    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    names = ["launcher", "RayExecutor", "HorovodTrainer"]
    found: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as place:
        threads = [begin(name, {"place": place, "name": name, "turns": turns}) for name in names]
        for turn in range(turns):
            for name in names if turn % 2 else reversed(names):
                Path(place, f"{name}.{turn}").touch()
                while not (answer := Path(place, f"{name}.{turn}.done")).exists():
                    time.sleep(0.01)
                found[name].append(float(answer.read_text()))
        for thread in threads:
            thread.join()
    ray.shutdown()
    base = found["launcher"]
    for name in names:
        # Neighbours in time are compared: the machine was in the same mood.
        against = statistics.median(mine / other for mine, other in zip(found[name], base, strict=True))
        print(f"{name:15} {1e3 * statistics.median(found[name]):.3f} ms per step, {100 * (against - 1):+.1f} %")


if __name__ == "__main__":
    main()
