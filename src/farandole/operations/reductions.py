# The reductions by their names, and which gradients of a step are not reduced.
# Touches engine.
"""Sum, average, minimum, maximum, product and Adasum; `apart` is for gradients that stay local."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..engine.interface import ReduceOp

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

Gradients = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


def apart(
    gradients: Sequence[Any], variables: Sequence[Any], local: set[int], keep: Gradients, reduce: Gradients
) -> Any:
    """`reduce` of the gradients and their variables, `keep` of those of local variables, in the order given."""
    alone = [id(variable) in local for variable in variables]

    def part(function: Gradients, wanted: bool) -> list[Any]:
        positions = [index for index, is_local in enumerate(alone) if is_local == wanted]
        if not positions:
            return []
        return list(function([gradients[index] for index in positions], [variables[index] for index in positions]))

    kept, reduced = iter(part(keep, wanted=True)), iter(part(reduce, wanted=False))
    return [next(kept if is_local else reduced) for is_local in alone]
