# Batch normalisation over the batches of all ranks.
# Touches torch; the rooms bindings.private, operations and world; the file ops.
"""`SyncBatchNorm` replaces `torch.nn.BatchNorm*d`, on CPU and CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ..bindings.private.torch_names import batch_norm_class
from ..operations.reductions import Sum
from ..world.groups import ProcessSet, global_process_set
from ..world.runtime import runtime
from .ops import begin_allgather, begin_allreduce

_BatchNorm: Any = batch_norm_class()


class SyncBatchNorm(_BatchNorm):  # type: ignore[misc]
    """Normalises with the mean and variance over the batches of all ranks; the batches may differ in size."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, not {input.dim()}")
        if input.shape[1] != self.num_features or not input.is_floating_point():
            found = f"{input.dtype} of {tuple(input.shape)}"
            raise ValueError(f"expected a floating input with {self.num_features} channels, not {found}")

    def _alone(self, input: torch.Tensor) -> torch.Tensor:
        normalised: torch.Tensor = super().forward(input)
        return normalised

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return self._alone(input)
        _, ranks = runtime.world.groups.members(self.process_set)
        if len(ranks) == 1:
            return self._alone(input)
        self._check_input_dim(input)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        running = None if self.running_mean is None else (self.running_mean, self.running_var)
        normalised: torch.Tensor = _Normalise.apply(
            input, self.weight, self.bias, running, self.eps, factor, self.process_set
        )
        return normalised


def _per_channel(vector: torch.Tensor, dims: int) -> torch.Tensor:
    return vector.view(1, -1, *[1] * (dims - 2))


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        factor: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        kind = torch.promote_types(input.dtype, torch.float32)
        values = input.to(kind)
        total, mean, squares = _statistics(values, process_set)
        var = squares / total
        if running is not None:
            unbiased = squares / (total - 1)
            for kept, new in zip(running, (mean, unbiased), strict=True):
                kept.mul_(1 - factor).add_(new.to(kept.dtype), alpha=factor)
        ctx.save_for_backward(input, weight, mean.to(kind), torch.rsqrt(var + eps).to(kind))
        ctx.arguments = (total, process_set)
        scale, shift = (None if part is None else part.to(kind) for part in (weight, bias))
        result = functional.batch_norm(values, mean.to(kind), var.to(kind), scale, shift, False, 0.0, eps)
        return result.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        input, weight, mean, inverse = ctx.saved_tensors
        total, process_set = ctx.arguments
        dims = input.dim()
        over = [0, *range(2, dims)]
        grads = grad.to(mean.dtype)
        centred = input.to(mean.dtype) - _per_channel(mean, dims)
        sums = grads.sum(over)
        products = (grads * centred).sum(over)
        grad_weight = (products * inverse).to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = sums.to(weight.dtype) if ctx.needs_input_grad[2] else None
        grad_input = None
        if ctx.needs_input_grad[0]:
            statistics = torch.cat([sums, products]).double()
            means = (
                begin_allreduce([statistics], None, Sum, (1.0, 1.0), process_set, grouped=False, in_place=True).result()
                / total
            )
            mean_grad, mean_product = means.to(mean.dtype).chunk(2)
            scale = inverse if weight is None else inverse * weight.to(mean.dtype)
            pull = _per_channel(mean_product * inverse * inverse, dims)
            grads = grads - _per_channel(mean_grad, dims) - centred * pull
            grad_input = (grads * _per_channel(scale, dims)).to(input.dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _statistics(values: torch.Tensor, process_set: ProcessSet) -> tuple[float, torch.Tensor, torch.Tensor]:
    """The number of values in each channel on all ranks, their mean, and the sum of squared distances from the mean.

    Each rank sends distances from its own mean, so that large means do not reduce precision.
    """
    over = [0, *range(2, values.dim())]
    channels = values.shape[1]
    count = values.numel() // channels
    mean = values.mean(over) if count else values.new_zeros(channels)
    squares = (values - _per_channel(mean, values.dim())).square().sum(over)
    known = mean.new_tensor([count], dtype=torch.float64)
    statistics = torch.cat([mean.double(), squares.double(), known]).unsqueeze(0)
    everyones = begin_allgather([statistics], None, process_set, grouped=False).result()
    means, squares, counts = everyones.split([channels, channels, 1], dim=1)
    total = float(counts.sum())
    if total < 2:
        raise ValueError(f"expected more than one value per channel in training, got input of {tuple(values.shape)}")
    mean = (means * counts).sum(0) / total
    return total, mean, (squares + counts * (means - mean).square()).sum(0)
