# Reduces the gradients of a step over the ranks: dense and sparse, in groups, compressed. Local gradients are not sent.
# Touches TensorFlow; the rooms bindings, engine and operations; the files framework, naming and ops.
"""Tapes and optimizers use `Reduction`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..bindings.compat import split_list
from ..bindings.reduction import ReductionOptions, name_of_step
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
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if id(variable) in self.local:
                result[index] = self._scale_local(gradient)
            elif isinstance(gradient, tf.IndexedSlices) and not self.sparse_as_dense:
                result[index] = self._reduce_sparse(gradient)
            else:
                result[index] = tf.convert_to_tensor(gradient)
                dense.append(index)
        parts = self._split_by_group(dense, variables)
        for indices in parts[:-1]:
            reduced = grouped_allreduce(
                [result[index] for index in indices], compression=self.compression, op=self.op,
                prescale_factor=self.scales[0], postscale_factor=self.scales[1], process_set=self.process_set,
            )  # fmt: skip
            for index, gradient in zip(indices, reduced, strict=True):
                result[index] = gradient
        for index, gradient in zip(parts[-1], self._reduce_each([result[index] for index in parts[-1]]), strict=True):
            result[index] = gradient
        return result

    def apart(self, gradients: Sequence[Any], variables: Sequence[Any], reduce: Gradients) -> list[Any]:
        """Like `__call__`, but `reduce(gradients, variables)` reduces the gradients of variables that are not local."""
        return list(apart(gradients, variables, self.local, self, reduce))

    def _scale_local(self, gradient: Any) -> Any:
        if not self.scale_local_gradients:
            return gradient
        count = self.process_set.size() or 1
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / count, gradient.indices, gradient.dense_shape)
        return gradient / count

    def _reduce_sparse(self, gradient: Any) -> Any:
        if self.op == Adasum:
            raise NotImplementedError("Adasum does not take tf.IndexedSlices; use sparse_as_dense=True")
        return allreduce(gradient, compression=self.compression, op=self.op, process_set=self.process_set)

    def _reduce_each(self, gradients: list[Any]) -> list[Any]:
        """Reduces each gradient by itself. One call submits all: no thread waits for one while others are ready."""
        if not gradients:
            return []
        packed = [self.compression.compress(gradient) for gradient in gradients]
        sent = [tensor for tensor, _ in packed]
        prefix = "gradients"
        if tf.executing_eagerly():
            prefix = name_of_step(int(tf.size(tensor)) for tensor in sent)
        else:
            prefix = naming.in_graph("HorovodAllreduce", prefix, None, ignore_name_scope=False)
        names = tuple(f"{prefix}.{index}" for index in range(len(sent)))
        work = Work(Kind.ALLREDUCE, None, self.op, self.scales, self.process_set, names=names)
        reduced = run(replace(work, name=None), sent)
        return [self.compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, packed, strict=True)]

    def _split_by_group(self, indices: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """The indices of each group, and at the end the indices of gradients that are in no group."""
        if self.groups is None:
            return [indices]
        if isinstance(self.groups, int):
            even = split_list(indices, min(self.groups, len(indices))) if indices else []
            return [*[list(part) for part in even], []]
        index_of = {id(variables[index]): index for index in indices}
        parts = [[index_of[id(one)] for one in group if id(one) in index_of] for group in self.groups]
        grouped = {index for part in parts for index in part}
        return [*[part for part in parts if part], [index for index in indices if index not in grouped]]


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
