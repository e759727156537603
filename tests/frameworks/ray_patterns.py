# Programs as users write them: Horovod on Ray, Lightning on Ray, Lightning with Horovod on Ray.
# Imports only Ray, Lightning, torch and `horovod`. The driver of ray_cluster.py runs the programs.
"""They differ from real programs only in their small model and data, and in `accelerator="auto"`."""

from __future__ import annotations

from typing import Any

import torch


def small_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Linear(4, 1)


def dataset() -> torch.utils.data.TensorDataset:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(2))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def lightning_module() -> Any:
    import lightning.pytorch as pl

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_model()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = torch.nn.functional.mse_loss(self.net(x), y)
            self.log("train_loss", loss, on_epoch=True, sync_dist=True)
            self.log("workers", float(self.trainer.world_size))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return Model()


def horovod_train_function() -> Any:
    import horovod.torch as hvd

    hvd.init()
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    sampler: Any = torch.utils.data.DistributedSampler(dataset(), num_replicas=hvd.size(), rank=hvd.rank())
    loader = torch.utils.data.DataLoader(dataset(), batch_size=4, sampler=sampler)
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
    """Horovod on Ray, with RayExecutor."""
    from horovod.ray import RayExecutor

    settings = RayExecutor.create_settings(timeout_s=30)
    executor = RayExecutor(settings, num_workers=4, use_gpu=True)
    executor.start()
    results = executor.run(horovod_train_function)
    executor.shutdown()
    return results


def horovod_train_loop(config: dict[str, Any]) -> None:
    import ray.train

    losses, size = horovod_train_function()
    for epoch, loss in enumerate(losses):
        ray.train.report({"epoch": epoch, "loss": loss, "size": size})


def horovod_trainer_pattern(storage: str) -> Any:
    """Horovod on Ray, with Ray Train."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.horovod import HorovodTrainer

    trainer = HorovodTrainer(
        train_loop_per_worker=horovod_train_loop,
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
    trainer.fit(lightning_module(), train_dataloaders=torch.utils.data.DataLoader(dataset(), batch_size=4))


def lightning_pattern(storage: str) -> Any:
    """Lightning on Ray: Ray's own strategy with our backend. It has no `use_gpu`: then the strategy would need CUDA."""
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
    trainer.fit(lightning_module(), train_dataloaders=torch.utils.data.DataLoader(dataset(), batch_size=4))


def three_layers_pattern(storage: str) -> Any:
    """Lightning with Horovod on Ray."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.horovod import HorovodTrainer

    trainer = HorovodTrainer(
        three_layers_train_func,
        scaling_config=ScalingConfig(num_workers=2, use_gpu=True),
        run_config=RunConfig(storage_path=storage),
    )
    result = trainer.fit()
    return result.metrics
