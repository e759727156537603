# Distributed checkpoints: what some ranks save, another number of them loads.
# Touches torch.distributed as users see it, and the folder that CHECKPOINT names.
"""The first run saves, later ones load; all give the whole parameters and optimizer state."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_job import case
from distributed_training_cases import model_of, steps, whole
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def _sharded(seed: int) -> Any:
    model = model_of(seed)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _everything(model: Any, optimizer: Any) -> list[Any]:
    moments = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
    return [whole(model), [each.full_tensor() if isinstance(each, DTensor) else each for each in moments]]


def _checkpoint(folder: str, save: Any, rank: int) -> Any:
    if not os.path.exists(folder):
        dist.barrier()
        model, optimizer = _sharded(1)
        steps(model, optimizer, rank)
        parts = get_state_dict(model, optimizer)
        save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=folder)
        return _everything(model, optimizer)
    model, optimizer = _sharded(2)
    steps(model, optimizer, rank, 1)
    parts = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": parts[0], "optimizer": parts[1]}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return _everything(model, optimizer)


@case
def saved(rank: int, size: int) -> Any:
    return _checkpoint(os.environ["CHECKPOINT"] + "/saved", dcp.save, rank)


@case
def saved_in_the_background(rank: int, size: int) -> Any:
    def save(state: Any, checkpoint_id: str) -> None:
        saving: Any = dcp.async_save(state, checkpoint_id=checkpoint_id)
        saving.result()

    return _checkpoint(os.environ["CHECKPOINT"] + "/background", save, rank)
