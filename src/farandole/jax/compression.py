# Compressors: the form in which tensors are sent. Unchanged, half precision, bfloat16, or a class of the user.
# Touches JAX and bindings/compression.py.
"""Compressors for gradients. A user's class derives from `Compressor`, which does not change arrays."""

from __future__ import annotations

from typing import Any

from ..bindings.compression import Cast, NoneCompressor
from .framework import jax

Compressor = NoneCompressor


class FP16Compressor(Cast):
    """Sends floating-point tensors with 16 bits: 11 bits of precision, values up to 65504."""

    _wire_dtype: Any = jax.numpy.float16

    @staticmethod
    def _is_floating(tensor: Any) -> bool:
        return bool(jax.numpy.issubdtype(tensor.dtype, jax.numpy.floating))

    @staticmethod
    def _cast(tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype)


class BF16Compressor(FP16Compressor):
    """Sends floating-point tensors with 16 bits: 8 bits of precision, the range of float32."""

    _wire_dtype = jax.numpy.bfloat16


class Compression:
    """The compressors that come with the package."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
