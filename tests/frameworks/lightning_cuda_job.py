# A rank that trains with Lightning on a GPU, which all ranks may share: our strategy, and Lightning's over our backend.
# Touches Lightning, torch and CUDA.
"""Asserts by itself, and prints what it has shown."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import farandole.autoload

farandole.autoload.register()  # what torch's import does after `pip install`
warnings.filterwarnings("ignore")
pl: Any = importlib.import_module("lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning")
RANK, SIZE = os.environ["RANK"], int(os.environ["WORLD_SIZE"])  # Lightning removes them
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed")


class Module(pl.LightningModule):  # type: ignore[misc]
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        assert x.is_cuda and next(self.parameters()).is_cuda
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.trainer.model.parameters(), 0.05)  # of FSDP's module, where there is one


def trained(strategy: Any, precision: str, **options: Any) -> tuple[float, list[torch.Tensor]]:
    """The last loss, and the parameters."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    options |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        strategy=strategy, accelerator="gpu", devices=1, precision=precision, max_epochs=2,
        enable_model_summary=False, **options,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8))
    assert trainer.world_size == SIZE
    return float(trainer.callback_metrics["loss"]), [param.detach().cpu() for param in module.parameters()]


def main() -> None:
    """By its name, as Horovod's users write it; then DDP and FSDP, on nodes of one rank each: they share a GPU so."""
    ours = {precision: trained("farandole", precision) for precision in PRECISIONS}
    os.environ.update(NODE_RANK=RANK, LOCAL_RANK="0")
    strategies = importlib.import_module(f"{pl.__name__}.strategies")
    for precision, (loss, params) in ours.items():
        ddp = strategies.DDPStrategy(process_group_backend="farandole")
        other, wanted = trained(ddp, precision, num_nodes=SIZE)
        assert loss == other and all(map(torch.equal, params, wanted)), (precision, loss, other)
        print(f"as DDP: {precision}", flush=True)
    for precision in PRECISIONS:
        ddp = strategies.FSDPStrategy(process_group_backend="farandole")
        other, _ = trained(ddp, precision, num_nodes=SIZE)
        assert abs(other - ours[precision][0]) < 0.01 * other, (precision, other, ours[precision][0])
        print(f"FSDP: {precision}", flush=True)


if __name__ == "__main__":
    main()
