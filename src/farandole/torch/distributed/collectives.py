# Turns the collectives of torch.distributed into requests of the engine: inputs, results, and the work after them.
# Touches torch, engine, tensors and reduce_ops.
"""Each function returns a `Plan`. The group submits its requests and calls `finish` when they are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from ...engine.interface import DType, Kind, Outcome, ReduceOp, Request, Span
from ...operations.pending import output_of
from ..memory import gpu_of, tensor_of
from .reduce_ops import Reduction
from .tensors import Target, buffer, copy_result, same_type, source

# Tags of the messages of gather and scatter. Tags of users have 32 bits.
GATHER, SCATTER = 1 << 40, 1 << 41


def _nothing(outcomes: list[Outcome]) -> None:
    """For plans whose results are already where they belong."""


@dataclass
class Plan:
    """Requests without their group, the tensors that users see as results, and what to do afterwards."""

    requests: list[Request]
    results: Sequence[torch.Tensor] = ()
    finish: Callable[[list[Outcome]], None] = _nothing
    in_order: bool = True  # collectives end in the order in which they began; sends and receives do not


@dataclass(frozen=True)
class Members:
    """A group's ranks in the order of torch.distributed. The core orders them by rank."""

    ranks: tuple[int, ...]
    me: int
    reaches_gpus: Callable[[], bool] = field(default=lambda: False, compare=False)

    def keeps_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether the operation can use the tensor on its device."""
        return tensor.is_cuda and self.reaches_gpus()

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def sorted(self) -> bool:
        return list(self.ranks) == sorted(self.ranks)

    def from_core(self, items: Sequence[Any]) -> list[Any]:
        """Changes items from the core's order to the order of `ranks`."""
        member = {rank: at for at, rank in enumerate(sorted(self.ranks))}
        return [items[member[rank]] for rank in self.ranks]

    def to_core(self, items: Sequence[Any]) -> list[Any]:
        """Changes items from the order of `ranks` to the core's order."""
        return [items[self.ranks.index(rank)] for rank in sorted(self.ranks)]


def _received(outcome: Outcome, like: torch.Tensor) -> torch.Tensor:
    """The memory that the core allocated, or that was given to it, as a flat tensor."""
    output = output_of(outcome)
    if isinstance(output, Span):
        return cast(torch.Tensor, output.owner)
    return tensor_of(output, like.dtype == torch.bfloat16)


