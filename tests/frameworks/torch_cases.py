# Cases that only torch has: state of models and optimizers, sparse tensors, SyncBatchNorm, the conveniences.
# Touches torch, farandole.torch and the battery's table.
"""Run with the battery, in the same jobs."""

from __future__ import annotations

import copy
import os
import pickle
import time
from typing import Any

import numpy as np
import torch
from battery.binding import Table, fails
from torch import nn

import farandole.torch as hvd
from farandole.base import errors
from farandole.engine.native import NativeEngine
from farandole.world.runtime import runtime

TORCH = Table()
case = TORCH.case


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))


@case()
def torch_broadcast_parameters(b: Any, rank: int, size: int) -> None:
    expected = model_of(1).state_dict()
    for given in (
        lambda m: m.state_dict(),
        lambda m: list(m.state_dict().items()),
        lambda m: list(m.state_dict().values()),
    ):
        model: Any = model_of(rank)
        model = model.to(memory_format=torch.channels_last)  # not contiguous
        hvd.broadcast_parameters(given(model), root_rank=1)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
    complex_one = torch.full((2,), complex(rank, 1))
    hvd.broadcast_parameters([complex_one], 0)
    assert complex_one.tolist() == [1j, 1j]
    fails(ValueError, "params is a generator", lambda: hvd.broadcast_parameters(model.named_parameters(), 0))
    fails(ValueError, "", lambda: hvd.broadcast_parameters({"a": 1}, 0))
    fails(errors.Mismatch, "", lambda: hvd.broadcast_parameters({"a": torch.ones(rank + 1), "b": torch.ones(1)}, 0))


@case()
def torch_broadcast_optimizer_state(b: Any, rank: int, size: int) -> None:
    makers = (
        lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
        lambda p, lr: torch.optim.SGD(p, lr=lr),
        lambda p, lr: torch.optim.Adam(p, lr=lr, amsgrad=True),
        lambda p, lr: torch.optim.AdamW(p, lr=torch.tensor(lr), foreach=False),
        lambda p, lr: torch.optim.Adagrad(p, lr=lr),
        lambda p, lr: torch.optim.Adafactor(p, lr=lr),
    )
    for maker in makers:
        for trained in (True, False):
            model = nn.Linear(3, 2)
            optimizer = maker(model.parameters(), 0.1 * (rank + 1))
            for _ in range(2 if trained == (rank == 0) else 0):  # only the root has state, or only the others
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            for group in optimizer.param_groups:
                assert np.isclose(float(group["lr"]), 0.1)
            states = hvd.allgather_object(pickle.dumps(optimizer.state_dict()))
            first, own_state = pickle.loads(states[0]), optimizer.state_dict()
            assert str(first) == str(own_state), (first, own_state)
            assert not trained or type(optimizer) is torch.optim.SGD or own_state["state"]
    lbfgs = torch.optim.LBFGS(nn.Linear(1, 1).parameters())
    fails(ValueError, "", lambda: hvd.broadcast_optimizer_state(lbfgs, 0))
    fails(TypeError, "optimizer is a Linear", lambda: hvd.broadcast_optimizer_state(nn.Linear(1, 1), 0))  # type: ignore[arg-type]


@case()
def torch_sparse_allreduce(b: Any, rank: int, size: int) -> None:
    indices = torch.tensor([[0, rank + 1, 0]])
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 1.0]])
    local = torch.sparse_coo_tensor(indices, values, (size + 2, 2), check_invariants=False)
    expected: Any = sum(
        torch.sparse_coo_tensor(
            torch.tensor([[0, other + 1, 0]]), values, (size + 2, 2), check_invariants=False
        ).to_dense()
        for other in range(size)
    )
    total = hvd.sparse_allreduce_async(local, name="s", op=hvd.Sum)
    mean = hvd.sparse_allreduce_async(local, name="m", op=hvd.Average)
    assert torch.equal(mean().to_dense(), expected / size)
    result = total()
    assert result.is_sparse and torch.equal(result.to_dense(), expected)
    empty = torch.sparse_coo_tensor(torch.zeros((1, 0), dtype=torch.int64), torch.zeros((0, 2)), (4, 2))
    assert hvd.sparse_allreduce_async(empty, "e", hvd.Sum)()._nnz() == 0
    fails(ValueError, "sparse_allreduce_async needs", lambda: hvd.sparse_allreduce_async(values, "d", hvd.Sum))
    fails(NotImplementedError, "", lambda: hvd.sparse_allreduce_async(local, name="s", op=hvd.Adasum))


