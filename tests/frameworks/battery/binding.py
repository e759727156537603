# The interface between the battery and a framework, and the table of cases.
# Touches farandole's data types and NumPy.
"""Each framework derives from `Binding`; `@case` puts a function into the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from farandole.engine.interface import Array, DType

# What a framework may lack.
ASYNC, IN_PLACE, GRADIENTS, BARRIER, JOIN = "async", "in place", "gradients", "barrier", "join"

INTEGERS = [DType.UINT8, DType.INT8, DType.UINT16, DType.INT16, DType.INT32, DType.INT64]
FLOATS = [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64]
NUMBERS = INTEGERS + FLOATS


class Binding:
    """One framework. The cases use small whole numbers, which are exact in every type."""

    hvd: Any  # the module with Horovod's names
    offers: frozenset[str] = frozenset()
    dtypes: tuple[DType, ...] = tuple(DType)

    def tensor(self, values: Any, dtype: DType = DType.FLOAT32) -> Any:
        """A new tensor."""
        raise NotImplementedError

    def array(self, tensor: Any) -> Array:
        """The tensor's values as a NumPy array of a type that NumPy has."""
        raise NotImplementedError

    def dtype_of(self, tensor: Any) -> DType:
        raise NotImplementedError

    def same(self, one: Any, two: Any) -> bool:
        """Whether both are the same tensor."""
        return one is two

    def gradient(self, function: Callable[[Any], Any], values: Any, weight: float) -> Array:
        """The gradient of `weight * sum(function(tensor))` with respect to the tensor."""
        raise NotImplementedError

    def unusable(self) -> dict[str, Any]:
        """Tensors that the operations must refuse with ValueError, by the reason."""
        return {}

    def holds(self, tensor: Any, values: Any, dtype: DType | None = None) -> None:
        """Asserts that the tensor has these values, of this shape, in this type."""
        found, expected = self.array(tensor), np.asarray(values)
        assert found.shape == expected.shape, f"shape {found.shape} instead of {expected.shape}"
        assert np.array_equal(found, expected.astype(found.dtype)), f"{found} instead of {expected}"
        assert dtype is None or self.dtype_of(tensor) == dtype, f"{self.dtype_of(tensor)} instead of {dtype}"


OPERATIONS = """allreduce grouped_allreduce allgather grouped_allgather broadcast alltoall reducescatter
    grouped_reducescatter"""


class TracedBinding(Binding):
    """Each operation runs inside of a function that the framework traces or compiles."""

    def __init__(self) -> None:
        module = self.hvd
        self.hvd = SimpleNamespace(**{name: getattr(module, name) for name in dir(module) if not name.startswith("__")})
        for name in OPERATIONS.split():
            setattr(self.hvd, name, self.traced(getattr(module, name)))

    def traced(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """A function that traces this operation on its arguments, and runs it."""
        raise NotImplementedError


def numbers_of(tensor: Any) -> Array:
    """The tensor as a NumPy array; bfloat16 as float32."""
    found = np.asarray(tensor)
    return found.astype(np.float32) if found.dtype.name == "bfloat16" else found


Body = Callable[[Any, int, int], None]  # arguments: the binding, this rank, the number of ranks


@dataclass(frozen=True)
class Case:
    """One line of the table. `init`: the arguments of init(); None: the case calls it itself."""

    name: str
    body: Body
    needs: frozenset[str] = frozenset()
    init: dict[str, Any] | None = None


class Table(dict[str, Case]):
    """Cases by name."""

    def case(self, *needs: str, init: dict[str, Any] | None = {}) -> Callable[[Body], Body]:  # noqa: B006 (never changed)
        def add(body: Body) -> Body:
            name = body.__name__.replace("_", " ").strip()
            assert name not in self, f"two cases are called {name}"
            self[name] = Case(name, body, frozenset(needs), init)
            return body

        return add


def fails(kind: type[BaseException] | tuple[type[BaseException], ...], message: str, call: Callable[[], Any]) -> None:
    """Asserts that `call` raises this error (not a subclass of another kind) with a message that begins like this."""
    try:
        result = call()
    except kind as error:
        assert str(error).startswith(message), f"{type(error).__name__}: {error}"
        return
    raise AssertionError(f"no {kind}; the result was {result!r}")
