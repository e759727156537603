# Compressors: the form in which tensors are sent. Unchanged, half precision, or a class of the user.
# Touches MXNet and bindings/compression.py.
"""Compressors for gradients. A user's class derives from `Compressor`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..bindings.compression import Cast
from ..bindings.compression import Compressor as Compressor  # scripts derive from it
from ..bindings.compression import NoneCompressor as NoneCompressor


class FP16Compressor(Cast):
    """Sends floating-point tensors with 16 bits: 11 bits of precision, values up to 65504."""

    _wire_dtype = "float16"

    @staticmethod
    def _is_floating(tensor: Any) -> bool:
        return np.issubdtype(np.dtype(tensor.dtype), np.floating)

    @staticmethod
    def _cast(tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype, copy=False)


class Compression:
    """The compressors that come with the package."""

    none = NoneCompressor
    fp16 = FP16Compressor