def _room(flat: torch.Tensor, results: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Memory on the device for all results, which the core cannot allocate there; None on the CPU."""
    if not flat.is_cuda:
        return None
    return flat.new_empty(sum(result.numel() * result.element_size() for result in results) // flat.element_size())


def _request(kind: Kind, flat: torch.Tensor, output: torch.Tensor | None = None, **more: Any) -> Request:
    read = buffer(flat)
    written = None if output is None else read.array if output is flat else buffer(output).array
    gpu = gpu_of(flat) if flat.is_cuda else None
    return Request(kind, None, read.array, written, read.dtype, gpu=gpu, **more)


# --- reductions ------------------------------------------------------------------------------------------------------


def allreduce(tensor: torch.Tensor, reduction: Reduction, members: Members) -> Plan:
    """Reduces in place."""
    target = Target(tensor, filled=True, on_device=members.keeps_on_device(tensor))
    flat = target.flat
    if reduction.bitwise is not None:

        def give(total: torch.Tensor) -> None:
            flat.copy_(total)
            target.copy_back()

        return _folded(flat, [tensor], reduction, members, give)
    if reduction.factor is not None:
        flat.mul_(_on_device_of(reduction.factor, flat))
    request = _request(Kind.ALLREDUCE, flat, flat, op=reduction.op)
    return Plan([request], [tensor], lambda outcomes: target.copy_back())


def _on_device_of(factor: Any, flat: torch.Tensor) -> Any:
    return factor.to(flat.device) if isinstance(factor, torch.Tensor) else factor


def _folded(
    flat: torch.Tensor,
    results: Sequence[torch.Tensor],
    reduction: Reduction,
    members: Members,
    give: Callable[[torch.Tensor], Any],
) -> Plan:
    if flat.dtype.is_floating_point or flat.dtype.is_complex:
        raise RuntimeError(f"bitwise reductions need whole numbers or bool, not {flat.dtype}")

    def finish(outcomes: list[Outcome]) -> None:
        give(reduction.fold(_received(outcomes[0], flat).view(members.size, -1)))

    return Plan([_request(Kind.ALLGATHER, flat, _room(flat, [flat] * members.size))], results, finish)


def reduce(tensor: torch.Tensor, reduction: Reduction, root: int, members: Members) -> Plan:
    """Writes the result to the root's tensor; the tensors of the other ranks do not change."""
    if members.me == root:
        return allreduce(tensor, reduction, members)
    plan = allreduce(source(tensor, on_device=members.keeps_on_device(tensor)).clone(), reduction, members)
    plan.results = [tensor]
    return plan


def reduce_scatter(
    output: torch.Tensor, pieces: Sequence[torch.Tensor], reduction: Reduction, members: Members
) -> Plan:
    """`pieces`: one for each member, in the order of `members.ranks`."""
    if len(pieces) != members.size:
        raise ValueError(f"reduce_scatter needs {members.size} inputs, one per rank, not {len(pieces)}")
    same_type([output, *pieces])
    if output.numel() != pieces[members.me].numel():
        raise ValueError(
            f"the output has {output.numel()} elements, but this rank's input {pieces[members.me].numel()}"
        )
    flats = [source(piece, on_device=members.keeps_on_device(piece)) for piece in members.to_core(pieces)]
    whole = flats[0] if len(flats) == 1 else torch.cat(flats)
    even = len({flat.numel() for flat in flats}) == 1
    return _reduce_scatter(output, whole, [flat.numel() for flat in flats], even, reduction, members, fresh=True)


def reduce_scatter_single(output: torch.Tensor, input: torch.Tensor, reduction: Reduction, members: Members) -> Plan:
    """`input`: the shares of all members, one after the other."""
    same_type([output, input])
    if input.numel() != output.numel() * members.size:
        raise ValueError(
            f"the input has {input.numel()} elements; expected {members.size} times the {output.numel()} of the output"
        )
    flat = source(input, on_device=members.keeps_on_device(input))
    if not members.sorted:
        flat = torch.cat(members.to_core(flat.chunk(members.size)))
    counts = [output.numel()] * members.size
    return _reduce_scatter(output, flat, counts, True, reduction, members, fresh=flat.data_ptr() != input.data_ptr())


def _reduce_scatter(
    output: torch.Tensor,
    whole: torch.Tensor,
    counts: list[int],
    even: bool,
    reduction: Reduction,
    members: Members,
    fresh: bool,
) -> Plan:
    """`whole` is in the core's order. `fresh`: it is a copy that may be overwritten."""
    if reduction.factor is not None:
        whole, fresh = whole * _on_device_of(reduction.factor, whole), True
    if even and reduction.scatters:
        target = Target(output, on_device=whole.is_cuda)
        request = _request(Kind.REDUCESCATTER, whole, target.flat, op=reduction.op)
        return Plan([request], [output], lambda outcomes: target.copy_back())
    # The core scatters only sums and averages in equal shares. All others are reduced as a whole.
    index = sorted(members.ranks).index(members.ranks[members.me])
    own_part = slice(sum(counts[:index]), sum(counts[: index + 1]))
    total = whole if fresh else whole.clone()
    plan = allreduce(total, Reduction(reduction.op, None, reduction.bitwise), members)
    before = plan.finish

    def finish(outcomes: list[Outcome]) -> None:
        before(outcomes)
        copy_result(total[own_part].view(output.shape), output.detach())

    return Plan(plan.requests, [output], finish)


# --- copies ----------------------------------------------------------------------------------------------------------


def broadcast(tensor: torch.Tensor, root: int, members: Members) -> Plan:
    """Works in place; `root` is the index of a member."""
    target = Target(tensor, filled=members.me == root, bits=True, on_device=members.keeps_on_device(tensor))
    request = _request(Kind.BROADCAST, target.flat, target.flat, peer=members.ranks[root])
    return Plan([request], [tensor], lambda outcomes: target.copy_back())


def allgather(outputs: Sequence[torch.Tensor], input: torch.Tensor, members: Members) -> Plan:
    """One output for each member."""
    if len(outputs) != members.size:
        raise ValueError(f"allgather needs {members.size} outputs, one per rank, not {len(outputs)}")
    same_type([input, *outputs])
    if outputs[members.me].numel() != input.numel():
        raise ValueError(f"this rank's input has {input.numel()} elements, its output {outputs[members.me].numel()}")
    flat = source(input, bits=True, on_device=members.keeps_on_device(input))
    request = _request(Kind.ALLGATHER, flat, _room(flat, outputs))
    return Plan([request], outputs, lambda outcomes: _spread(outcomes[0], flat, outputs, members))


def _spread(outcome: Outcome, flat: torch.Tensor, outputs: Sequence[torch.Tensor], members: Members) -> None:
    """Copies each member's part of the received elements to its output."""
    received = _received(outcome, flat).view(outputs[0].dtype)
    counts = [output.numel() for output in members.to_core(outputs)]
    if sum(counts) != received.numel():
        raise ValueError(f"the ranks sent {received.numel()} elements, but the outputs have {sum(counts)}")
    for output, share in zip(members.to_core(outputs), received.split(counts), strict=True):
        copy_result(share.view(output.shape), output.detach())


def allgather_single(output: torch.Tensor, input: torch.Tensor, members: Members) -> Plan:
    """One output with the elements of all members, one after the other."""
    same_type([output, input])
    if output.numel() != input.numel() * members.size:
        raise ValueError(
            f"the output has {output.numel()} elements; expected {members.size} times the {input.numel()} of the input"
        )
    flat = source(input, bits=True, on_device=members.keeps_on_device(input))
    direct = flat.is_cuda and members.sorted and output.is_contiguous() and output.dtype == flat.dtype

    def finish(outcomes: list[Outcome]) -> None:
        received = _received(outcomes[0], flat).view(output.dtype)
        if received.data_ptr() == output.data_ptr():
            return
        if not members.sorted:
            received = torch.cat(members.from_core(received.chunk(members.size)))
        copy_result(received.view(output.shape), output.detach())

    room = output.detach().view(-1) if direct else _room(flat, [output])
    return Plan([_request(Kind.ALLGATHER, flat, room)], [output], finish)


def alltoall(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], members: Members) -> Plan:
    """Sends one tensor to each member and receives one from each."""
    for what, tensors in (("inputs", inputs), ("outputs", outputs)):
        if len(tensors) != members.size:
            raise ValueError(f"alltoall needs {members.size} {what}, one per rank, not {len(tensors)}")
    same_type([*outputs, *inputs])
    flats = [source(tensor, bits=True, on_device=members.keeps_on_device(tensor)) for tensor in members.to_core(inputs)]
    flat = torch.cat(flats)
    request = _request(Kind.ALLTOALL, flat, _room(flat, outputs), splits=[piece.numel() for piece in flats])
    return Plan([request], outputs, lambda outcomes: _spread_checked(outcomes[0], flat, outputs, members))


