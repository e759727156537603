# Makes tensors that the engine accepts (contiguous, flat, of a known type, where it can reach them) and copies results
# back.
# Touches torch and the binding's memory.
"""`source(tensor)` is read, `Target(tensor)` is written. `copy_back` copies results if the engine used a copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..memory import DeviceBuffer, TensorBuffer, supported


def source(tensor: torch.Tensor, bits: bool = False, on_device: bool = False) -> torch.Tensor:
    """The elements as a flat tensor. With `bits`, unknown types become bytes: copying needs no arithmetic.

    `on_device`: a CUDA tensor stays on its device.
    """
    flat = _plain(tensor).reshape(-1)
    if not (flat.is_cpu or on_device):
        flat = flat.cpu()
    return _bits(flat) if bits and not supported(flat.dtype) else flat


def _bits(flat: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided:
        raise ValueError(f"tensors of layout {tensor.layout} are not supported")
    return tensor.detach().resolve_neg().resolve_conj()


class Target:
    """Where results go: the tensor itself if the engine can write to it, otherwise separate memory."""

    __slots__ = ("flat", "tensor")

    def __init__(self, tensor: torch.Tensor, filled: bool = False, bits: bool = False, on_device: bool = False) -> None:
        """`filled`: the engine also reads it. `on_device`: a CUDA tensor stays on its device."""
        plain = tensor.detach()
        if plain.layout != torch.strided:
            raise ValueError(f"tensors of layout {plain.layout} are not supported")
        usable = plain.is_cpu or on_device
        direct = usable and plain.is_contiguous() and not plain.is_neg() and not plain.is_conj()
        if direct:
            flat = plain.view(-1)
        elif filled:
            flat = plain.to(device=plain.device if usable else "cpu", copy=True).contiguous().view(-1)
        else:
            flat = torch.empty(plain.numel(), dtype=plain.dtype, device=plain.device if usable else "cpu")
        self.tensor = None if direct else plain
        self.flat = _bits(flat) if bits and not supported(flat.dtype) else flat

    def copy_back(self) -> None:
        """Copies what the engine has written to the user's tensor, if they are not the same memory."""
        if self.tensor is not None:
            flat = self.flat if self.flat.dtype == self.tensor.dtype else self.flat.view(self.tensor.dtype)
            copy_result(flat.view(self.tensor.shape), self.tensor)


def copy_result(result: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copies a result to the user's tensor. It is there on return, whatever thread calls, and on whatever stream."""
    tensor.copy_(result)
    if result.is_cuda:
        torch.cuda.current_stream(result.device).synchronize()


def buffer(flat: torch.Tensor) -> TensorBuffer:
    """The memory of the tensor for the engine."""
    return DeviceBuffer(flat) if flat.is_cuda else TensorBuffer(flat)


def same_type(tensors: Sequence[torch.Tensor]) -> None:
    """ValueError unless all have the same element type."""
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1:
        raise ValueError(f"all tensors must have one dtype, not {sorted(map(str, types))}")


def only(tensors: torch.Tensor | Sequence[torch.Tensor], what: str) -> torch.Tensor:
    """The only tensor of a list: each process has one device."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"{what} takes one tensor per rank, not {len(tensors)}")
    return tensors[0]
