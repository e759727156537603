"""The package lightning-horovod: its strategy in a Trainer, under horovodrun.
Ends with the weights of one process on the batches of all ranks."""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_horovod import HorovodStrategy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import horovod.torch as hvd


class BoringModel(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.layer.parameters(), lr=0.1)

    def train_dataloader(self):
        data = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)))
        sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
        return DataLoader(data, batch_size=16 // hvd.size() // 2, sampler=sampler)


hvd.init()
options = {
    "use_distributed_sampler": False,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
for strategy in (HorovodStrategy(), "horovod"):
    model = BoringModel()
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=2, **options)
    trainer.fit(model)
    assert trainer.world_size == hvd.size() and trainer.global_rank == hvd.rank()
    alone = BoringModel()
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    each = 16 // hvd.size() // 2
    for _ in range(2 * 2):
        step = _ % 2
        rows = [r for rank in range(hvd.size()) for r in range(rank, 16, hvd.size())[step * each : (step + 1) * each]]
        alone.layer.zero_grad()
        alone.layer(data[rows]).square().mean().backward()
        with torch.no_grad():  # the strategy multiplies the learning rate by the number of ranks
            for p in alone.layer.parameters():
                p -= 0.1 * hvd.size() * p.grad
    torch.testing.assert_close(model.layer.weight, alone.layer.weight, rtol=1e-4, atol=1e-6)
