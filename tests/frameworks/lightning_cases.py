# Cases that run with Lightning's DDP on Gloo and with our strategy, and must give the same results.
# Touches Lightning and torch, inside ranks.
"""`CASES`: functions of "ddp" or "ours". Their results may differ only by rounding."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning_models import RANK, SCRATCH, SIZE, Gan, Regression, data, fresh, loader, trainer, weights
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

CASES: dict[str, Any] = {}


def case(function: Any) -> Any:
    CASES[function.__name__] = function
    return function


def metrics(found: Any) -> dict[str, Any]:
    return {name: torch.as_tensor(value) for name, value in found.items()}


@case
def training(kind: str) -> Any:
    """Sampler, sync_dist, torchmetrics, schedulers, validation, early stopping, checkpoints, loggers from rank 0."""
    folder = SCRATCH / f"training-{kind}"
    best = ModelCheckpoint(folder / "best", monitor="val_loss", save_top_k=1, save_last=True, filename="{epoch}")
    stop = EarlyStopping("val_loss", patience=1, min_delta=0.5, mode="min")
    loggers = [CSVLogger(folder, name="csv"), TensorBoardLogger(folder, name="tb")]
    runs = trainer(kind, max_epochs=6, callbacks=[best, stop], logger=loggers, enable_checkpointing=True)
    module = fresh()
    runs.fit(module, loader(), loader(24, shuffle=False))
    runs.strategy.barrier()
    state = torch.load(best.best_model_path, weights_only=False)
    assert sorted(path.name for path in (folder / "csv").iterdir()) == ["version_0"], "one run, from rank 0"
    assert len(list((folder / "tb" / "version_0").glob("events*"))) == 1, "one run, from rank 0"
    decisions = [stop.stopped_epoch, best.best_model_path, best.best_k_models, runs.current_epoch]
    all_values = runs.strategy.broadcast(decisions)
    assert str(decisions) == str(all_values), "ranks have decided differently"
    table = (folder / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    kept = {name: value for name, value in state.items() if name not in ("callbacks", "loops", "hyper_parameters")}
    return {
        "weights": weights(module),
        "metrics": metrics(runs.callback_metrics),
        "checkpoint": kept,
        "loops": state["loops"]["fit_loop"]["epoch_loop.batch_progress"],
        "names": sorted(state),
        "epochs": [runs.current_epoch, runs.global_step, stop.stopped_epoch],
        "logged": len(table),
        "samples": len(runs.train_dataloader.sampler),
        "rank": [runs.global_rank, runs.world_size, runs.local_rank, runs.is_global_zero, runs.num_nodes],
    }


@case
def accumulated_and_clipped(kind: str) -> Any:
    """Steps that only accumulate send nothing, and the averages are clipped."""
    module = fresh()
    seen: list[Any] = []

    class Observer(pl.Callback):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            grads = torch.cat([param.grad.flatten() for param in pl_module.parameters()])
            equal = bool((trainer.strategy.all_gather(grads) - grads).abs().max() < 1e-7)
            seen.append(equal)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            norm = torch.cat([param.grad.flatten() for param in pl_module.parameters()]).norm()
            seen.append(round(float(norm), 4))

    runs = trainer(
        kind, accumulate_grad_batches=3, gradient_clip_val=0.2, gradient_clip_algorithm="norm", callbacks=[Observer()]
    )
    runs.fit(module, loader(32 * SIZE, shuffle=False))
    assert [value for value in seen[:4] if isinstance(value, bool)] == [False, False, True], seen
    return {"weights": weights(module), "seen": seen, "steps": runs.global_step}


@case
def manual_optimization(kind: str) -> Any:
    module = fresh(Gan)
    runs = trainer(kind)
    runs.fit(module, loader())
    rates = [optimizer.param_groups[0]["lr"] for optimizer in runs.optimizers]
    return {"weights": weights(module), "rates": rates, "metrics": metrics(runs.callback_metrics)}


@case
def mixed_precision(kind: str) -> Any:
    module = fresh()
    trainer(kind, precision="bf16-mixed", gradient_clip_val=1.0).fit(module, loader())
    return {"weights": weights(module)}


@case
def resumed(kind: str) -> Any:
    """One epoch, a checkpoint, and another epoch from it, by another trainer; then validate, test and predict."""
    path = SCRATCH / f"resumed-{kind}.ckpt"
    first = trainer(kind, max_epochs=1)
    first.fit(fresh(), loader())
    first.save_checkpoint(path)
    module = fresh()
    runs = trainer(kind, max_epochs=2)
    runs.fit(module, loader(), ckpt_path=path)
    [validated] = runs.validate(module, loader(20, shuffle=False), verbose=False)
    [tested] = runs.test(module, loader(20, shuffle=False), verbose=False)
    batches: Any = runs.predict(module, loader(20, shuffle=False))
    predicted = torch.cat(batches)
    assert len(predicted) == -(-20 // SIZE)
    whole = {"weights": weights(module), "epochs": [runs.current_epoch, runs.global_step]}
    return {**whole, "validated": metrics(validated), "tested": metrics(tested), "predicted": predicted}


class Normalised(Regression):
    """Buffers that differ between ranks until a broadcast makes them equal."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