@case()
def torch_sync_batch_norm_equals_one_process(b: Any, rank: int, size: int) -> None:
    torch.manual_seed(0)
    for shape in ((2 * size + 1, 3), (2 * size + 1, 3, 4), (2 * size + 1, 3, 2, 2)):
        for options in ({}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}):
            whole = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](3, **options).double()
            synced = hvd.SyncBatchNorm(3, **options).double()
            if whole.affine:
                nn.init.uniform_(whole.weight)
            synced.load_state_dict(whole.state_dict())
            part = slice(2 * rank, 2 * rank + (3 if rank == size - 1 else 2))
            for _ in range(2):
                values = torch.randn(shape, dtype=torch.float64) * 3 + 100
                weights = torch.randn(shape, dtype=torch.float64)
                compare_batch_norms(whole, synced, values, weights, part)
            if whole.track_running_stats:
                whole.eval(), synced.eval()
                assert torch.allclose(whole(values), synced(values), atol=1e-9)


def compare_batch_norms(
    whole: nn.Module, synced: nn.Module, values: torch.Tensor, weights: torch.Tensor, part: slice
) -> None:
    def close(one: Any, two: Any, what: str) -> None:
        assert torch.allclose(one, two, atol=1e-9), f"{what}: {one} and {two}"

    one, two = values.clone().requires_grad_(), values[part].clone().requires_grad_()
    whole.zero_grad()
    synced.zero_grad()
    expected, found = whole(one), synced(two)
    close(expected[part], found, "output")
    (expected * weights).sum().backward()
    (found * weights[part]).sum().backward()
    close(one.grad[part], two.grad, "gradient of the input")
    for a, c in zip(whole.parameters(), synced.parameters(), strict=True):
        grad: Any = c.grad
        close(a.grad, hvd.allreduce(grad, op=hvd.Sum), "gradient of the parameters")
    for x, y in zip(whole.buffers(), synced.buffers(), strict=True):
        close(x, y, "buffer")


@case(init={"process_sets": "dynamic"})
def torch_sync_batch_norm_in_process_sets(b: Any, rank: int, size: int) -> None:
    most = hvd.add_process_set(range(size - 1))
    layer = copy.deepcopy(hvd.SyncBatchNorm(1, process_set=most))
    assert layer.process_set is most
    if most.included():
        values = torch.tensor([[2.0 * other, 2.0 * other + 3] for other in range(size - 1)])
        found = layer(values[rank].reshape(2, 1))
        expected = (values[rank] - values.mean()) / values.std(correction=0)
        assert torch.allclose(found.flatten(), expected, atol=1e-3), (found, expected)
    alone = pickle.loads(pickle.dumps(hvd.SyncBatchNorm(1)))
    assert alone.process_set is hvd.global_process_set
    for dtype in (torch.bfloat16, torch.float16):
        result = alone(torch.full((2, 1, 3), float(rank), dtype=dtype))
        assert result.dtype == dtype
    empty = alone(torch.zeros((0 if rank else 3, 1)))  # a rank without a batch takes part
    assert empty.shape[0] == (0 if rank else 3)
    fails(ValueError, "", lambda: alone(torch.ones(3)))
    fails(ValueError, "expected a floating input", lambda: alone(torch.ones(3, 2)))
    fails(ValueError, "expected a floating input", lambda: alone(torch.ones((3, 1), dtype=torch.int64)))
    fails(ValueError, "", lambda: alone(torch.ones((0 if rank else 1, 1))))


@case()
def torch_second_derivatives(b: Any, rank: int, size: int) -> None:
    tensor = torch.tensor([2.0 + rank], requires_grad=True)
    [first] = torch.autograd.grad((hvd.allreduce(tensor, op=hvd.Sum) ** 2).sum(), tensor, create_graph=True)
    [second] = torch.autograd.grad(first.sum(), tensor)
    assert float(second) == 2 * size * size


@case()
def torch_no_graph_where_none_is_wanted(b: Any, rank: int, size: int) -> None:
    tensor = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not hvd.allreduce(tensor).requires_grad
    assert not hvd.allreduce(tensor.detach()).requires_grad
    assert hvd.allreduce(tensor).requires_grad
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor and tensor.tolist() == [size, size]
    parameter = nn.Parameter(torch.full((2,), float(rank)))
    hvd.broadcast_(parameter, 1)
    assert parameter.tolist() == [1.0, 1.0]


