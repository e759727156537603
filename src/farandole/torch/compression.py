# What tensors are turned into for the journey: nothing, half precision, bfloat16, or what the user's class says.
# Touches torch alone.
"""Compressors for gradients; a class of your own derives from `Compressor`."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """What a compressor offers."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor that travels, and whatever `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The reduced tensor as the caller wants it."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


def _to(dtype: torch.dtype, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    return (tensor.to(dtype) if tensor.dtype.is_floating_point else tensor), tensor.dtype


class FP16Compressor(Compressor):
    """Floating tensors travel with 16 bits: 11 of precision, values up to 65504."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _to(torch.float16, tensor)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Floating tensors travel with 16 bits: 8 of precision, the range of float32."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _to(torch.bfloat16, tensor)


class Compression:
    """The compressors that come with the package."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
