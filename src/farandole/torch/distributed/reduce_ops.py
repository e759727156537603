# Translates torch.distributed's reductions to those of the engine.
# Touches torch and engine.
"""The core knows no bitwise reductions and no factors of single ranks; this package computes them around the core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from ...engine.interface import ReduceOp

_OPS = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.AVERAGE,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    dist.ReduceOp.PREMUL_SUM: ReduceOp.SUM,
}
_BITWISE: dict[Any, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


@dataclass(frozen=True)
class Reduction:
    """How to combine the elements of all ranks."""

    op: ReduceOp
    factor: Any = None  # this rank's elements are multiplied by this first
    bitwise: Callable[..., torch.Tensor] | None = None  # used instead of `op`

    @property
    def scatters(self) -> bool:
        """Whether the core's reducescatter supports it."""
        return self.bitwise is None and self.op in (ReduceOp.SUM, ReduceOp.AVERAGE)

    def fold(self, rows: torch.Tensor) -> torch.Tensor:
        """The bitwise reduction of one row for each rank."""
        assert self.bitwise is not None
        total = rows[0].clone()
        for row in rows[1:]:
            self.bitwise(total, row, out=total)
        return total


def reduction_of(op: Any) -> Reduction:
    """The reduction for `op`, a ReduceOp or one of its names."""
    state: tuple[Any, Any] = op.__getstate__() if isinstance(op, dist.ReduceOp) else (op, None)
    kind, factor = state
    if kind in _BITWISE:
        return Reduction(ReduceOp.SUM, bitwise=_BITWISE[kind])
    if kind not in _OPS:
        raise ValueError(f"{kind} is not a reduction that this backend supports")
    return Reduction(_OPS[kind], factor)