@case()
def torch_user_compressors(b: Any, rank: int, size: int) -> None:
    class Halves(hvd.Compressor):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return tensor / 2, 2.0

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            return tensor * ctx

    tensors = [torch.ones(2), torch.ones(3)]
    for compression in (Halves, hvd.Compression.bf16):
        for result in hvd.grouped_allreduce(tensors, op=hvd.Sum, compression=compression):
            assert result.unique().tolist() == [size]
    whole = torch.ones(2, dtype=torch.int64)
    assert hvd.allreduce(whole, compression=hvd.Compression.fp16).dtype == torch.int64
    scattered = hvd.reducescatter(torch.ones(size, dtype=torch.float64), compression=hvd.Compression.bf16)
    assert scattered.dtype == torch.float64


@case()
def torch_conveniences(b: Any, rank: int, size: int) -> None:
    assert hvd.device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert hvd.scale_lr(0.5) == 0.5 * size
    assert hvd.scale_lr(0.5, op=hvd.Adasum, backward_passes_per_step=2) == 1.0
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=size * 1.0)
    scheduler = hvd.WarmupLR(optimizer, steps_per_epoch=2, warmup_epochs=2)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert np.allclose(rates, [1 + (size - 1) * done / 4 for done in (1, 2, 3, 4, 4, 4)]), rates
    fails(ValueError, "steps_per_epoch=0", lambda: hvd.WarmupLR(optimizer, steps_per_epoch=0))
    hvd.set_seed(3)
    assert len(set(hvd.allgather_object((float(torch.rand(1)), np.random.rand())))) == 1
    hvd.set_seed(3, per_rank=True)
    assert len(set(hvd.allgather_object((float(torch.rand(1)), np.random.rand())))) == size


