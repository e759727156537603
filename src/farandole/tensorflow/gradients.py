# Reduces the gradients of a step over the ranks: dense and sparse, in groups, compressed; local ones are not sent.
# Touches TensorFlow, compression, naming, ops and work.
"""Tapes and optimizers share `Reduction`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..bindings.compat import split_list
from ..bindings.reduction import ReductionOptions
from ..bindings.work import Work
from ..engine.interface import Kind
from ..operations.reductions import Adasum, Gradients, apart
from . import naming
from .framework import tf
from .ops import allreduce, grouped_allreduce, run


@dataclass
class Reduction(ReductionOptions):
    """Reduces the gradients of a step, one by one or in groups."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups is not None:
            _check_groups(self.groups)

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The reduced gradients in the same order; None stays None."""
        if self.process_set.included() is False:
            return list(gradients)
        result = list(gradients)
        dense: list[int] = []
        for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if id(variable) in self.local:
                result[place] = self._scaled(gradient)
            elif isinstance(gradient, tf.IndexedSlices) and not self.sparse_as_dense:
                result[place] = self._sparse(gradient)
            else:
                result[place] = tf.convert_to_tensor(gradient)
                dense.append(place)
        parts = self._parts(dense, variables)
        for places in parts[:-1]:
            reduced = grouped_allreduce(
                [result[place] for place in places], compression=self.compression, op=self.op,
                prescale_factor=self.scales[0], postscale_factor=self.scales[1], process_set=self.process_set,
            )  # fmt: skip
            for place, gradient in zip(places, reduced, strict=True):
                result[place] = gradient
        for place, gradient in zip(parts[-1], self._each([result[place] for place in parts[-1]]), strict=True):
            result[place] = gradient
        return result

    def apart(self, gradients: Sequence[Any], variables: Sequence[Any], reduce: Gradients) -> list[Any]:
        """Like a call, but gradients that are not local go through `reduce(gradients, variables)`."""
        return list(apart(gradients, variables, self.local, self, reduce))

    def _scaled(self, gradient: Any) -> Any:
        if not self.scale_local_gradients:
            return gradient
        count = self.process_set.size() or 1
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / count, gradient.indices, gradient.dense_shape)
        return gradient / count

    def _sparse(self, gradient: Any) -> Any:
        if self.op == Adasum:
            raise NotImplementedError("Adasum does not take tf.IndexedSlices; use sparse_as_dense=True")
        return allreduce(gradient, compression=self.compression, op=self.op, process_set=self.process_set)

    def _each(self, gradients: list[Any]) -> list[Any]:
        """Reduces each gradient by itself, all in one call: no thread waits for one while others are ready."""
        if not gradients:
            return []
        packed = [self.compression.compress(gradient) for gradient in gradients]
        sent = [tensor for tensor, _ in packed]
        prefix = "gradients"
        if tf.executing_eagerly():
            # Models that train in turn need different names, which ranks must choose in the same way without
            # communication.
            prefix = f"gradients.{len(sent)}.{sum(int(tf.size(tensor)) for tensor in sent)}"
        else:
            prefix = naming.in_graph("HorovodAllreduce", prefix, None, False)
        names = tuple(f"{prefix}.{place}" for place in range(len(sent)))
        work = Work(Kind.ALLREDUCE, None, self.op, self.scales, self.process_set, names=names)
        reduced = run(replace(work, name=None), sent)
        return [self.compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, packed, strict=True)]

    def _parts(self, places: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """The places of each group, and at the end the places that are in no group."""
        if self.groups is None:
            return [places]
        if isinstance(self.groups, int):
            even = split_list(places, min(self.groups, len(places))) if places else []
            return [*[list(part) for part in even], []]
        where = {id(variables[place]): place for place in places}
        parts = [[where[id(one)] for one in group if id(one) in where] for group in self.groups]
        grouped = {place for part in parts for place in part}
        return [*[part for part in parts if part], [place for place in places if place not in grouped]]


def _check_groups(groups: Any) -> None:
    if isinstance(groups, int):
        if groups <= 0:
            raise ValueError(f"groups={groups}: expected a positive number, or lists of variables")
        return
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError("groups: expected a positive number, or a list of lists of variables")
    members = [id(variable) for group in groups for variable in group]
    if len(members) != len(set(members)):
        raise ValueError("groups: a variable can only be in one group")


def chosen_groups(num_groups: int, groups: Any) -> Any:
    """`groups`, or the deprecated `num_groups`."""
    if num_groups:
        warnings.warn("`num_groups` is deprecated; use `groups`", DeprecationWarning, stacklevel=3)
        if num_groups < 0:
            raise ValueError(f"num_groups={num_groups}: expected a positive number")
        return num_groups if groups is None else groups
    return groups
