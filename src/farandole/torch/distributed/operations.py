# The operations of torch.distributed on one group of the engine, for both kinds of object that torch accepts.
# Touches torch; the rooms base, engine and world; other files of this room.
"""`Operations` is a mixin: group.py adds it to torch's process group, device_backend.py to torch's backend."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from ...base import errors
from ...engine.interface import Kind, Request
from ...world.world import World
from ..memory import engine_reaches_gpus
from . import collectives, failures, sharing
from .backward import Backward
from .collectives import Members, Plan
from .membership import found
from .reduce_ops import reduction_of
from .tensors import only
from .work import Operation, Watcher, Work

LEAVE, ABORT = 1, 2  # tags of REMOVE_GROUP: this rank leaves, or the group ends on all of its members
MONITOR = 1 << 42  # tag of monitored_barrier; tags of users have 32 bits
_UNSET = timedelta(0)
Tensors = Sequence[torch.Tensor]
Wrapped = TypeVar("Wrapped", bound="Operations")


class Operations:
    """Ranks that run collectives with each other."""

    def __init__(
        self,
        world: World,
        number: int,
        members: Members,
        store: Any,
        timeout: timedelta,
        name: str,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`number`: the engine's group. `shutdown` calls `close`."""
        super().__init__(members.me, members.size)  # type: ignore[call-arg]  # the constructor of the other base class
        self.world = world
        self.store = store
        self.members = replace(members, reaches_gpus=partial(engine_reaches_gpus, world))
        self.ranks = members.ranks
        self.watcher = Watcher(name)
        self._number = number
        self._timeout: timedelta = timeout
        self._name = name
        self._close = close
        self._left = False
        self._splits = 0
        self._counts: Counter[str] = Counter()
        self._seen: Counter[tuple[int, int]] = Counter()  # address and elements of large tensors
        self._forgotten: deque[Operation] = deque()  # operations whose Work the user has dropped
        self._coalescing: list[Work] | None = None
        self._backward = Backward()
        self._lock = threading.Lock()

    def _begin(self, what: str, plan: Plan, opts: Any = None) -> Work:
        """Submits the plan. `opts` may have a timeout and say that the caller waits at once."""
        self._counts[what] += 1
        named = f"{what} number {self._counts[what]} of group {self._name}"
        on_device = plan.in_order and len(plan.results) > 0 and plan.results[0].is_cuda
        for request in plan.requests:
            request.group = self._number
            if on_device and request.kind <= Kind.REDUCESCATTER:
                request.device = 0  # the engine uses its memory, or a host copy of it; ranks may differ in that
        limit: timedelta = getattr(opts, "timeout", _UNSET)
        timeout = limit if limit > _UNSET else self._timeout
        if self._forgotten:
            self._look_after_forgotten()
        try:
            handles = self.world.engine.submit(plan.requests, prompt=getattr(opts, "asyncOp", True) is False)
        except (ValueError, TypeError):
            raise
        except Exception as error:
            raise failures.translated(named, error) from error
        operation = Operation(self.world, handles, named, plan.results, plan.finish)
        work = Work(operation, self, timeout, plan.in_order)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _use_huge_pages(self, memory: Any) -> None:
        """A tensor used for the third time, such as a bucket of DDP, will be used again: huge pages are worth it
        then.
        """
        if memory is None:
            return
        self._seen[memory.address, memory.shape[0]] += 1
        if self._seen[memory.address, memory.shape[0]] == 3:
            self.world.engine.use_huge_pages(memory)
        elif len(self._seen) > 256:
            self._seen.clear()

    def forgotten(self, operation: Operation) -> None:
        """The user has dropped its Work, but results may still have to arrive."""
        self._forgotten.append(operation)

    def _look_after_forgotten(self) -> None:
        with self._lock:
            for _ in range(len(self._forgotten)):  # other threads may add more meanwhile
                operation = self._forgotten.popleft()
                if not operation.poll():
                    self._forgotten.append(operation)

    def place_of(self, rank: int) -> int:
        """The index in the group of a rank of the job."""
        return self.ranks.index(rank)

    # --- reductions ---

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Works in place."""
        tensor = only(tensors, "allreduce")
        large = tensor.is_cpu and tensor.layout == torch.strided and tensor.nbytes >= sharing.MIN_BYTES
        shared = large and sharing.share(self.world, tensor, move=self._backward.was_bucket(tensor))
        plan = collectives.allreduce(tensor, reduction_of(_op(opts)), self.members)
        if large and not shared:
            self._use_huge_pages(plan.requests[0].output)
        work = self._begin("allreduce", plan, opts)
        self._backward.watch(work, tensor)
        return work

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Several tensors in one operation."""
        reduction = reduction_of(_op(opts))
        plans = [collectives.allreduce(tensor, reduction, self.members) for tensor in tensors]
        return self._begin("allreduce", collectives.together(plans), opts)

    def reduce(self, tensors: Any, root: Any = None, op: Any = dist.ReduceOp.SUM, timeout: Any = None) -> Work:
        """The root gets the result."""
        opts = root if isinstance(root, dist.ReduceOptions) else None
        member = opts.rootRank if opts is not None else root
        reduction = reduction_of(opts.reduceOp if opts is not None else op)
        plan = collectives.reduce(only(tensors, "reduce"), reduction, self._root(member), self.members)
        return self._begin("reduce", plan, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """One input for each rank."""
        output = only(outputs, "reduce_scatter")
        pieces = inputs[0] if inputs and not isinstance(inputs[0], torch.Tensor) else inputs
        plan = collectives.reduce_scatter(output, pieces, reduction_of(_op(opts)), self.members)
        return self._begin("reduce_scatter", plan, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, *_: Any) -> Work:
        """One input with the shares of all ranks."""
        plan = collectives.reduce_scatter_single(output, input, reduction_of(_op(opts)), self.members)
        return self._begin("reduce_scatter", plan, opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Several tensors in one operation."""
        reduction = reduction_of(_op(opts))
        plans = [
            collectives.reduce_scatter_single(output, input, reduction, self.members)
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._begin("reduce_scatter", collectives.together(plans), opts)

    # --- copies ---

    def broadcast(self, tensors: Any, root: Any = None, timeout: Any = None) -> Work:
        """Copies the root's tensor, in place."""
        opts = root if isinstance(root, dist.BroadcastOptions) else None
        member = opts.rootRank if opts is not None else root
        plan = collectives.broadcast(only(tensors, "broadcast"), self._root(member), self.members)
        return self._begin("broadcast", plan, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """One output for each rank."""
        pieces = outputs[0] if outputs and not isinstance(outputs[0], torch.Tensor) else outputs
        plan = collectives.allgather(pieces, only(inputs, "allgather"), self.members)
        return self._begin("allgather", plan, opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Several tensors in one operation; `outputs` has one list for each rank."""
        plans = [
            collectives.allgather([row[index] for row in outputs], input, self.members)
            for index, input in enumerate(inputs)
        ]
        return self._begin("allgather", collectives.together(plans), opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, *_: Any) -> Work:
        """One output with the elements of all ranks."""
        return self._begin("allgather", collectives.allgather_single(output, input, self.members), opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Several tensors in one operation."""
        plans = [
            collectives.allgather_single(output, input, self.members)
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._begin("allgather", collectives.together(plans), opts)

    def gather(self, outputs: Any, inputs: Any, root: Any = None, timeout: Any = None) -> Work:
        """The root gets one tensor from each rank."""
        opts = root if isinstance(root, dist.GatherOptions) else None
        member = opts.rootRank if opts is not None else root
        pieces = outputs[0] if outputs and not isinstance(outputs[0], torch.Tensor) else outputs
        plan = collectives.gather(pieces, only(inputs, "gather"), self._root(member), self.members)
        return self._begin("gather", plan, opts)

    def scatter(self, outputs: Any, inputs: Any, root: Any = None, timeout: Any = None) -> Work:
        """The root sends one tensor to each rank."""
        opts = root if isinstance(root, dist.ScatterOptions) else None
        member = opts.rootRank if opts is not None else root
        pieces = inputs[0] if inputs and not isinstance(inputs[0], torch.Tensor) else inputs
        plan = collectives.scatter(only(outputs, "scatter"), pieces, self._root(member), self.members)
        return self._begin("scatter", plan, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: Any = None) -> Work:
        """Sends one tensor to each rank and receives one from each."""
        return self._begin("alltoall", collectives.alltoall(outputs, inputs, self.members), opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> Work:
        """Sends rows to each rank and receives rows from each."""
        plan = collectives.alltoall_single(output, input, output_splits, input_splits, self.members)
        return self._begin("alltoall", plan, opts)

    # --- transfers, barriers ---

    def send(self, tensors: Any, member: int, tag: int = 0) -> Work:
        """Sends to one rank of the group."""
        plan = collectives.send(only(tensors, "send"), self.ranks[self._root(member)], tag)
        return self._begin(f"send to rank {member} with tag {tag}", plan)

    def recv(self, tensors: Any, member: int, tag: int = 0) -> Work:
        """Receives from one rank of the group."""
        plan = collectives.receive(only(tensors, "recv"), self.ranks[self._root(member)], tag)
        return self._begin(f"recv from rank {member} with tag {tag}", plan)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receives from the rank that sends first; the work's `source_rank` tells which one."""
        plan = collectives.receive(only(tensors, "recv"), -1, tag)
        return self._begin(f"recv from any rank with tag {tag}", plan)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        """Is done when every rank has called it."""
        return self._begin("barrier", collectives.barrier(), opts)

    def monitored_barrier(self, limit: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier in which rank 0 reports ranks that did not come: the first missing one, or all of them.

        `limit`: a timeout, or options with a timeout.
        """
        chosen: timedelta = getattr(limit, "timeout", limit) or _UNSET
        seconds = (chosen if chosen > _UNSET else self._timeout).total_seconds()
        until = time.monotonic() + seconds

        def left() -> timedelta:
            return timedelta(seconds=max(0.001, until - time.monotonic()))

        word = torch.zeros(1, dtype=torch.uint8)
        others = range(1, self.members.size)
        if self.members.me != 0:
            self._begin("monitored_barrier", collectives.send(word, self.ranks[0], MONITOR)).wait(left())
            self._begin("monitored_barrier", collectives.receive(word, self.ranks[0], MONITOR)).wait(left())
            return
        missing: list[int] = []
        works = [
            self._begin("monitored_barrier", collectives.receive(word.clone(), self.ranks[member], MONITOR))
            for member in others
        ]
        for member, work in zip(others, works, strict=True):
            try:
                work.wait(left())
            except dist.DistBackendError as error:
                missing.append(member)
                if not wait_all_ranks:
                    raise dist.DistBackendError(
                        f"monitored_barrier: rank {member} did not reach the barrier within {seconds:g} s: {error}"
                    ) from error
        if missing:
            names = ", ".join(map(str, missing))
            raise dist.DistBackendError(
                f"monitored_barrier: ranks {names} did not reach the barrier within {seconds:g} s"
            )
        for member in others:
            self._begin("monitored_barrier", collectives.send(word, self.ranks[member], MONITOR)).wait()

    def start_coalescing(self) -> None:
        """From now on, operations are also collected for the work that `end_coalescing` returns."""
        self._coalescing = []

    def end_coalescing(self) -> Work:
        """The operations since `start_coalescing` as one work."""
        works, self._coalescing = self._coalescing or [], None

        def finish(outcomes: Any) -> None:
            for work in works:
                work.wait()

        return Work(Operation(self.world, [], "coalesced operations", (), finish), self, self._timeout)

    def _root(self, member: Any) -> int:
        if not 0 <= member < self.members.size:
            raise ValueError(f"rank {member} is not in the group, which has {self.members.size} ranks")
        return int(member)

    # --- names, timeouts, splitting, ending ---

    def getBackendName(self) -> str:
        """The name of the backend."""
        return "farandole"

    def set_timeout(self, timeout: timedelta) -> None:
        """Applies to operations that begin from now on."""
        self._timeout = timeout

    def part(self: Wrapped, indices: Sequence[int], store: Any, timeout: timedelta | None, name: str) -> Wrapped:
        """A new group of some of the members; this rank must be one of them."""
        members = Members(tuple(self.ranks[member] for member in indices), list(indices).index(self.members.me))
        number = found(self.world, members, store)
        return type(self)(self.world, number, members, store, timeout or self._timeout, name)

    supports_splitting = True

    def perform_nocolor_split(self, device: Any) -> None:
        """Does nothing: ranks that are not in the new group have nothing to do."""

    def eager_connect_single_device(self, device: Any) -> None:
        """Does nothing: the connections exist already."""

    def _end(self, tag: int) -> None:
        """Removes the group in the core. The tag is LEAVE or ABORT."""
        with contextlib.suppress(errors.HorovodInternalError, ValueError):
            request = Request(Kind.REMOVE_GROUP, splits=[self._number], tag=tag)
            [handle] = self.world.engine.submit([request], prompt=True)
            self.world.engine.wait(handle)

    def abort(self) -> None:
        """Ends every operation of the group on all of its ranks. For the default group: ends every operation of the
        job.
        """
        if self._number:
            self._end(ABORT)
            return
        with contextlib.suppress(errors.HorovodInternalError):
            rank = self.world.engine.rank
            self.world.engine.revoke(errors.REVOKED, rank, f"rank {rank} has aborted the process group {self._name}")

    def shutdown(self) -> None:
        """Leaves the group and frees its memory; a second call does nothing."""
        if self._left:
            return
        self._left = True
        with contextlib.suppress(errors.HorovodInternalError):
            self._look_after_forgotten()
        if self._number:
            self._end(LEAVE)
        self._close()
        self.watcher.close()


def _op(opts: Any) -> Any:
    """The reduction: from options, or given directly."""
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)
