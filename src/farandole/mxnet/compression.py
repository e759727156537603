# What gradients are turned into for the journey: nothing, half precision, or what the user's class says.
# Touches MXNet alone.
"""Compressors for gradients; a class of your own derives from `Compressor`."""

from __future__ import annotations

from typing import Any

import numpy as np


class Compressor:
    """What a compressor offers."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor that travels, and whatever `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The reduced tensor as the caller wants it."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class FP16Compressor(Compressor):
    """Floating tensors travel with 16 bits: 11 of precision, values up to 65504."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        floating = np.issubdtype(np.dtype(tensor.dtype), np.floating)
        return (tensor.astype("float16", copy=False) if floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor.astype(ctx, copy=False)


class Compression:
    """The compressors that come with the package."""

    none = NoneCompressor
    fp16 = FP16Compressor
