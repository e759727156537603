# Copies of trees with tensors, in memory that the next copy uses again; and torch's tensors in checkpoints.
# Touches torch, trees and elastic/trees.
"""Commits are frequent, so a commit copies bytes and allocates memory only the first time."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...elastic import trees
from ...elastic.safetensors import TYPES, Block, Damaged
from ..trees import join, split


@dataclass
class Copy:
    """The copy of a tree: its tensors, and the rest with marks where the tensors were."""

    rest: Any = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    readers: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, tree: Any) -> Copy:
        """A copy of `tree`. It uses this copy's memory again, unless someone reads this one."""
        with self.lock:
            free = list(self.tensors) if self.readers == 0 else []
        rest, tensors = split(tree)
        copies = []
        with torch.no_grad():
            for index, tensor in enumerate(tensors):
                old = free[index] if index < len(free) else None
                if old is None or not _fits(old, tensor):
                    old = torch.empty_like(tensor.detach(), memory_format=torch.preserve_format)
                copies.append(old.copy_(tensor.detach()))
        return Copy(rest, copies)

    def tree(self, fresh: bool = False) -> Any:
        """Rebuilds the tree; `fresh`: with new tensors."""
        return join(self.rest, [tensor.clone() for tensor in self.tensors] if fresh else self.tensors)

    def pin(self) -> None:
        with self.lock:
            self.readers += 1

    def release(self) -> None:
        with self.lock:
            self.readers -= 1

    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


def _fits(old: torch.Tensor, new: torch.Tensor) -> bool:
    return bool(
        old.shape == new.shape
        and old.dtype == new.dtype
        and old.device == new.device
        and old.layout == new.layout == torch.strided
    )


# --- in checkpoints --------------------------------------------------------------------------------------------------

_DTYPES = {kind: dtype for name, (kind, _) in TYPES.items() if (dtype := getattr(torch, name, None)) is not None}
_NAMES = {dtype: kind for kind, dtype in _DTYPES.items()}


def _to_block(tensor: torch.Tensor) -> Block:
    if tensor.layout != torch.strided or tensor.dtype not in _NAMES:
        raise TypeError(f"a tensor of {tensor.dtype}, {tensor.layout} cannot be written to a checkpoint")
    whole = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return Block(_NAMES[tensor.dtype], tuple(tensor.shape), whole.reshape(-1).view(torch.uint8).numpy())


def _from_block(block: Block) -> torch.Tensor:
    if block.dtype not in _DTYPES:
        raise Damaged(f"torch has no {block.dtype}")
    data = np.array(block.data)  # own memory, which is aligned
    return torch.from_numpy(data).view(_DTYPES[block.dtype]).reshape(block.shape)


trees.KINDS["torch"] = trees.Kind(lambda value: isinstance(value, torch.Tensor), _to_block, _from_block)
