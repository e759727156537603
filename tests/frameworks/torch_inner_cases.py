# What other programs use of horovod.torch besides its operations: names behind them, classes to derive from.
# Touches torch, farandole.torch, Horovod's names and the battery's table.
"""Run with the battery, in the same jobs."""

from __future__ import annotations

from typing import Any

import torch
from battery.binding import Table, fails
from battery.mistakes import check_allreduce

import farandole.torch as hvd
from farandole.base import errors
from farandole.elastic import ObjectState
from horovod.torch import mpi_ops
from horovod.torch.optimizer import _DistributedAdasumOptimizer, _DistributedOptimizer

INNER = Table()
case = INNER.case


def of_line(size: int) -> tuple[Any, torch.nn.Module]:
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    return torch.optim.SGD(model.parameters(), lr=1.0), model


def stepped(optimizer: Any, model: torch.nn.Module, rank: int, size: int) -> None:
    """Asserts that one step takes the average of the ranks' gradients."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    model(torch.full((1, 3), rank + 1.0)).sum().backward()
    optimizer.step()
    weight, bias = (old - new for old, new in zip(before, model.parameters(), strict=True))
    assert torch.allclose(weight, torch.full((1, 3), (size + 1) / 2)) and torch.allclose(bias, torch.ones(1))


@case()
def others_have_classes_over_the_optimizer(b: Any, rank: int, size: int) -> None:
    # One made by the function is of the class, and a method that is put into the class is used.
    wrapped, model = of_line(size)
    optimizer = hvd.DistributedOptimizer(wrapped, model.named_parameters())
    assert isinstance(optimizer, _DistributedOptimizer) and isinstance(optimizer, torch.optim.SGD)
    stepped(optimizer, model, rank, size)
    noted: list[int] = []
    before = _DistributedOptimizer.synchronize

    def noting(self: Any) -> None:
        noted.append(1)
        before(self)

    _DistributedOptimizer.synchronize = noting
    try:
        stepped(optimizer, model, rank, size)
    finally:
        _DistributedOptimizer.synchronize = before
    assert noted == [1]

    # A class with copies of the methods, as Horovod itself makes them.
    wrapped, model = of_line(size)
    copied = type("SGD", (torch.optim.SGD,), dict(_DistributedOptimizer.__dict__))
    stepped(copied(wrapped.param_groups, list(model.named_parameters()), hvd.Compression.none, 1), model, rank, size)

    # A subclass.
    class Own(_DistributedOptimizer, torch.optim.SGD):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            noted.append(2)
            return super().step(closure)

    wrapped, model = of_line(size)
    made: Any = Own
    stepped(made(wrapped.param_groups, model.named_parameters(), hvd.Compression.none), model, rank, size)
    assert noted == [1, 2]

    # For Adasum of equal steps, which gives the step.
    wrapped, model = of_line(size)
    summed = hvd.DistributedOptimizer(wrapped, op=hvd.Adasum)
    assert isinstance(summed, _DistributedAdasumOptimizer)
    wrapped, model = of_line(size)
    copied = type("SGD", (torch.optim.SGD,), dict(_DistributedAdasumOptimizer.__dict__))
    again = copied(wrapped.param_groups, list(model.named_parameters()), hvd.Compression.none)
    model(torch.ones(1, 3)).sum().backward()
    again.step()
    assert torch.allclose(next(model.parameters()), torch.full((1, 3), -0.5))


@case(init={"process_sets": [[0]]})
def others_look_behind_the_operations(b: Any, rank: int, size: int) -> None:
    everyone = list(range(size))
    found = mpi_ops._basics._get_process_set_ids_and_ranks()
    assert sorted(found.values()) == [[0], everyone] and found[0] == everyone
    assert mpi_ops._basics.rank() == rank and mpi_ops._basics._process_set_size(0) == size
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
    assert handle in mpi_ops._handle_map and len(mpi_ops._handle_map) == 1
    assert hvd.synchronize(handle).tolist() == [size] * 2
    assert handle not in mpi_ops._handle_map

    tensor, output = torch.full((2,), rank + 1.0), torch.zeros(2)
    factory = mpi_ops._allreduce_function_factory
    assert mpi_ops._check_function(factory, tensor) == factory(tensor)
    handle = mpi_ops._allreduce_async(tensor, output, "own", hvd.Sum, 1.0, 1.0, hvd.global_process_set)
    assert mpi_ops._handle_map[handle][-1] is output
    assert mpi_ops.synchronize(handle) is output and output.tolist() == [size * (size + 1) / 2] * 2
    assert tensor.tolist() == [rank + 1.0] * 2 and handle not in mpi_ops._handle_map
    fails(ValueError, "", lambda: mpi_ops._check_function(factory, torch.ones(2, 2).t()[:, :1].expand(2, 2)))
    fails(ValueError, "", lambda: mpi_ops._check_function(factory, torch.ones(2, dtype=torch.complex64)))

    ones = torch.ones(3, requires_grad=True)
    total = mpi_ops.HorovodAllreduce.apply(ones, None, None, hvd.Sum, 1.0, 1.0, hvd.global_process_set)
    total.sum().backward()
    assert ones.grad is not None and ones.grad.tolist() == [size] * 3
    assert mpi_ops.HorovodAllgather.apply(torch.ones(1), None, hvd.global_process_set).tolist() == [1.0] * size


@case()
def devices_that_cannot_be_mixed(b: Any, rank: int, size: int) -> None:
    group = [torch.ones(2), torch.ones(2, device="meta")]
    for operation in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        fails(ValueError, "tensors must be on the CPU or on one CUDA device", lambda: operation(group))  # noqa: B023
    fails(ValueError, "tensors must be on the CPU or on one CUDA device", lambda: hvd.allreduce(group[1]))
    check_allreduce(b, size)


@case()
def scalars_are_refused_as_horovod_does(b: Any, rank: int, size: int) -> None:
    for operation in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
        for kind in (hvd.HorovodInternalError, RuntimeError, ValueError):
            fails(kind, "", lambda: operation(torch.tensor(1.0)))  # noqa: B023
    check_allreduce(b, size)


@case()
def elastic_loops_do_not_try_mistakes_again(b: Any, rank: int, size: int) -> None:
    mistakes = (
        lambda: hvd.allreduce(torch.ones(2 + rank), name="t"),
        lambda: hvd.broadcast(torch.ones(2), rank, name="t"),
        lambda: hvd.synchronize(
            hvd.allreduce_async(torch.ones(2, dtype=(torch.int32, torch.int64)[rank % 2]), name="t")
        ),
        lambda: hvd.allgather(torch.tensor(1.0)),
    )
    for mistake in mistakes:
        calls: list[int] = []

        @hvd.elastic.run
        def train(state: Any) -> None:
            calls.append(1)  # noqa: B023
            mistake()  # noqa: B023

        fails(errors.Mismatch, "", lambda: train(ObjectState(hvd.broadcast_object, hvd.rank, step=0)))
        assert calls == [1]
        check_allreduce(b, size)
