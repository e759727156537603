"""What Ray and Lightning cost a training step of examples/three_layers.py: its model and data in a plain loop under our
launcher, in Ray's executor and trainer, and in Lightning inside a HorovodTrainer (three layers); and on one rank, in a
plain loop and in Lightning, by itself and with our strategy: that is Lightning's own share. They take turns, so that
the noise of the machine falls on all alike: `python bench/ray_overhead.py`."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

WARM = 3
EXAMPLES = Path(__file__).parents[1] / "examples"
ALONE = ["one rank", "Lightning", "Lightning, ours"]  # one rank each
LAYERS = ["launcher", "RayExecutor", "HorovodTrainer", "three layers"]
NAMES = [*LAYERS, *ALONE]


class Turns:
    """One lane's turns: waits for them, and writes down what a step took, by the clock and of the CPU."""

    def __init__(self, config: dict[str, Any]) -> None:
        import farandole as hvd

        self.folder, self.name, self.steps = Path(config["folder"]), config["name"], config["steps"]
        self.barrier, self.writes = hvd.barrier, hvd.rank() == 0
        self.turn = self.step = 0

    def wait(self) -> None:
        """Until it is this lane's turn."""
        while not (self.folder / f"{self.name}.{self.turn}").exists():
            time.sleep(0.01)

    def passed(self) -> None:
        """After each step."""
        self.step += 1
        if self.step == WARM:
            self.barrier()
            self.clock, self.cpu = time.perf_counter(), time.process_time()
        if self.step == WARM + self.steps:
            found = [(time.perf_counter() - self.clock) / self.steps, (time.process_time() - self.cpu) / self.steps]
            if self.writes:
                (self.folder / "new").write_text(" ".join(map(str, found)))
                (self.folder / "new").rename(self.folder / f"{self.name}.{self.turn}.done")
            self.turn, self.step = self.turn + 1, 0


def made(config: dict[str, Any]) -> tuple[Any, Any]:
    """The example's module, and a loader with one turn's batches."""
    import torch
    from torch.utils.data import DataLoader, Subset

    sys.path.insert(0, config["examples"])
    from three_layers import Digits

    torch.set_num_threads(1)  # Ray gives its workers one; the launcher's ranks would take all
    torch.manual_seed(1)
    module = Digits()
    loader = module.train_dataloader()
    batch = config["batch"] or loader.batch_size
    rows = [row % len(loader.dataset) for row in range(batch * (WARM + config["steps"]))]
    return module, DataLoader(Subset(loader.dataset, rows), batch)


def plain(config: dict[str, Any]) -> None:
    """A loop as scripts for Horovod have it."""
    from torch.nn.functional import cross_entropy

    import farandole.torch as hvd

    hvd.init()
    module, loader = made(config)
    model, optimizer = module.net, module.configure_optimizers()
    if config["name"] not in ALONE:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    turns = Turns(config)
    for _ in range(config["turns"]):
        turns.wait()
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            turns.passed()


def layered(config: dict[str, Any]) -> None:
    """The same in Lightning's Trainer, as in examples/three_layers.py."""
    import lightning.pytorch as pl

    import farandole as hvd
    import farandole.lightning  # strategy="horovod", where no entry point is installed

    hvd.init()
    module, loader = made(config)
    turns = Turns(config)

    class TakesTurns(pl.Callback):
        def on_train_epoch_start(self, *_: Any) -> None:
            turns.wait()

        def on_train_batch_end(self, *_: Any) -> None:
            turns.passed()

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = "auto" if config["name"] == "Lightning" else "horovod"
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=config["turns"], use_distributed_sampler=False,
        enable_model_summary=False, callbacks=[TakesTurns()], **quiet,
    )  # fmt: skip
    trainer.fit(module, loader)


def begin(name: str, config: dict[str, Any]) -> threading.Thread:
    """Starts a lane, with two ranks, or with one."""
    import farandole
    from farandole.ray import HorovodTrainer, RayExecutor

    def work() -> None:
        if name == "launcher":
            farandole.run(plain, (config,), num_proc=2)
        elif name in ALONE:
            farandole.run(plain if name == ALONE[0] else layered, (config,), num_proc=1)
        elif name == "RayExecutor":
            with RayExecutor(RayExecutor.create_settings(120), num_workers=2) as executor:
                executor.run(plain, args=[config])
        else:
            from ray.train import RunConfig, ScalingConfig

            loop = layered if name == "three layers" else plain
            scaling, run = ScalingConfig(num_workers=2), RunConfig(storage_path=config["folder"])
            HorovodTrainer(loop, train_loop_config=config, scaling_config=scaling, run_config=run).fit()

    thread = threading.Thread(target=work, name=name)
    thread.start()
    return thread


def main() -> None:
    """Takes turns, and prints what they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20, help="in a turn")
    parser.add_argument("--batch", type=int, help="rows of a step: how much it computes for its gradients")
    parser.add_argument("--lanes", nargs="+", choices=NAMES, default=NAMES, help="some of them alone")
    options = parser.parse_args()
    chosen = [name for name in NAMES if name in options.pools]
    import ray

    if not set(chosen).isdisjoint(LAYERS[1:]):
        # By default Ray's workers have a lower priority than other processes. Here both run, so Ray's would wait.
        quiet: dict[str, Any] = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
        ray.init(num_cpus=2 * len(LAYERS), _system_config={"worker_niceness": 0}, **quiet)
    found: dict[str, list[list[float]]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory() as path:
        config = {**vars(options), "folder": path, "examples": str(EXAMPLES)}
        threads = [begin(name, {**config, "name": name}) for name in chosen]
        for turn in range(options.turns):
            for name in chosen if turn % 2 else reversed(chosen):
                Path(path, f"{name}.{turn}").touch()
                while not (answer := Path(path, f"{name}.{turn}.done")).exists():
                    time.sleep(0.01)
                found[name].append([float(word) for word in answer.read_text().split()])
        for thread in threads:
            thread.join()
    ray.shutdown()
    report({name: times[1:] for name, times in found.items()})  # the first turn is a warm-up


def report(found: dict[str, list[list[float]]]) -> None:
    """Neighbours in time are compared: the machine was in the same mood."""

    def median(name: str, base: str, at: int, how: Any) -> float:
        return statistics.median(
            float(how(one[at], other[at])) for one, other in zip(found[name], found[base], strict=True)
        )

    for name in found:
        base = next(one for one in (ALONE if name in ALONE else LAYERS) if one in found)
        parts = []
        for at, kind in enumerate(("ms", "ms of CPU")):
            against = median(name, base, at, lambda one, other: one / other - 1)
            typical = statistics.median(one[at] for one in found[name])
            parts.append(f"{1e3 * typical:8.2f} {kind} per step ({100 * against:+.1f} %)")
        print(f"{name:16} {', '.join(parts)}")
    if len(found) < len(NAMES):
        return
    for at, kind in enumerate(("ms", "ms of CPU")):
        whole = 1e3 * median("three layers", "launcher", at, lambda one, other: one - other)
        theirs = 1e3 * median("Lightning", "one rank", at, lambda one, other: one - other)
        step = 1e3 * statistics.median(one[at] for one in found["launcher"])
        rest = f"without it {whole - theirs:+.2f} ({100 * (whole - theirs) / step:+.1f} %)"
        print(f"three layers cost {whole:+.2f} {kind} per step; Lightning by itself {theirs:+.2f}, {rest}")


if __name__ == "__main__":
    main()
