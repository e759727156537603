# A communication hook for DistributedDataParallel: this package reduces the gradients, with any backend of DDP.
# Touches torch; the rooms operations and world; the file ops.
"""`model.register_comm_hook(None, hvd.ddp_hook)`; with NCCL inside each host `register_comm_hook(hvd.Hosts(), ...)`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist

from ..operations.objects import allgather_object
from ..operations.pending import synchronize
from ..operations.reductions import Average
from ..world.groups import ProcessSet, global_process_set
from ..world.runtime import runtime
from ..world.world import World
from .ops import allreduce_, allreduce_async_

# One thread per world. It completes the futures in the order of the buckets.
_executors: WeakKeyDictionary[World, ThreadPoolExecutor] = WeakKeyDictionary()


class Hosts:
    """For DDP whose process group is one host: each rank of the host reduces its share of a bucket with other hosts.

    All ranks of the job must make it at the same time, and every host must have the same number of ranks. `group` is
    the group of torch.distributed inside the host (None: the default group), for example with NCCL.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        local_rank = dist.get_rank(group)
        locations = allgather_object((local_rank, self.size))
        if any(size != self.size for _, size in locations):
            sizes = sorted({size for _, size in locations})
            raise ValueError(f"all hosts must have the same number of ranks; found hosts with {sizes} ranks")
        # Every rank must make all process sets, because a set belongs to the whole job.
        sets = []
        for wanted in range(self.size):
            ranks = [rank for rank, (found, _) in enumerate(locations) if found == wanted]
            is_world = len(ranks) == len(locations)
            sets.append(global_process_set if is_world else runtime.world.groups.find(ranks) or _add_process_set(ranks))
        self.process_set = sets[local_rank]

    def average(self, buffer: torch.Tensor) -> None:
        """In place: each rank of the host gets a share of the host's sum, averages it over the hosts, and shares the
        result.
        """
        share = -(-buffer.numel() // self.size)
        row = torch.zeros(share * self.size, dtype=buffer.dtype, device=buffer.device)
        row[: buffer.numel()].copy_(buffer.view(-1))
        own_part = torch.empty(share, dtype=buffer.dtype, device=buffer.device)
        dist.reduce_scatter_tensor(own_part, row, group=self.group)
        own_part.div_(self.size)
        allreduce_(own_part, op=Average, process_set=self.process_set)
        dist.all_gather_into_tensor(row, own_part, group=self.group)
        buffer.view(-1).copy_(row[: buffer.numel()])


def _add_process_set(ranks: list[int]) -> ProcessSet:
    made = ProcessSet(ranks)
    runtime.world.groups.add([made])
    return made


def ddp_hook(state: ProcessSet | Hosts | None, bucket: Any) -> Any:
    """Averages a bucket of DDP over the ranks of `state`. None: all ranks of the job. Hosts: the ranks of all hosts."""
    buffer = bucket.buffer()
    if isinstance(state, Hosts):

        def average() -> None:
            state.average(buffer)

    else:
        handle = allreduce_async_(buffer, op=Average, process_set=state or global_process_set)

        def average() -> None:
            synchronize(handle)

    return _run_in_order(average, buffer)


if dist.is_available():
    # DDP compares the types themselves, but this file has only their names.
    ddp_hook.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def _run_in_order(run: Callable[[], None], buffer: torch.Tensor) -> Any:
    """A Future of the buffer that is done when `run` has ended."""
    worker = _executors.get(runtime.world)
    if worker is None:
        worker = _executors[runtime.world] = ThreadPoolExecutor(1, thread_name_prefix="farandole-ddp")
    on_gpu = buffer.is_cuda
    future: Any = torch.futures.Future(devices=[buffer.device] if on_gpu else None)
    stream = torch.cuda.current_stream(buffer.device) if on_gpu else None

    def complete() -> None:
        try:
            with torch.cuda.stream(stream):  # None: the context does nothing
                run()
                future.set_result(buffer)
        except BaseException as error:
            future.set_exception(error)

    worker.submit(complete)
    return future
