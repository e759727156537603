# What scripts write by hand: this rank's device, learning rates, seeds, and whether models are equal.
# Touches torch, objects, reductions and runtime.
"""Small conveniences around a training loop; none of them is needed."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from .. import errors
from ..groups import ProcessSet, global_process_set
from ..objects import allgather_object
from ..reductions import Adasum, Average
from ..runtime import local_rank, rank, runtime, size


def cuda_built() -> bool:
    """Whether CUDA tensors can be used: torch decides that."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether ROCm tensors can be used: torch decides that."""
    return torch.version.hip is not None


def device() -> torch.device:
    """This rank's device, made the current one: a GPU by local rank, or the CPU without GPUs."""
    place = local_rank()
    if not torch.cuda.is_available():
        return torch.device("cpu")
    chosen = torch.device("cuda", place % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen


def scale_lr(lr: float, op: Any = Average, backward_passes_per_step: int = 1) -> float:
    """The learning rate for the whole job, from that of one process: it grows with the batch, except for Adasum."""
    return lr * backward_passes_per_step * (1 if op == Adasum else size())


class WarmupLR(LambdaLR):
    """Raises the learning rate from that of one process to that of the job, a little after each batch.

    The optimizer's learning rate is the job's (see scale_lr). Call `step()` after each batch. Momentum needs no
    correction when the rate changes, as it does in Keras: torch keeps it apart from the rate.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, steps_per_epoch: int, warmup_epochs: float = 5, last_epoch: int = -1
    ) -> None:
        if steps_per_epoch < 1 or warmup_epochs < 0:
            raise ValueError(f"steps_per_epoch={steps_per_epoch}, warmup_epochs={warmup_epochs}: must be positive")
        ranks = size()

        def multiplier(step: int) -> float:
            epoch = (step + 1) / steps_per_epoch
            if epoch >= warmup_epochs:
                return 1.0
            return (epoch * (ranks - 1) / warmup_epochs + 1) / ranks

        super().__init__(optimizer, multiplier, last_epoch)


def set_seed(seed: int, per_rank: bool = False) -> int:
    """Seeds Python, NumPy and torch, everywhere alike or, for shuffling and augmentation, differently on each rank."""
    own = seed + rank() if per_rank else seed
    random.seed(own)
    np.random.seed(own % (1 << 32))
    torch.manual_seed(own)
    return own


def check_equal(model: Any, process_set: ProcessSet = global_process_set) -> None:
    """Raises Mismatch, on all ranks, unless the parameters and buffers have the same bits on all of them.

    `model`: a module or its state_dict. The error says which tensors differ, on which ranks.
    """
    tensors = model.state_dict() if isinstance(model, torch.nn.Module) else model
    if not isinstance(tensors, dict):
        raise TypeError(f"expected a module or its state_dict, not {type(model).__name__}")
    _, ranks = runtime.world.groups.members(process_set)
    everyones = allgather_object(
        {name: _digest(tensor) for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)},
        process_set=process_set,
    )
    names = dict.fromkeys(name for digests in everyones for name in digests)
    lines = []
    for name in names:
        found = [digests.get(name) for digests in everyones]
        usual, _ = Counter(found).most_common(1)[0]
        odd = [who for who, digest in zip(ranks, found, strict=True) if digest != usual]
        if odd:
            lines.append(f"{name} differs on rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))}")
    if lines:
        raise errors.Mismatch(f"the ranks are not equal: {'; '.join(lines)}")


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().to_dense().cpu().contiguous()
    digest = hashlib.blake2b(f"{values.dtype} {tuple(values.shape)}".encode(), digest_size=16)
    digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
