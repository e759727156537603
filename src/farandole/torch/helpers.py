# Helpers that scripts often need: this rank's device, learning rates, seeds, and a check that models are equal.
# Touches torch; the rooms base, operations and world.
"""Small helpers for a training loop; none of them is required."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from ..base import errors
from ..operations.objects import allgather_object
from ..operations.reductions import Adasum, Average
from ..world.basics import local_rank, rank, size
from ..world.groups import ProcessSet, global_process_set
from ..world.runtime import runtime


def cuda_built() -> bool:
    """Whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built with ROCm."""
    return torch.version.hip is not None


def device() -> torch.device:
    """Chooses this rank's device: a GPU by local rank, which becomes the current one, or the CPU if there is no GPU."""
    device_index = local_rank()
    if not torch.cuda.is_available():
        return torch.device("cpu")
    chosen = torch.device("cuda", device_index % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen


def scale_lr(lr: float, op: Any = Average, backward_passes_per_step: int = 1) -> float:
    """The learning rate for the whole job from the rate of one process: it grows with the batch, except for Adasum."""
    return lr * backward_passes_per_step * (1 if op == Adasum else size())


class WarmupLR(LambdaLR):
    """Raises the learning rate after each batch, from the rate of one process to the rate of the job.

    The optimizer's learning rate must be the rate of the job (see scale_lr). Call `step()` after each batch. Momentum
    needs no correction as in Keras, because torch keeps it independent of the rate.
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
    """Seeds Python, NumPy and torch: with the same seed on all ranks or, for shuffling and augmentation, one for each
    rank.
    """
    own = seed + rank() if per_rank else seed
    random.seed(own)
    np.random.seed(own % (1 << 32))
    torch.manual_seed(own)
    return own


def check_equal(model: Any, process_set: ProcessSet = global_process_set) -> None:
    """Raises Mismatch on all ranks if any parameter or buffer does not have the same bits on all ranks.

    `model`: a module or its state_dict. The error says which tensors differ, and on which ranks.
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
