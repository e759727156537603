# What tensors are turned into for the journey: nothing, half precision, bfloat16, or what the user's class says.
# Touches TensorFlow alone.
"""Compressors for gradients; a class of your own derives from `Compressor`."""

from __future__ import annotations

from typing import Any

from .framework import tf


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

    _travels = tf.float16

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        return (tf.cast(tensor, cls._travels) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tf.cast(tensor, ctx) if tensor.dtype != ctx else tensor


class BF16Compressor(FP16Compressor):
    """Floating tensors travel with 16 bits: 8 of precision, the range of float32."""

    _travels = tf.bfloat16


class Compression:
    """The compressors that come with the package."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
