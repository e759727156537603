# Compressors: the form in which tensors are sent. Unchanged, half precision, bfloat16, or a class of the user.
# Touches torch and bindings/compression.py.
"""Compressors for gradients. A user's class derives from `Compressor`."""

from __future__ import annotations

from typing import Any

import torch

from ..bindings.compression import Cast
from ..bindings.compression import Compressor as Compressor  # scripts derive from it
from ..bindings.compression import NoneCompressor as NoneCompressor


class FP16Compressor(Cast):
    """Sends floating-point tensors with 16 bits: 11 bits of precision, values up to 65504."""

    _wire_dtype = torch.float16

    @staticmethod
    def _is_floating(tensor: torch.Tensor) -> bool:
        return tensor.dtype.is_floating_point

    @staticmethod
    def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        return tensor.to(dtype)


class BF16Compressor(FP16Compressor):
    """Sends floating-point tensors with 16 bits: 8 bits of precision, the range of float32."""

    _wire_dtype = torch.bfloat16


class Compression:
    """The compressors that come with the package."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
