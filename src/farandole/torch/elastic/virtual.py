# VirtualSteps: training whose bits depend neither on the number of ranks nor on ranks that come or go.
# Touches torch; the rooms bindings.private, elastic, torch.autograd and world; the file loader.
"""Each shard of a step has its own backward pass. One fixed tree over the shards adds the gradients."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ...bindings.private.torch_names import batch_norms
from ...elastic.sampler import share_of_rank
from ...elastic.virtual import Tree, checked_size, widths
from ...world.runtime import runtime
from ..autograd import allgather, alltoall
from .loader import Shard

__all__ = ["VirtualSteps"]

logger = logging.getLogger("farandole")


class VirtualSteps:
    """Steps of an optimizer over the shards of an ElasticDataLoader with `virtual_size`.

    The final weights have the same bits for any number of ranks and any history of losses, on equal machines, if the
    model's forward pass depends only on weights and input (no BatchNorm). The optimizer is one of torch, not a
    DistributedOptimizer.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, virtual_size: int | None = None) -> None:
        if hasattr(optimizer, "skip_synchronize"):
            raise ValueError("optimizer is a DistributedOptimizer; VirtualSteps adds the gradients up by itself")
        norms = [name for name, module in model.named_modules() if isinstance(module, batch_norms())]
        if norms:
            warnings.warn(
                f"{', '.join(norms[:3])}: BatchNorm depends on the number of ranks, and so will the weights",
                stacklevel=2,
            )
        size = runtime.config.virtual_size if virtual_size is None else virtual_size
        self.virtual_size = checked_size(size)
        self.optimizer = optimizer
        self.params = [param for group in optimizer.param_groups for param in group["params"]]
        kinds = {(param.dtype, param.device) for param in self.params}
        if len(kinds) != 1:
            raise ValueError(f"the parameters have several types or devices, which VirtualSteps cannot add up: {kinds}")
        [(self._dtype, self._device)] = kinds
        self._sizes = [param.numel() for param in self.params]
        # The row also has a mark for each parameter that had a gradient, and the loss.
        self._length = sum(self._sizes) + len(self.params) + 1
        self._warned = False

    def step(self, shards: Sequence[Shard], loss_of: Callable[..., torch.Tensor]) -> float:
        """One step: `loss_of(*data)` is the mean loss of a shard's samples. Gives the mean over all samples."""
        tree: Tree[torch.Tensor] = Tree(torch.Tensor.add_)
        own = {shard.number: shard for shard in shards}
        world = runtime.world.engine
        for number in share_of_rank(self.virtual_size, world.rank, world.size):
            tree.push(number, 1, self._contribution(own.pop(number, None), loss_of))
        if own:
            raise ValueError(f"shards {sorted(own)} are not this rank's; take them from a loader of the same size")
        total = self._total([node for _, _, node in tree.nodes])
        if not self._warned:
            self._warned = True
            logger.info("%s", self.describe_cost())
        loss = self._deliver(total)
        self.optimizer.step()
        return loss

    def _contribution(self, shard: Shard | None, loss_of: Callable[..., torch.Tensor]) -> torch.Tensor:
        """The weighted gradients of a shard as one row; zeros if the shard has no samples."""
        row = torch.zeros(self._length, dtype=self._dtype, device=self._device)
        if shard is None or not shard.weight:
            return row
        for param in self.params:
            param.grad = None
        torch.manual_seed(shard.seed)  # for dropout
        data = shard.data if isinstance(shard.data, (list, tuple)) else (shard.data,)
        loss = loss_of(*data) * shard.weight
        loss.backward()
        at = 0
        for index, (param, size) in enumerate(zip(self.params, self._sizes, strict=True)):
            if param.grad is not None:
                row[at : at + size] = param.grad.detach().reshape(-1)
                row[len(row) - 1 - len(self.params) + index] = 1
            at += size
        row[-1] = loss.detach()
        return row

    def _total(self, nodes: list[torch.Tensor]) -> torch.Tensor:
        """The sum of all ranks' nodes by the tree: each rank adds its slice of the row, and all slices are gathered."""
        world = runtime.world.engine
        if world.size == 1:
            return nodes[0]
        slices = [share_of_rank(self._length, rank, world.size) for rank in range(world.size)]
        splits = torch.tensor([len(nodes) * len(one) for one in slices], dtype=torch.int32)
        payloads = [node[one.start : one.stop] for one in slices for node in nodes]
        sent = torch.cat(payloads) if nodes else torch.empty(0, dtype=self._dtype, device=self._device)
        received, _ = alltoall(sent, splits, name="elastic.virtual")
        tree: Tree[torch.Tensor] = Tree(torch.Tensor.add_)
        own = len(slices[world.rank])
        at = 0
        for rank in range(world.size):
            for first, width in widths(share_of_rank(self.virtual_size, rank, world.size)):
                tree.push(first, width, received[at : at + own])
                at += own
        [(_, _, mine)] = tree.nodes
        gathered: torch.Tensor = allgather(mine, name="elastic.virtual")
        return gathered

    def _deliver(self, total: torch.Tensor) -> float:
        at = 0
        used = total[len(total) - 1 - len(self.params) : -1]
        for index, (param, size) in enumerate(zip(self.params, self._sizes, strict=True)):
            param.grad = total[at : at + size].view_as(param) if used[index] > 0 else None
            at += size
        return float(total[-1])

    def describe_cost(self) -> str:
        """One line about the cost on this rank."""
        world = runtime.world.engine
        own = share_of_rank(self.virtual_size, world.rank, world.size)
        row = self._length * torch.empty(0, dtype=self._dtype).element_size()
        nodes = len(widths(own))
        sums = (len(own).bit_length() + 1) * row
        moved = 0 if world.size == 1 else (nodes + 1) * row
        return (
            f"virtual_size={self.virtual_size}, {world.size} ranks: {len(own)} backward passes per step here, "
            f"{(sums + 2 * moved) / 1e6:.2f} MB for sums, {moved / 1e6:.2f} MB sent per step"
        )
