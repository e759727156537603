# What arrays are turned into for the journey: nothing, half precision, bfloat16, or what the user's class says.
# Touches JAX alone.
"""Compressors for gradients; a class of your own derives from `Compressor`."""

from __future__ import annotations

from typing import Any

from .framework import jax


class Compressor:
    """What a compressor offers; this one leaves arrays as they are."""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """The array that travels, and whatever `decompress` needs to know."""
        return tensor, None

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """The reduced array as the caller wants it."""
        return tensor


class NoneCompressor(Compressor):
    """Leaves arrays as they are."""


class FP16Compressor(Compressor):
    """Floating arrays travel with 16 bits: 11 of precision, values up to 65504."""

    _travels: Any = jax.numpy.float16

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """The array in 16 bits, if it is a floating one."""
        floating = jax.numpy.issubdtype(tensor.dtype, jax.numpy.floating)
        return (tensor.astype(cls._travels) if floating else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """The array in its own type again."""
        return tensor.astype(ctx)


class BF16Compressor(FP16Compressor):
    """Floating arrays travel with 16 bits: 8 of precision, the range of float32."""

    _travels = jax.numpy.bfloat16


class Compression:
    """The compressors that come with the package."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
