# Compressors: the form in which tensors are sent. Unchanged, half precision, bfloat16, or a class of the user.
# Touches Keras and bindings/compression.py.
"""Compressors for gradients on any backend of Keras. A user's class has the same two functions."""

from __future__ import annotations

from typing import Any

from ..bindings.compression import Cast, NoneCompressor
from .framework import require


class FP16Compressor(Cast):
    """Sends floating-point tensors with 16 bits: 11 bits of precision, values up to 65504."""

    _wire_dtype = "float16"

    @staticmethod
    def _type(tensor: Any) -> Any:
        return require().backend.standardize_dtype(tensor.dtype)

    @classmethod
    def _is_floating(cls, tensor: Any) -> bool:
        return "float" in cls._type(tensor)

    @staticmethod
    def _cast(tensor: Any, dtype: Any) -> Any:
        return require().ops.cast(tensor, dtype)


class BF16Compressor(FP16Compressor):
    """Sends floating-point tensors with 16 bits: 8 bits of precision, the range of float32."""

    _wire_dtype = "bfloat16"


class Compression:
    """The compressors that come with the package."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
