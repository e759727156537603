# Cases that only CUDA tensors have: streams, mixtures with the CPU, several operations under way.
# Touches torch, farandole.torch and the battery's table. All ranks may share one GPU.
"""The GPU is kept busy before each operation, so that a read without waiting would get old values."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from battery.binding import Table, fails

import farandole.torch as hvd

CUDA = Table()
case = CUDA.case
BUSY_CYCLES = 200_000_000  # about 0.1 s of a GPU


def late(value: float, count: int = 1000) -> torch.Tensor:
    """A tensor that gets its values a good while after this returns."""
    tensor = torch.zeros(count, device="cuda")
    torch.cuda._sleep(BUSY_CYCLES)
    return tensor.add_(value)


@case()
def cuda_operations_follow_the_current_stream(b: Any, rank: int, size: int) -> None:
    total = size * (size + 1) / 2
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(3):
                tensor = late(rank + 1.0)
                assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
                assert float((tensor * 2).sum()) == 2 * total * 1000
                result = hvd.synchronize(hvd.allreduce_async(late(rank + 1.0), op=hvd.Sum))
                assert float((result * 2).sum()) == 2 * total * 1000
                gathered = hvd.synchronize(hvd.allgather_async(late(rank + 1.0)))
                assert float(gathered.sum()) == total * 1000


@case()
def cuda_calls_do_not_wait_for_the_gpu(b: Any, rank: int, size: int) -> None:
    hvd.allreduce_(torch.ones(1000, device="cuda"))  # the first use of anything is slow
    hvd.synchronize(hvd.allreduce_async_(torch.ones(1000, device="cuda")))
    torch.cuda.synchronize()
    tensor = late(1.0)
    began = time.monotonic()
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
    assert not hvd.poll(handle)
    asked = time.monotonic() - began
    hvd.synchronize(handle)
    waited = time.monotonic() - began
    assert asked < waited / 4, f"the call took {asked:.4f} s of {waited:.4f} s"
    assert float(tensor.sum()) == size * 1000


@case()
def cuda_many_under_way(b: Any, rank: int, size: int) -> None:
    tensors = [late(float(index + rank), 10 + index) if index % 10 == 0 else
               torch.full((10 + index,), float(index + rank), device="cuda") for index in range(40)]  # fmt: skip
    order = range(40) if rank % 2 else range(39, -1, -1)
    handles = {index: hvd.allreduce_async_(tensors[index], name=f"t{index}", op=hvd.Sum) for index in order}
    for index, tensor in enumerate(tensors):
        hvd.synchronize(handles[index])
        assert tensor.unique().tolist() == [size * index + size * (size - 1) / 2]


@case()
def cuda_and_cpu_side_by_side(b: Any, rank: int, size: int) -> None:
    for _ in range(5):
        slow = hvd.allreduce_async(late(1.0, 2), op=hvd.Sum)
        quick = hvd.allreduce_async(torch.full((3,), 2.0), op=hvd.Sum)
        assert hvd.synchronize(quick).tolist() == [2 * size] * 3
        assert hvd.synchronize(slow).tolist() == [size] * 2
    fails(ValueError, "", lambda: hvd.grouped_allreduce([torch.ones(1), torch.ones(1, device="cuda")]))
    tensor = torch.ones(3, device="cuda" if rank else "cpu")
    fails(
        hvd.HorovodInternalError,
        "Mismatched ALLREDUCE CPU/GPU",
        lambda: hvd.allreduce(tensor, name="anywhere", op=hvd.Sum),
    )


@case()
def cuda_barrier_and_join_come_after_what_was_begun(b: Any, rank: int, size: int) -> None:
    handle = hvd.allreduce_async(late(1.0, 2), name="x", op=hvd.Sum)
    hvd.barrier()
    assert hvd.synchronize(handle).tolist() == [size] * 2
    handle = hvd.allreduce_async(late(1.0, 2), name="y", op=hvd.Sum)
    hvd.join()
    assert hvd.synchronize(handle).tolist() == [size] * 2


@case()
def cuda_sparse_and_batch_norm(b: Any, rank: int, size: int) -> None:
    sparse = torch.eye(3, device="cuda").to_sparse()
    result = hvd.sparse_allreduce_async(sparse, "s", hvd.Sum)()
    assert result.is_cuda and torch.equal(result.to_dense().cpu(), torch.eye(3) * size)
    torch.manual_seed(0)
    values = torch.randn(2 * size, 3, 4, 4)
    whole = torch.nn.BatchNorm2d(3)
    synced = hvd.SyncBatchNorm(3).cuda()
    one, two = values.clone().requires_grad_(), values[2 * rank : 2 * rank + 2].cuda().requires_grad_()
    expected, found = whole(one), synced(two)
    (expected**3).sum().backward()
    (found**3).sum().backward()
    assert torch.allclose(found.cpu(), expected[2 * rank : 2 * rank + 2], atol=1e-5)
    assert torch.allclose(two.grad.cpu(), one.grad[2 * rank : 2 * rank + 2], atol=1e-4)
    assert whole.running_var is not None and synced.running_var is not None
    assert torch.allclose(synced.running_var.cpu(), whole.running_var, atol=1e-5)


@case()
def cuda_state_of_models_and_optimizers(b: Any, rank: int, size: int) -> None:
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 2).cuda().to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    if rank == 0:
        model(torch.ones(1, 3, device="cuda", dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    hvd.check_equal(model)
    for state in optimizer.state.values():
        assert state["exp_avg"].is_cuda
        hvd.check_equal({"exp_avg": state["exp_avg"], "step": state["step"]})


@case()
def cuda_shutdown_ends_the_thread(b: Any, rank: int, size: int) -> None:
    handle = hvd.allreduce_async(late(1.0), name=f"never{rank}")
    hvd.shutdown()
    deadline = time.monotonic() + 5
    while any("farandole-staging" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)  # sleep: between two looks
    hvd.init()
    assert hvd.synchronize(handle) is None