def _spread_checked(outcome: Outcome, flat: torch.Tensor, outputs: Sequence[torch.Tensor], members: Members) -> None:
    width = outputs[0].element_size() // flat.element_size()
    expected = [output.numel() * width for output in members.to_core(outputs)]
    if outcome.splits != expected:
        raise ValueError(f"the ranks sent {outcome.splits} elements, but the outputs expect {expected}")
    _spread(outcome, flat, outputs, members)


def alltoall_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    members: Members,
) -> Plan:
    """Sends rows of `input` to the members and receives rows of `output`; without splits all shares are equal."""
    inputs = input.split(_rows(input, input_splits, members, "input"))
    outputs = output.split(_rows(output, output_splits, members, "output"))
    plan = alltoall(outputs, inputs, members)
    plan.results = [output]
    return plan


def _rows(tensor: torch.Tensor, splits: Sequence[int], members: Members, what: str) -> list[int]:
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % members.size:
            raise ValueError(f"{rows} rows of the {what} cannot be divided evenly among {members.size} ranks")
        return [rows // members.size] * members.size
    if len(splits) != members.size or sum(splits) != rows:
        raise ValueError(f"{what} splits {list(splits)} do not fit {rows} rows and {members.size} ranks")
    return list(splits)


# --- sends and receives ----------------------------------------------------------------------------------------------


def send(tensor: torch.Tensor, rank: int, tag: int) -> Plan:
    """Sends to a rank of the job."""
    flat = source(tensor, bits=True)
    return Plan([_request(Kind.SEND, flat, peer=rank, tag=tag)], [tensor], in_order=False)


def receive(tensor: torch.Tensor, rank: int, tag: int) -> Plan:
    """Receives from a rank of the job, or from any rank (-1)."""
    target = Target(tensor, bits=True)
    write = buffer(target.flat)
    request = Request(Kind.RECEIVE, None, None, write.array, write.dtype, peer=rank, tag=tag)
    return Plan([request], [tensor], lambda outcomes: target.copy_back(), in_order=False)


def together(plans: Sequence[Plan], results: Sequence[torch.Tensor] | None = None) -> Plan:
    """Joins several plans into one."""

    def finish(outcomes: list[Outcome]) -> None:
        at = 0
        for plan in plans:
            plan.finish(outcomes[at : at + len(plan.requests)])
            at += len(plan.requests)

    requests = [request for plan in plans for request in plan.requests]
    all_results = [result for plan in plans for result in plan.results] if results is None else results
    return Plan(requests, all_results, finish, in_order=all(plan.in_order for plan in plans))


def _is_root(operation: str, kind: str, tensors: Sequence[torch.Tensor], root: int, members: Members) -> bool:
    """Whether this member is the root. ValueError unless the root gave one tensor per member, and the others none."""
    if members.me != root:
        if tensors:
            raise ValueError(f"{operation}: only the root has {kind}")
        return False
    if len(tensors) != members.size:
        raise ValueError(f"{operation} needs {members.size} {kind} on the root, one per rank, not {len(tensors)}")
    return True


def gather(outputs: Sequence[torch.Tensor], input: torch.Tensor, root: int, members: Members) -> Plan:
    """The root gets one tensor from each member."""
    if not _is_root("gather", "outputs", outputs, root, members):
        return send(input, members.ranks[root], GATHER)
    same_type([input, *outputs])
    outputs[root].detach().copy_(input.detach().view(outputs[root].shape))
    plans = [receive(output, members.ranks[index], GATHER) for index, output in enumerate(outputs) if index != root]
    return together(plans, list(outputs))


def scatter(output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int, members: Members) -> Plan:
    """The root sends one tensor to each member."""
    if not _is_root("scatter", "inputs", inputs, root, members):
        return receive(output, members.ranks[root], SCATTER)
    same_type([output, *inputs])
    output.detach().copy_(inputs[root].detach().view(output.shape))
    plans = [send(input, members.ranks[index], SCATTER) for index, input in enumerate(inputs) if index != root]
    return together(plans, [output])


def barrier() -> Plan:
    """Has no data; it only waits for all members."""
    return Plan([Request(Kind.BARRIER, dtype=DType.UINT8, op=ReduceOp.SUM)])
