"""The arithmetic of the core alone, on one core: the limit of reductions of a data type.
Calls the native library's kernel; touches memory of its own."""

from __future__ import annotations

import statistics
import time

import numpy as np

from ...engine.interface import DType
from ...engine.library import load

CALLS = 5


def measure(dtype: str, block: int, size: int, repeats: int) -> list[float]:
    """Seconds for the sum of two tensors of `size` bytes, from repeats with `block` bytes."""
    width = 4 if dtype == "float32" else 2
    draw = np.random.default_rng(1)
    # Bits of small numbers: 1 + x in any of the three types, since the top of a mantissa is the same as in float32.
    numbers = (draw.random(block // 4, dtype=np.float32) + np.float32(1)).view(np.uint16 if width == 2 else np.float32)
    if dtype == "float16":
        numbers = (draw.random(block // 2, dtype=np.float32) + np.float32(1)).astype(np.float16).view(np.uint16)
    out = np.empty_like(numbers)
    kind, core = DType[dtype.upper()], load()
    found = []
    for _ in range(repeats + 1):
        times = []
        for _ in range(CALLS):
            began = time.perf_counter()
            core.add(kind, numbers, numbers, out)
            times.append(time.perf_counter() - began)
        found.append(statistics.median(times) * size / block)
    return found[1:]
