# Compressors for all frameworks: tensors are sent unchanged, or floating-point tensors in another type.
# Touches nothing; each binding says how its tensors are cast.
"""A binding derives its `FP16Compressor` from `Cast`; a user's class derives from `Compressor`."""

from __future__ import annotations

from typing import Any


class Compressor:
    """The functions of a compressor."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor that is sent, and the context that `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The reduced tensor in the form that the caller wants."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Does not change tensors."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class Cast(Compressor):
    """Sends floating-point tensors as `_wire_dtype`."""

    _wire_dtype: Any

    @staticmethod
    def _type(tensor: Any) -> Any:
        return tensor.dtype

    @staticmethod
    def _is_floating(tensor: Any) -> bool:
        raise NotImplementedError

    @staticmethod
    def _cast(tensor: Any, dtype: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        return (cls._cast(tensor, cls._wire_dtype) if cls._is_floating(tensor) else tensor), cls._type(tensor)

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return tensor if cls._type(tensor) == ctx else cls._cast(tensor, ctx)
