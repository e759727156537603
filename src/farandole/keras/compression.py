# What gradients are turned into for the journey, on any backend of Keras.
# Touches Keras alone.
"""Compressors for gradients; a class of your own has the same two functions."""

from __future__ import annotations

from typing import Any

from .framework import require


class NoneCompressor:
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor that travels, and whatever `decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The reduced tensor as the caller wants it."""
        return tensor


class FP16Compressor(NoneCompressor):
    """Floating tensors travel with 16 bits: 11 of precision, values up to 65504."""

    _travels = "float16"

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """The tensor in 16 bits, if it is a floating one."""
        keras = require()
        kind = keras.backend.standardize_dtype(tensor.dtype)
        return (keras.ops.cast(tensor, cls._travels) if "float" in kind else tensor), kind

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor in its own type again."""
        return require().ops.cast(tensor, ctx)


class BF16Compressor(FP16Compressor):
    """Floating tensors travel with 16 bits: 8 of precision, the range of float32."""

    _travels = "bfloat16"


class Compression:
    """The compressors that come with the package."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
