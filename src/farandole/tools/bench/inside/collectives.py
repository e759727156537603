"""One collective, timed and checked: every call on random data, begun by all ranks at once, its result compared.
Touches the library and the barrier it is given."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from .library import Library
from .together import Together

BLOCK = 1_000_003  # numbers that are random; prime, so that no piece of a tensor looks like the next one
TOLERANCE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}  # of a number up to 1, for each rank that adds one


def numbers(rank: int, count: int) -> Any:
    """The random numbers of a rank, from -0.5 to 0.5."""
    block = np.random.default_rng(rank + 1).random(min(count, BLOCK), dtype=np.float32) - np.float32(0.5)
    return np.resize(block, count)


def elements(operation: str, size: int, bytes_asked: int, width: int) -> int:
    """Elements of a rank's input; bytes are those of the larger side, so that an allgather's result has them."""
    part = max(1, bytes_asked // width // size)
    return part if operation == "allgather" else part * size


def wanted(operation: str, rank: int, size: int, count: int) -> Any:
    """What a rank must get."""
    if operation == "broadcast":
        return numbers(0, count)
    if operation in ("both", "one", "all"):  # streams give back what they have sent
        return numbers(rank, count)
    if operation == "allgather":
        return np.concatenate([numbers(source, count) for source in range(size)])
    part = slice(rank * (count // size), (rank + 1) * (count // size))
    if operation == "alltoall":
        return np.concatenate([numbers(source, count)[part] for source in range(size)])
    total = numbers(0, count).astype(np.float64)
    for source in range(1, size):
        total += numbers(source, count)
    return (total[part] if operation == "reducescatter" else total).astype(np.float32)


class Collectives:
    """The timed calls of one rank. Tensors and answers of the last question are kept: repeats ask again."""

    def __init__(self, together: Together) -> None:
        self._together = together
        self._key: Any = None

    def run(self, library: Library, command: dict[str, Any]) -> dict[str, Any]:
        """`count` calls: the seconds of each, and how many results were compared."""
        operation, fresh, dtype = command["operation"], command["kind"] == "fresh", command["dtype"]
        self._prepare(library, operation, command["bytes"], dtype)
        name = f"{operation}.{command['bytes']}.{command['kind']}.{dtype}"
        call = library.call(operation, name, fresh)
        times, checked, result = [], 0, None
        for _ in range(command["count"]):
            if fresh:
                tensor = library.copy(self._source)
            else:
                tensor = self._kept
                library.refill(tensor, self._source)
                result = None  # others write into the memory of the last one, too
            self._together.wait()
            began = time.perf_counter()
            result = call(tensor)
            times.append(time.perf_counter() - began)
            self._compare(library.array_of(result[:1]), self._wanted[:1], dtype, library.size)
            self._compare(library.array_of(result[-1:]), self._wanted[-1:], dtype, library.size)
            checked += 1
        self._compare(library.array_of(result), self._wanted, dtype, library.size)
        return {"times": times, "checked": checked}

    def _prepare(self, library: Library, operation: str, bytes_asked: int, dtype: str) -> None:
        key = (type(library), operation, bytes_asked, dtype)
        if key == self._key:
            return
        width = 4 if dtype == "float32" else 2
        count = elements(operation, library.size, bytes_asked, width)
        self._source = library.tensor_of(numbers(library.rank, count), dtype)
        self._kept = library.copy(self._source)
        self._wanted = wanted(operation, library.rank, library.size, count)
        self._key = key

    def _compare(self, result: Any, expected: Any, dtype: str, size: int) -> None:
        if result.shape != expected.shape or not np.abs(result - expected).max() <= TOLERANCE[dtype] * size:
            raise AssertionError("wrong result")  # a NaN comes here too


class Memory:
    """The limits: `memcpy` by rank 0 while the others rest, `copy` by all ranks at once, `sum` (a += b) by rank 0."""

    def __init__(self, together: Together) -> None:
        self._together = together
        self._bytes = 0

    def run(self, library: Library, command: dict[str, Any]) -> dict[str, Any]:
        if command["bytes"] != self._bytes:
            self._bytes = command["bytes"]
            self._from = numbers(library.rank, max(1, self._bytes // 4))
            self._to = np.zeros_like(self._from)
        works = library.rank == 0 or command["operation"] == "copy"
        times = []
        for _ in range(command["count"]):
            into = np.empty_like(self._from) if command["kind"] == "fresh" else self._to
            self._together.wait()
            if not works:
                times.append(0.0)
                continue
            began = time.perf_counter()
            if command["operation"] == "sum":
                np.add(into, self._from, out=into)
            else:
                np.copyto(into, self._from)
            times.append(time.perf_counter() - began)
            if command["operation"] != "sum" and into[-1] != self._from[-1]:
                raise AssertionError("wrong copy")
        return {"times": times, "checked": command["count"]}
