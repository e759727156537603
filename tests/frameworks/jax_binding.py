# The battery's binding to JAX; run as a program it is one rank of the battery.
# Touches JAX, farandole.jax and the battery.
"""Two bindings: concrete arrays, and every operation inside a compiled function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from battery.binding import BARRIER, GRADIENTS, JOIN, Binding, Table, TracedBinding, numbers_of
from battery.run import common, run_forms

import farandole.jax as hvd
from farandole.engine.interface import Array, DType


class EagerBinding(Binding):
    hvd: Any = hvd
    offers = frozenset({BARRIER, GRADIENTS, JOIN})

    def tensor(self, values: Any, dtype: DType = DType.FLOAT32) -> Any:
        kind = "bool_" if dtype == DType.BOOL else dtype.name.lower()
        return jnp.asarray(np.asarray(values)).astype(getattr(jnp, kind))

    def array(self, tensor: Any) -> Array:
        return numbers_of(tensor)

    def dtype_of(self, tensor: Any) -> DType:
        return DType[tensor.dtype.name.upper()]

    def gradient(self, function: Callable[[Any], Any], values: Any, weight: float) -> Array:
        return self.array(jax.grad(lambda tensor: jnp.sum(weight * function(tensor)))(self.tensor(values)))

    def unusable(self) -> dict[str, Any]:
        return {"complex": jnp.ones(4, jnp.complex64), "unsigned": jnp.ones(4, jnp.uint32)}


class JitBinding(TracedBinding, EagerBinding):
    """Each operation is compiled and run as a function of its arrays."""

    offers = frozenset({BARRIER, JOIN})

    def traced(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return jax.block_until_ready(jax.jit(lambda arrays: operation(arrays, *args, **kwargs))(first))
            except jax.errors.JaxRuntimeError as error:
                raise hvd.translated(error) or error from None

        return call


PATIENCE_S = 120.0  # for one case: functions are compiled, which takes longer than all that is sent
BINDINGS = {"eager": EagerBinding, "jit": JitBinding}

# What a compiled function does not have: rows that differ between ranks, the names and the line of the script that the
# warning points to. jax_cases.py has its own cases for the rest.
NOT_IN_JIT = (
    "a timeline has the names",
    "average and op",
    "many steps with the same names",
    "allgather in every type",
    "allgather of nothing from some",
    "grouped allgather",
    "alltoall with splits",
    "invalid splits",
)


def table(form: str) -> Table:
    """The common cases that this form can have."""
    cases = common()
    for name in NOT_IN_JIT if form == "jit" else ():
        del cases[name]
    return cases


if __name__ == "__main__":
    run_forms(sys.argv[1:], BINDINGS, table, variable="FARANDOLE_JAX_OPS", patience=PATIENCE_S)
