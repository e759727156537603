# Replaces batch normalisation by one over all ranks for `Trainer(sync_batchnorm=True)`, and reverts this.
# Touches only torch.
"""SyncBatchNorm of torch needs CUDA; ours does not."""

from __future__ import annotations

from typing import Any

import torch

from ..bindings.private.torch_names import batch_norms
from ..torch.sync_batch_norm import SyncBatchNorm


def convert(module: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """Replaces the batch normalisations below `module`. Returns them, with their parents, for `revert`."""
    replaced = []
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, batch_norms()) and not isinstance(child, (SyncBatchNorm, torch.nn.SyncBatchNorm)):
                old: Any = child
                replacement: Any = SyncBatchNorm(
                    old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats
                )
                _take_over(replacement, child)
                replacement.replaced = [child]  # in a list, so that it is not a submodule
                setattr(parent, name, replacement)
                replaced.append((parent, name))
    return replaced


def revert(replaced: list[tuple[torch.nn.Module, str]]) -> None:
    """Restores the modules that `convert` replaced, with the trained values."""
    for parent, name in replaced:
        current = getattr(parent, name)
        [original] = current.replaced
        _take_over(original, current)
        setattr(parent, name, original)


def _take_over(new: torch.nn.Module, old: torch.nn.Module) -> None:
    for name in ("weight", "bias"):
        new.register_parameter(name, getattr(old, name))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        new.register_buffer(name, getattr(old, name))
    new.train(old.training)