@case
def buffers(kind: str) -> Any:
    module = fresh(Normalised)
    runs = trainer(kind)
    runs.fit(module, loader(), loader(24, shuffle=False))
    shown = weights(module) if RANK == 0 else {}  # the averages of other ranks differ until the next validation
    return {"weights": shown, "metrics": metrics(runs.callback_metrics)}


@case
def operations(kind: str) -> Any:
    """Gathers stack tensors, also scalars; reductions; gradients through a gather."""
    found: dict[str, Any] = {}

    class Ask(Regression):
        def on_train_start(self) -> None:
            local = torch.arange(3.0) + 10 * RANK
            found["stacked"] = self.all_gather(local)
            found["scalar"] = self.all_gather(torch.tensor(float(RANK)))
            found["tree"] = self.all_gather({"a": local, "b": [local + 1]})
            kept = local.clone().requires_grad_()
            all_values: Any = self.all_gather(kept, sync_grads=True)
            (all_values * (RANK + 1)).sum().backward()
            found["gradient"] = kept.grad
            reduce = self.trainer.strategy.reduce
            for op in ("mean", "sum", "max", "min"):
                found[op] = reduce(local.clone(), reduce_op=op)
            found["whole"] = reduce(torch.tensor([RANK, 2]), reduce_op="sum")
            found["other"] = reduce("text")
            found["all"] = self.trainer.strategy.reduce_boolean_decision(RANK == 0)
            found["any"] = self.trainer.strategy.reduce_boolean_decision(RANK == 0, all=False)
            found["told"] = self.trainer.strategy.broadcast({"rank": RANK}, src=SIZE - 1)

    trainer(kind, max_epochs=1).fit(fresh(Ask), loader())
    return found


@case
def with_fabric(kind: str) -> Any:
    """Fabric: setup, accumulation, clipping, loaders, checkpoints."""
    chosen = FabricDDP(process_group_backend="gloo") if kind == "ddp" else "farandole"
    fabric = Fabric(accelerator="cpu", devices=SIZE if kind == "ddp" else 1, strategy=chosen)
    fabric.launch()
    model = fresh().net
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 0.01))
    batches = fabric.setup_dataloaders(DataLoader(data(), 4))
    for _ in range(2):
        for index, (x, y) in enumerate(batches):
            inner = index % 2 == 0
            with fabric.no_backward_sync(model, enabled=inner):
                fabric.backward(mse_loss(model(x), y))
            if not inner:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
    path = SCRATCH / f"fabric-{kind}.ckpt"
    fabric.save(path, {"model": model, "epoch": 2})
    fabric.barrier()
    mean = fabric.all_reduce(torch.tensor(float(RANK)))
    return {
        "weights": weights(model),
        "saved": torch.load(path, weights_only=False)["model"],
        "gathered": fabric.all_gather(torch.tensor([float(RANK)])),
        "mean": mean,
        "told": fabric.broadcast(f"from {RANK}"),
        "batches": len(batches),
    }
