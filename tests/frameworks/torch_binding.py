# The battery's binding to torch; run as a program it is one rank of the battery.
# Touches torch, farandole.torch and the battery.
"""Twenty lines that a framework adds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from battery.binding import ASYNC, BARRIER, GRADIENTS, IN_PLACE, JOIN, Binding, Table
from battery.run import common, run
from torch_cases import TORCH
from torch_cuda_cases import CUDA
from torch_inner_cases import INNER

import farandole.torch as hvd
from farandole.engine.interface import Array, DType


class TorchBinding(Binding):
    hvd = hvd
    offers = frozenset({ASYNC, BARRIER, GRADIENTS, IN_PLACE, JOIN})

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def tensor(self, values: Any, dtype: DType = DType.FLOAT32) -> torch.Tensor:
        return torch.as_tensor(values).to(self.device, getattr(torch, dtype.name.lower())).clone()

    def array(self, tensor: torch.Tensor) -> Array:
        cpu = tensor.detach().cpu()
        return (cpu.float() if cpu.dtype == torch.bfloat16 else cpu).numpy()

    def dtype_of(self, tensor: torch.Tensor) -> DType:
        return DType[str(tensor.dtype).removeprefix("torch.").upper()]

    def gradient(self, function: Callable[[Any], Any], values: Any, weight: float) -> Array:
        tensor = self.tensor(values).requires_grad_()
        (weight * function(tensor)).sum().backward()
        assert tensor.grad is not None
        return self.array(tensor.grad)

    def unusable(self) -> dict[str, Any]:
        return {
            "not contiguous": self.tensor([[1.0, 2.0], [3.0, 4.0]]).t(),
            "complex": torch.ones(4, dtype=torch.complex64, device=self.device),
            "sparse": torch.eye(2, device=self.device).to_sparse(),
        }


def table(device: str = "cpu") -> Table:
    """The common cases and those that only torch has."""
    cases = common()
    cases.update(TORCH)
    cases.update(INNER)
    if device == "cuda":
        cases.update(CUDA)
    return cases


if __name__ == "__main__":
    run(TorchBinding(*sys.argv[1:]), table(*sys.argv[1:]))