@case()
def torch_warmup_with_momentum_is_that_of_keras(b: Any, rank: int, size: int) -> None:
    """Keras keeps the rate in the velocity, and so corrects the momentum for the step after a change of it."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1 * size, momentum=0.9)
    scheduler = hvd.WarmupLR(optimizer, steps_per_epoch=3, warmup_epochs=2)
    old, velocity, value = optimizer.param_groups[0]["lr"], 0.0, 0.0
    for step in range(9):
        rate, gradient = optimizer.param_groups[0]["lr"], float(step % 4 + 1)
        velocity = 0.9 * (rate / old) * velocity - rate * gradient
        old, value = rate, value + velocity
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        scheduler.step()
        assert np.isclose(float(weight), value, rtol=1e-12), (step, float(weight), value)


@case()
def torch_check_equal_names_what_differs(b: Any, rank: int, size: int) -> None:
    model = model_of(0)
    hvd.check_equal(model)
    with torch.no_grad():
        model[3].bias[0] += rank == 1
        model[1].running_mean += rank == 1
    message = "the ranks are not equal: 1.running_mean differs on rank 1; 3.bias differs on rank 1"
    fails(errors.Mismatch, message, lambda: hvd.check_equal(model))
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.check_equal(model.state_dict())
    fails(TypeError, "expected a module", lambda: hvd.check_equal(torch.ones(1)))


@case(init={"process_sets": "dynamic"})
def torch_check_equal_in_process_sets(b: Any, rank: int, size: int) -> None:
    most = hvd.add_process_set(range(size - 1))
    if most.included():
        hvd.check_equal({"t": torch.ones(1)}, process_set=most)


@case()
def torch_gathered_again(b: Any, rank: int, size: int) -> None:
    """Calls that are known from before: their results are new tensors, of whatever size the others make them."""
    kept, total = [], sum(range(size))
    for step, (rows, dtype) in enumerate([(2, torch.float32)] * 3 + [(1, torch.bfloat16)] * 3 + [(0, torch.int64)] * 3):
        tensor = torch.full((rows * size, 3), 10 * step + rank).to(dtype)
        kept.append((hvd.alltoall(tensor, name="again.all"), hvd.allgather(tensor, name="again.gather"), step))
        for result, count in zip(kept[-1], (rows, rows * size), strict=False):
            assert result.dtype is dtype and result.shape == (count * size, 3), result
    for alltoall, allgather, step in kept:  # nothing was written into them later
        for result in (alltoall, allgather):
            assert [row.tolist() for row in result.chunk(size)] == [
                [[10 * step + member] * 3] * (result.shape[0] // size) for member in range(size)
            ]
    for more in (0, 0, 0, 3, 3, 0):  # here the last rank has more than before, and then less
        local = more if rank == size - 1 else 0
        parts = hvd.allgather(torch.full((1 + local,), rank), name="again.rows")
        assert parts.tolist() == [*range(size - 1), *[size - 1] * (1 + more)]
        exchanged = hvd.alltoall(torch.full((size * (1 + local),), rank), name="again.exchange")
        assert exchanged.tolist() == [*range(size - 1), *[size - 1] * (1 + more)]
    for late in (False, False, True):  # the last time rank 0 comes after the others have begun to sleep
        if late and rank == 0:
            time.sleep(0.5)  # sleep: longer than a call of the core waits before it comes back to Python
        assert hvd.allgather(torch.full((1,), rank), name="again.late").tolist() == list(range(size))
        assert hvd.allreduce(torch.full((2,), rank), op=hvd.Sum, name="again.later").tolist() == [total] * 2
    fails(ValueError, "alltoall without splits", lambda: hvd.alltoall(torch.ones(size + 1), name="again.exchange"))
    fails(ValueError, "the tensor of shape", lambda: hvd.alltoall(torch.ones(2, size).T, name="again.exchange"))
    torch.set_default_device("meta")  # memory for results is the tensors' own kind of memory all the same
    try:
        here = torch.full((size,), float(rank), device="cpu")
        for _ in range(3):
            for result in (hvd.alltoall(here, name="again.here"), hvd.allreduce(here, name="again.mean")):
                assert result.device.type == "cpu" and result.sum().item() == size * (size - 1) / 2
    finally:
        torch.set_default_device(None)


@case()
def torch_large_results_are_everybodys_own(b: Any, rank: int, size: int) -> None:
    """Neighbours write into them while they are computed. Afterwards no other rank and no child process does."""
    before = runtime.world.engine.counter("in_place_bytes")
    kept = []
    for step in range(12):
        rows = (5 if step < 6 else 7) << 8
        tensor = torch.full((rows * size, 1024), float(10 * step + rank))
        kept.append(hvd.alltoall(tensor, name="large.all"))
        assert kept[-1].shape == (rows * size, 1024)
        if step % 3 == 0:
            kept.append(hvd.alltoall(tensor.bfloat16(), torch.full((size,), rows), name="large.split")[0])
            assert kept[-1].dtype is torch.bfloat16
    if hvd.local_size() > 1 and isinstance(runtime.world.engine, NativeEngine):
        assert runtime.world.engine.counter("in_place_bytes") > before
    sums = [result.double().sum().item() for result in kept]
    child = os.fork()
    if child == 0:
        for result in kept:
            result.zero_()
        os._exit(0 if not any(result.any() for result in kept) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [result.double().sum().item() for result in kept] == sums
    for result in kept:
        assert [part.unique().tolist() for part in result.chunk(size)] == [
            [result[0, 0].item() + member] for member in range(size)
        ]


@case()
def torch_allreduce_in_place_again(b: Any, rank: int, size: int) -> None:
    total = size * (size + 1) / 2
    for shape, dtype in [((3,), torch.float32)] * 3 + [((2, 2), torch.float32), ((2, 2), torch.int64)] * 2:
        tensor = torch.full(shape, rank + 1, dtype=dtype)
        assert hvd.allreduce_(tensor, op=hvd.Sum, name="again") is tensor
        assert tensor.tolist() == torch.full(shape, total, dtype=dtype).tolist()
    for factor in (1.0, 2.0, 1.0):  # unnamed, and another factor in between
        tensor = torch.full((5,), rank + 1.0)
        hvd.allreduce_(tensor, op=hvd.Sum, prescale_factor=factor)
        assert tensor.tolist() == [factor * total] * 5
    square = torch.full((2, 2), rank + 1.0)
    for _ in range(2):
        hvd.allreduce_(square, op=hvd.Max, name="again.square")
    fails(
        ValueError,
        "the tensor of shape (2, 2) is not",
        lambda: hvd.allreduce_(torch.ones(2, 3).T[:2], op=hvd.Max, name="again.square"),
    )
    fails(errors.Mismatch, "", lambda: hvd.allreduce_(torch.ones(2 + rank), op=hvd.Max, name="again.square"))
    hvd.allreduce_(square, op=hvd.Max, name="again.square")
    assert square.tolist() == [[size, size], [size, size]]
    empty = torch.ones(0, 3)
    for _ in range(2):
        hvd.allreduce_(empty, name="again.empty")
    parameter = nn.Parameter(torch.full((2,), rank + 1.0))
    for _ in range(3):
        with torch.no_grad():
            parameter.fill_(rank + 1.0)
            hvd.allreduce_(parameter, op=hvd.Sum, name="again.parameter")
        assert parameter.tolist() == [total, total]
