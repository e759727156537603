# The integrations as their users write them: Horovod on Ray, Lightning on Ray, Lightning on Ray with Horovod.
# Touches Ray, Lightning and Horovod's names alone; ray_cluster.py runs them in its driver.
"""Model and data are small, and `accelerator="auto"`; the rest is as people have it, `use_gpu=True` included."""

from __future__ import annotations

from typing import Any

import torch


def small() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Linear(4, 1)


def numbers() -> torch.utils.data.TensorDataset:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(2))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def module() -> Any:
    import lightning.pytorch as pl

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = small()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = torch.nn.functional.mse_loss(self.net(x), y)
            self.log("train_loss", loss, on_epoch=True, sync_dist=True)
            self.log("workers", float(self.trainer.world_size))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return Model()


def horovod_train_fn() -> Any:
    import horovod.torch as hvd

    hvd.init()
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    sampler: Any = torch.utils.data.DistributedSampler(numbers(), num_replicas=hvd.size(), rank=hvd.rank())
    loader = torch.utils.data.DataLoader(numbers(), batch_size=4, sampler=sampler)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    return losses, hvd.size()


def executor_pattern(storage: str) -> Any:
    """Horovod on Ray, by its executor."""
    from horovod.ray import RayExecutor

    settings = RayExecutor.create_settings(timeout_s=30)
    executor = RayExecutor(settings, num_workers=4, use_gpu=True)
    executor.start()
    results = executor.run(horovod_train_fn)
    executor.shutdown()
    return results


def horovod_train_func(config: dict[str, Any]) -> None:
    import ray.train

    losses, size = horovod_train_fn()
    for epoch, loss in enumerate(losses):
        ray.train.report({"epoch": epoch, "loss": loss, "size": size})


def horovod_trainer_pattern(storage: str) -> Any:
    """Horovod on Ray, by Ray Train."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.horovod import HorovodTrainer

    trainer = HorovodTrainer(
        train_loop_per_worker=horovod_train_func,
        train_loop_config={"lr": 0.05},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=True),
        run_config=RunConfig(storage_path=storage),
    )
    result = trainer.fit()
    return result.metrics


def lightning_train_func() -> None:
    import lightning.pytorch as pl
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer

    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="auto",
        devices="auto",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    trainer.fit(module(), train_dataloaders=torch.utils.data.DataLoader(numbers(), batch_size=4))


def lightning_pattern(storage: str) -> Any:
    """Lightning on Ray: Ray's own strategy, on our backend. With `use_gpu` that strategy would ask for CUDA."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        lightning_train_func,
        torch_config=TorchConfig(backend="farandole"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=storage),
    )
    result = trainer.fit()
    return result.metrics


def three_layers_train_func() -> None:
    import lightning.pytorch as pl
    from ray.train.lightning import RayTrainReportCallback

    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="auto",
        devices=1,
        strategy="horovod",
        callbacks=[RayTrainReportCallback()],
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(module(), train_dataloaders=torch.utils.data.DataLoader(numbers(), batch_size=4))


def three_layers_pattern(storage: str) -> Any:
    """Lightning on Ray with Horovod."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.horovod import HorovodTrainer

    trainer = HorovodTrainer(
        three_layers_train_func,
        scaling_config=ScalingConfig(num_workers=2, use_gpu=True),
        run_config=RunConfig(storage_path=storage),
    )
    result = trainer.fit()
    return result.metrics
