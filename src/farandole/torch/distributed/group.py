# The process group: torch.distributed's methods under their old and new names, on one group of the engine.
# Touches torch, runtime, collectives and work.
"""`Group` is what `init_process_group("farandole")` and `new_group` give."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from ... import errors
from ...engine import Kind, Request
from ...runtime import World
from . import collectives, failures, sharing
from .collectives import Members, Plan
from .reduce_ops import reduction_of
from .tensors import only
from .work import Operation, Watcher, Work

FIRST_NUMBER = 1 << 20  # of groups that their members make; the core has those below for itself
MOST_GROUPS = 1 << 16  # between init_process_group and destroy_process_group
LEAVE, ABORT = 1, 2  # tags of REMOVE_GROUP: this rank leaves, or the group ends on all of its members
MONITOR = 1 << 42  # tag of monitored_barrier; those of users have 32 bits
BACKWARD = {"torch.autograd.graph", "torch.autograd"}  # the module, by release, whose function runs a backward pass
_UNSET = timedelta(0)
Tensors = Sequence[torch.Tensor]


class Group(dist.ProcessGroup):  # type: ignore[misc]
    """Ranks that run collectives among themselves."""

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
        """`number`: the engine's group. `close` is called by `shutdown`."""
        super().__init__(members.me, members.size)
        self.world = world
        self.store = store
        self.members = members
        self.ranks = members.ranks
        self.watcher = Watcher(name)
        self._number = number
        self._timeout: timedelta = timeout
        self._name = name
        self._description = ""
        self._close = close
        self._left = False
        self._splits = 0
        self._counts: Counter[str] = Counter()
        self._seen: Counter[tuple[int, int]] = Counter()  # address and elements of large tensors
        self._forgotten: deque[Operation] = deque()  # whose Work nobody holds any more
        self._coalescing: list[Work] | None = None
        self._backward = -1  # the backward pass, by its number, in which DDP has sent
        self._buckets: list[Work] = []  # these
        self._lock = threading.Lock()

    def _begin(self, what: str, plan: Plan, opts: Any = None) -> Work:
        """Hands the plan to the engine; `opts` may say how long it may take and that the caller waits at once."""
        self._counts[what] += 1
        named = f"{what} number {self._counts[what]} of group {self._name}"
        for request in plan.requests:
            request.group = self._number
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

    def _settle(self, memory: Any) -> None:
        """What comes here for the third time, such as a bucket of DDP, will come again: huge pages pay then."""
        if memory is None:
            return
        self._seen[memory.address, memory.shape[0]] += 1
        if self._seen[memory.address, memory.shape[0]] == 3:
            self.world.engine.settle(memory)
        elif len(self._seen) > 256:
            self._seen.clear()

    def forgotten(self, operation: Operation) -> None:
        """Its Work is gone, but results may still have to arrive."""
        self._forgotten.append(operation)

    def _look_after_forgotten(self) -> None:
        with self._lock:
            for _ in range(len(self._forgotten)):  # more may be forgotten meanwhile, by any thread
                operation = self._forgotten.popleft()
                if not operation.poll():
                    self._forgotten.append(operation)

    def place_of(self, rank: int) -> int:
        """The place in the group of a rank of the job."""
        return self.ranks.index(rank)

    # --- reductions ---

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """In place."""
        tensor = only(tensors, "allreduce")
        bucket = _asked_by_backward()
        large = tensor.is_cpu and tensor.layout == torch.strided and tensor.nbytes >= sharing.LEAST_BYTES
        shared = large and sharing.share(self.world, tensor, move=bucket)
        plan = collectives.allreduce(tensor, reduction_of(_op(opts)), self.members)
        if large and not shared:
            self._settle(plan.requests[0].output)
        work = self._begin("allreduce", plan, opts)
        if bucket:
            work.of_ddp = True
            if tensor.is_cpu:
                self._await_after_backward(work)
        return work

    def _await_after_backward(self, work: Work) -> None:
        """Before DDP looks at its buckets: what went wrong is raised by `backward`, as what it is."""
        if torch._C._current_autograd_node() is None:
            return  # backward is over, and DDP is about to wait: its graph is static, and this its first pass
        work.awaited = True
        task = torch._C._current_graph_task_id()
        if task != self._backward:
            for lost in self._buckets:  # of a pass that did not come to its end
                lost.give_up()
            self._backward, self._buckets = task, []
            torch.autograd.Variable._execution_engine.queue_callback(self._await_buckets)
        self._buckets.append(work)

    def _await_buckets(self) -> None:
        works, self._buckets, self._backward = self._buckets, [], -1
        for work in works:
            work.deliver()

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Several at once."""
        reduction = reduction_of(_op(opts))
        plans = [collectives.allreduce(tensor, reduction, self.members) for tensor in tensors]
        return self._begin("allreduce", collectives.together(plans), opts)

    def reduce(self, tensors: Any, root: Any = None, op: Any = dist.ReduceOp.SUM, timeout: Any = None) -> Work:
        """The root gets the result."""
        opts = root if isinstance(root, dist.ReduceOptions) else None
        place = opts.rootRank if opts is not None else root
        reduction = reduction_of(opts.reduceOp if opts is not None else op)
        plan = collectives.reduce(only(tensors, "reduce"), reduction, self._root(place), self.members)
        return self._begin("reduce", plan, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """One input per rank."""
        output = only(outputs, "reduce_scatter")
        pieces = inputs[0] if inputs and not isinstance(inputs[0], torch.Tensor) else inputs
        plan = collectives.reduce_scatter(output, pieces, reduction_of(_op(opts)), self.members)
        return self._begin("reduce_scatter", plan, opts)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None, *_: Any) -> Work:
        """One input with everybody's share."""
        plan = collectives.reduce_scatter_single(output, given, reduction_of(_op(opts)), self.members)
        return self._begin("reduce_scatter", plan, opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Several at once."""
        reduction = reduction_of(_op(opts))
        plans = [
            collectives.reduce_scatter_single(output, given, reduction, self.members)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return self._begin("reduce_scatter", collectives.together(plans), opts)

    # --- copies ---

    def broadcast(self, tensors: Any, root: Any = None, timeout: Any = None) -> Work:
        """The root's tensor, in place."""
        opts = root if isinstance(root, dist.BroadcastOptions) else None
        place = opts.rootRank if opts is not None else root
        plan = collectives.broadcast(only(tensors, "broadcast"), self._root(place), self.members)
        return self._begin("broadcast", plan, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """One output per rank."""
        pieces = outputs[0] if outputs and not isinstance(outputs[0], torch.Tensor) else outputs
        plan = collectives.allgather(pieces, only(inputs, "allgather"), self.members)
        return self._begin("allgather", plan, opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Several at once; `outputs` has one list per rank."""
        plans = [
            collectives.allgather([row[index] for row in outputs], given, self.members)
            for index, given in enumerate(inputs)
        ]
        return self._begin("allgather", collectives.together(plans), opts)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None, *_: Any) -> Work:
        """One output for everybody's elements."""
        return self._begin("allgather", collectives.allgather_single(output, given, self.members), opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Several at once."""
        plans = [
            collectives.allgather_single(output, given, self.members)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return self._begin("allgather", collectives.together(plans), opts)

    def gather(self, outputs: Any, inputs: Any, root: Any = None, timeout: Any = None) -> Work:
        """The root gets one tensor per rank."""
        opts = root if isinstance(root, dist.GatherOptions) else None
        place = opts.rootRank if opts is not None else root
        pieces = outputs[0] if outputs and not isinstance(outputs[0], torch.Tensor) else outputs
        plan = collectives.gather(pieces, only(inputs, "gather"), self._root(place), self.members)
        return self._begin("gather", plan, opts)

    def scatter(self, outputs: Any, inputs: Any, root: Any = None, timeout: Any = None) -> Work:
        """The root sends one tensor to each rank."""
        opts = root if isinstance(root, dist.ScatterOptions) else None
        place = opts.rootRank if opts is not None else root
        pieces = inputs[0] if inputs and not isinstance(inputs[0], torch.Tensor) else inputs
        plan = collectives.scatter(only(outputs, "scatter"), pieces, self._root(place), self.members)
        return self._begin("scatter", plan, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: Any = None) -> Work:
        """A tensor to and from each rank."""
        return self._begin("alltoall", collectives.alltoall(outputs, inputs, self.members), opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> Work:
        """Rows to and from each rank."""
        plan = collectives.alltoall_single(output, given, output_splits, input_splits, self.members)
        return self._begin("alltoall", plan, opts)

    # The names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- transfers, barriers ---

    def send(self, tensors: Any, place: int, tag: int = 0) -> Work:
        """To one rank of the group."""
        plan = collectives.send(only(tensors, "send"), self.ranks[self._root(place)], tag)
        return self._begin(f"send to rank {place} with tag {tag}", plan)

    def recv(self, tensors: Any, place: int, tag: int = 0) -> Work:
        """From one rank of the group."""
        plan = collectives.receive(only(tensors, "recv"), self.ranks[self._root(place)], tag)
        return self._begin(f"recv from rank {place} with tag {tag}", plan)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """From whoever sends first; the work's `source_rank` tells who it was."""
        plan = collectives.receive(only(tensors, "recv"), -1, tag)
        return self._begin(f"recv from anybody with tag {tag}", plan)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        """Done when every rank has come."""
        return self._begin("barrier", collectives.barrier(), opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier of which rank 0 tells who has not come: the first that is found missing, or all of them."""
        seconds = (timeout or self._timeout).total_seconds()
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
            self._begin("monitored_barrier", collectives.receive(word.clone(), self.ranks[place], MONITOR))
            for place in others
        ]
        for place, work in zip(others, works, strict=True):
            try:
                work.wait(left())
            except dist.DistBackendError as error:
                missing.append(place)
                if not wait_all_ranks:
                    raise dist.DistBackendError(
                        f"monitored_barrier: rank {place} did not come in {seconds:g} s: {error}"
                    ) from error
        if missing:
            names = ", ".join(map(str, missing))
            raise dist.DistBackendError(f"monitored_barrier: ranks {names} did not come in {seconds:g} s")
        for place in others:
            self._begin("monitored_barrier", collectives.send(word, self.ranks[place], MONITOR)).wait()

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: Any = None) -> Work:
        works, self._coalescing = self._coalescing or [], None

        def finish(outcomes: Any) -> None:
            for work in works:
                work.wait()

        return Work(Operation(self.world, [], "coalesced operations", (), finish), self, self._timeout)

    def _root(self, place: Any) -> int:
        if not 0 <= place < self.members.size:
            raise ValueError(f"rank {place} is not in the group, which has {self.members.size} ranks")
        return int(place)

    # --- what torch asks a group ---

    def rank(self) -> int:
        """This process's place in the group."""
        return self.members.me

    def size(self) -> int:
        """Number of ranks in the group."""
        return self.members.size

    getRank = rank
    getSize = size

    def getBackendName(self) -> str:
        """The name of the backend."""
        return "farandole"

    name = getBackendName
    _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        """The name that torch gave the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Torch names a group after making it."""
        self._name = name

    def getGroupDesc(self) -> str:
        """The user's words for it."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """The user's words for it."""
        self._description = description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def group_name(self) -> str:
        """The name that torch gave the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The user's words for it."""
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        near = [torch.device("cpu")]
        return [*near, torch.device("cuda")] if torch.cuda.is_available() else near

    def get_group_store(self) -> Any:
        """The key-value store of the group."""
        return self.store

    def set_timeout(self, timeout: timedelta) -> None:
        """For operations that begin from now on."""
        self._timeout = timeout

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _set_sequence_number_for_group(self) -> None:
        """The engine counts for itself."""

    # --- splitting and ending ---

    supports_splitting = True
    options: Any = None  # there are none

    def _get_backend(self, device: Any) -> Any:
        """One backend for all devices."""
        return self

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Group | None:
        """A group of some of this one's members, given by their places in it; None on the others. All of them call."""
        places = sorted(new_ranks)
        if len(set(places)) != len(places) or not places or places[0] < 0 or places[-1] >= self.members.size:
            raise ValueError(f"{list(new_ranks)} are not different ranks of a group of {self.members.size}")
        self._splits += 1
        if self.members.me not in places:
            return None
        name = group_name or f"{self._name}:split:{self._splits}"
        members = Members(tuple(self.ranks[place] for place in places), places.index(self.members.me))
        first = places[0]
        store = dist.PrefixStore(f"split/{self._splits}/{first}", self.store)
        made = found(type(self), self.world, members, store, timeout or self._timeout, name)
        made.setGroupDesc(group_desc or f"{self._description}:split:{self._splits}")
        return made

    def perform_nocolor_split(self, device: Any) -> None:
        """Of a split only the members need to hear."""

    def eager_connect_single_device(self, device: Any) -> None:
        """Connections are there already."""

    def _end(self, tag: int) -> None:
        """Takes the group away in the core: LEAVE or ABORT."""
        with contextlib.suppress(errors.HorovodInternalError, ValueError):
            request = Request(Kind.REMOVE_GROUP, splits=[self._number], tag=tag)
            [handle] = self.world.engine.submit([request], prompt=True)
            self.world.engine.wait(handle)

    def abort(self) -> None:
        """Ends every operation of the group, here and on its other ranks; of the default group: every operation."""
        if self._number:
            self._end(ABORT)
            return
        with contextlib.suppress(errors.HorovodInternalError):
            rank = self.world.engine.rank
            self.world.engine.revoke(errors.REVOKED, rank, f"rank {rank} has aborted the process group {self._name}")

    def shutdown(self) -> None:
        """Leaves the group, whose memory is freed; calling it again does nothing."""
        if self._left:
            return
        self._left = True
        with contextlib.suppress(errors.HorovodInternalError):
            self._look_after_forgotten()
        if self._number:
            self._end(LEAVE)
        self._close()
        self.watcher.close()


Kept = TypeVar("Kept", bound=Group)


# How often torch.distributed has begun in a world: its store may be a new one or the old one, the engine never forgets.
_beginnings: WeakKeyDictionary[World, int] = WeakKeyDictionary()


def begin_anew(world: World) -> None:
    """A default group is made."""
    _beginnings[world] = _beginnings.get(world, -1) + 1


def found(kind: type[Kept], world: World, members: Members, store: Any, timeout: timedelta, name: str) -> Kept:
    """A group that its members alone make: the first draws its number, and the others read it in the group's store."""
    beginning = _beginnings[world]
    key = f"farandole/number/{beginning}"
    if members.me == 0:
        count = int(c10d._get_default_store().add("farandole/groups", 1))
        number = FIRST_NUMBER + beginning * MOST_GROUPS + count
        store.set(key, str(number))
    else:
        number = int(store.get(key))
    request = Request(Kind.ADD_GROUP, splits=[members.size, *sorted(members.ranks)], tag=number)
    [handle] = world.engine.submit([request], prompt=True)
    world.engine.wait(handle)
    return kind(world, number, members, store, timeout, name)


def _asked_by_backward() -> bool:
    """Whether the caller's caller is torch's backward pass itself: then the tensor is a bucket of DDP, new to users."""
    caller = sys._getframe(1).f_back  # none: a thread of torch's own, for a device
    return caller is None or caller.f_globals.get("__name__") in BACKWARD


def _op(opts: Any) -> Any:
    """The reduction: of options, or given as it is."""
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)
