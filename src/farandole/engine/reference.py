# The Python engine: it runs the specification over the same links. Slow, complete, written to be read.
# Touches specification.py, interface.py, errors.py, config.py and NumPy; sockets only as descriptors from rendezvous/.
"""The second half of the executable specification:

4. links (reference_links.py): threads that read and write whole messages;
5. the engine: one lock around handles, received data and groups.

It has no fusion, shared memory, plan or stall report: results depend only on the definitions.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..base import errors
from ..base.config import Config
from ..base.forks import abandoned_in_children
from .interface import STORAGE, DType, Kind, Outcome, ReduceOp, Request, Span, Spans
from .reference_links import Link, Record
from .specification import Bucket, Communicator, Coordinator, RequestData, check, run_collective

log = logging.getLogger("farandole")

Key = tuple[int, int, int]
NAME_RESERVED_SECONDS = 1.0  # how long the name of the last operation stays reserved until a caller has seen its end


@dataclass
class Group:
    """A set of ranks. Its worker thread runs the coordinator's buckets in order; no group waits for another."""

    number: int
    ranks: list[int]
    coordinator: Coordinator
    bucket_queue: queue.SimpleQueue[Bucket | None] = field(default_factory=queue.SimpleQueue)
    issued: int = 0
    worker: threading.Thread | None = None


@dataclass
class Pending:
    """A request that is pending or has ended, with its outcome or error."""

    request: Request
    name: str
    dtype: DType
    outcome: Outcome | None = None
    error: Exception | None = None
    seen: bool = False  # polled as done

    @property
    def done(self) -> bool:
        return self.outcome is not None or self.error is not None


def left_error(peer: int) -> errors.ShutDown:
    return errors.ShutDown(f"Horovod has been shut down. Rank {peer} has left the job.", rank=peer)


ENGINES = abandoned_in_children()


class ReferenceEngine:
    """Implements interface.Engine. It uses one setting: allreduce_algorithm, which is "ring" or the ordered sum."""

    supports_pieces = False

    def __init__(self, config: Config, rank: int, hosts: Sequence[int], generation: int = 0) -> None:
        """`hosts` has a host number for each rank of the job: they decide the order of additions."""
        self.rank, self.size, self.hosts = rank, len(hosts), list(hosts)
        self.generation, self.algorithm = generation, config.allreduce_algorithm
        self.monitor = threading.Condition()  # guards everything below
        self.handles: dict[int, Pending] = {}
        self.last_handle = 0
        self.unnamed: dict[tuple[int, Kind], int] = defaultdict(int)
        self.last: tuple[Pending, float] | None = None  # the last operation that ended, and when
        self.received: dict[Key, deque[bytes]] = defaultdict(deque)  # (peer, group, sequence)
        self.unexpected: dict[Key, deque[tuple[RequestData, bytes]]] = defaultdict(deque)  # (peer, group, tag)
        self.posted_receives: dict[Key, deque[Pending]] = defaultdict(deque)
        # for groups that this rank does not know yet
        self.early_requests: dict[int, list[tuple[int, RequestData]]] = defaultdict(list)
        self.groups: dict[int, Group] = {}
        self.next_group = 0
        self.departed: set[int] = set()
        self.ended: Exception | None = None
        self.closed = False
        self.wanted: Callable[[int], None] | None = None
        self.record = Record(rank)
        self.links = {peer: Link(self, peer) for peer in range(self.size) if peer != rank}
        ENGINES.add(self)

    # Start and end.

    def add_link(self, peer: int, fd: int, kind: int) -> None:
        del kind  # both kinds are streams
        self.links[peer].open(fd)

    def watch_links(self, wanted: Callable[[int], None]) -> None:
        self.wanted = wanted

    def start(self, timeout: float) -> None:
        del timeout  # there is nothing to wait for: messages to missing links are kept
        if self.rank == 0:
            log.warning("the Python reference engine is in use: readable, correct and slow (engine=python)")
        with self.monitor:
            self.open_group(list(range(self.size)))

    def leave(self, linger: float = 2.0) -> None:
        with self.monitor:
            if self.ended is None:
                self.send_to_all(["bye"])
            self.end(errors.ShutDown("Horovod has been shut down. This rank has left the job.", rank=self.rank))
            for link in self.links.values():
                link.send_queue.put(None)
        deadline = time.monotonic() + linger
        for link in self.links.values():
            for writer in link.threads[:1]:
                writer.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        if self.closed:
            return
        self.leave()
        self.closed = True
        for link in self.links.values():
            link.close()
        for group in self.groups.values():
            group.bucket_queue.put(None)
        for group in self.groups.values():
            if group.worker is not None:
                group.worker.join()

    def abandon(self) -> None:
        """In a forked child: closes the streams, or the peers would not see the death of the parent."""
        self.closed, self.monitor = True, threading.Condition()
        self.record.lock = threading.Lock()
        self.ended = errors.ShutDown("this engine belongs to the parent process")
        for link in self.links.values():
            if link.stream is not None:
                link.stream.close()

    def revoke(self, code: int, rank: int, message: str) -> None:
        with self.monitor:
            if self.ended is None:  # each rank forwards it once
                self.send_to_all(["revoke", code, rank, message])
            self.end(errors.translate(code, message, rank=rank, generation=self.generation))

    def peer_lost(self, peer: int) -> None:
        """The stream to a peer ended without a leave message: this generation ends on all ranks."""
        self.revoke(errors.PEER_LOST, peer, f"rank {peer} was lost: its link ended without a leave message")

    def end(self, error: Exception) -> None:
        with self.monitor:
            self.ended = self.ended or error
            for pending in self.handles.values():
                if not pending.done:
                    pending.error = self.ended
            self.monitor.notify_all()

    def peer_left(self, peer: int) -> None:
        """A peer leaves: buckets that were issued may finish, other requests cannot become ready."""
        self.links[peer].has_left = True
        self.departed.add(peer)
        error = (errors.SHUT_DOWN, str(left_error(peer)))
        for group in self.groups.values():
            if peer in group.ranks and group.ranks[0] == self.rank:
                self.issue(group, group.coordinator.leave(*error))
            elif group.ranks[0] == peer:
                group.bucket_queue.put({"kind": Kind.BARRIER, "name": None, "error": error})
        for key, waiting in self.posted_receives.items():
            while key[0] == peer and waiting:
                waiting.popleft().error = left_error(peer)

    # What users call.

    def submit(self, requests: Sequence[Request], bundle: bool = False, prompt: bool = False) -> list[int]:
        requests = [request.with_arrays() for request in requests]
        with self.monitor:
            if self.ended is not None:
                raise self.ended
            for request in requests:
                if request.kind in (Kind.ADD_GROUP, Kind.REMOVE_GROUP) and request.tag:
                    raise ValueError(
                        "the Python engine cannot make a group that only its members request; use engine=native"
                    )
                group = self.groups.get(request.group)
                check(request, None if group is None else group.ranks, self.rank)
            names = self.names_for(requests)
            begun = [Pending(request, name, request.elements()) for request, name in zip(requests, names, strict=True)]
            handles = list(range(self.last_handle + 1, self.last_handle + 1 + len(begun)))
            self.last_handle += len(begun)
            self.handles.update(zip(handles, begun, strict=True))
            bundle_complete = (
                [pending.name for pending in begun if pending.request.kind < Kind.SEND] if bundle else None
            )
            for pending in begun:
                request = pending.request
                if request.kind in (Kind.SEND, Kind.RECEIVE):
                    self.start_point_to_point(pending)
                elif self.groups[request.group].ranks[0] in self.departed:
                    pending.error = left_error(self.groups[request.group].ranks[0])
                else:
                    asked = self.describe(pending, bundle_complete)
                    self.send(self.groups[request.group].ranks[0], ["ask", request.group, asked])
            return handles

    def names_for(self, requests: Sequence[Request]) -> list[str]:
        """Unnamed requests are paired across ranks by their order, per group and kind."""
        busy = {(p.request.group, p.name) for p in self.handles.values() if not p.done and p.request.kind < Kind.SEND}
        if self.last is not None and time.monotonic() - self.last[1] < NAME_RESERVED_SECONDS:
            busy |= {(p.request.group, p.name) for p in self.handles.values() if p is self.last[0] and not p.seen}
        names = []
        for request in requests:
            name = "join" if request.kind == Kind.JOIN else request.name
            if name is None:
                self.unnamed[request.group, request.kind] += 1
                name = f"{request.kind.name.lower()}.noname.{self.unnamed[request.group, request.kind]}"
            elif request.kind < Kind.SEND and (request.group, name) in busy:
                raise ValueError(
                    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor "
                    f"that is currently being processed: {name}. Wait for the first one, or give this one another name."
                )
            busy.add((request.group, name))
            names.append(name)
        return names

    def describe(self, pending: Pending, bundle: list[str] | None) -> RequestData:
        request, array = pending.request, pending.request.input
        shape = list(array.shape) if array is not None else []
        splits = None if request.splits is None else [int(count) for count in request.splits]
        if request.kind == Kind.ALLTOALL and splits is None and shape:
            members = len(self.groups[request.group].ranks)
            splits = [shape[0] // members] * members
        reducing = request.kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER)
        return {
            "kind": request.kind,
            "name": pending.name,
            "dtype": pending.dtype,
            "op": request.op if reducing else ReduceOp.SUM,
            "root": request.peer if request.kind == Kind.BROADCAST else -1,
            "prescale": request.prescale if reducing else 1.0,
            "postscale": request.postscale if reducing else 1.0,
            "shape": shape,
            "splits": splits,
            "device": "CPU" if request.device < 0 else "GPU",
            "bundle": bundle,
        }

    def start_point_to_point(self, pending: Pending) -> None:
        """Starts a send or receive: without negotiation, in order per (peer, group, tag)."""
        request = pending.request
        key = (request.peer, request.group, request.tag)
        if request.kind == Kind.SEND:
            assert request.input is not None
            about = {"dtype": pending.dtype, "shape": list(request.input.shape)}
            self.send(request.peer, ["message", request.group, request.tag, about], request.input.tobytes())
            pending.outcome = Outcome()
            self.last = None  # it has no name to reserve, and an earlier name is free again
        else:
            self.posted_receives[key].append(pending)
            self.match_receives(key)
            if not pending.done and request.peer in self.departed:
                pending.error = left_error(request.peer)

    def run(self, request: Request) -> Outcome:
        return self.wait(self.submit([request])[0])

    def prepare(self, request: Request, tensor_type: type, spans: Spans) -> None:
        """Not supported: the caller makes a new request each time."""

    def poll(self, handle: int, seconds: float = 0.0) -> bool:
        with self.monitor:
            if handle not in self.handles:
                raise ValueError(f"there is no handle {handle}")
            pending = self.handles[handle]
            pending.seen = self.monitor.wait_for(lambda: pending.done, seconds)
            return pending.seen

    def use_huge_pages(self, memory: Span) -> None:
        """Does nothing in this engine."""

    def share(self, fd: int, address: int, size: int) -> int:
        """Does nothing: this engine sends everything."""
        return 0

    def unshare(self, region: int) -> None:
        """Does nothing."""

    def wait(self, handle: int, timeout: float | None = None, passive: bool = False) -> Outcome:
        with self.monitor:
            if handle not in self.handles:
                raise ValueError(f"there is no handle {handle}")
            pending = self.handles[handle]
            began = time.monotonic_ns()
            done = self.monitor.wait_for(lambda: pending.done, timeout)
            self.record.count(waited_ns=time.monotonic_ns() - began)
            if not done:
                text = f"{pending.request.kind.name} {pending.name} is not done after {timeout} s"
                raise errors.FarandoleTimeout(text, seconds=timeout)
            del self.handles[handle]
        if pending.error is not None:
            raise pending.error
        assert pending.outcome is not None
        return pending.outcome

    # Messages.

    def send(self, rank: int, label: list[Any], data: bytes = b"") -> None:
        if rank == self.rank:
            self.deliver(rank, label, data)
            return
        link = self.links[rank]
        link.send_queue.put((label, data))
        if link.stream is None and self.wanted is not None:
            threading.Thread(target=self.wanted, args=(rank,), daemon=True).start()

    def send_to_all(self, label: list[Any]) -> None:
        for link in self.links.values():
            if link.stream is not None:
                link.send_queue.put((label, b""))

    def deliver(self, peer: int, label: list[Any], data: bytes) -> None:
        """A message from a peer (or from this rank to itself), on the link's reading thread."""
        with self.monitor:
            if label[0] == "data":
                self.received[peer, label[1], label[2]].append(data)
            elif label[0] == "ask":
                self.coordinate(label[1], peer, label[2])
            elif label[0] == "run":
                self.groups[label[1]].bucket_queue.put(label[2])
            elif label[0] == "message":
                self.unexpected[peer, label[1], label[2]].append((label[3], data))
                self.match_receives((peer, label[1], label[2]))
            elif label[0] == "bye":
                self.peer_left(peer)
            elif label[0] == "revoke":
                self.revoke(label[1], label[2], label[3])
            self.monitor.notify_all()

    def coordinate(self, number: int, peer: int, asked: RequestData) -> None:
        group = self.groups.get(number)
        if group is None:
            self.early_requests[number].append((peer, asked))
        else:
            self.issue(group, group.coordinator.submit(group.ranks.index(peer), asked))

    def issue(self, group: Group, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            bucket["sequence"] = group.issued
            group.issued += 1
            for rank in group.ranks:
                if rank not in self.departed:
                    self.send(rank, ["run", group.number, bucket])

    def match_receives(self, key: Key) -> None:
        while self.unexpected[key] and self.posted_receives[key]:
            about, data = self.unexpected[key].popleft()
            pending = self.posted_receives[key].popleft()
            output = pending.request.output
            assert output is not None
            self.last = None  # as after a send
            if about["dtype"] != pending.dtype or len(data) != output.nbytes:
                text = f"rank {key[0]} sent {about}, but {pending.dtype.name} of shape {output.shape} was expected"
                pending.error = errors.Mismatch(f"Mismatched SEND and RECEIVE: {text}", name=pending.name, rank=key[0])
            else:
                output.reshape(-1)[...] = np.frombuffer(data, output.dtype)
                pending.outcome = Outcome(output)

    # Work: one thread per group.

    def open_group(self, ranks: list[int]) -> None:
        number = self.next_group
        self.next_group += 1
        group = self.groups[number] = Group(number, ranks, Coordinator(len(ranks)))
        if self.rank in ranks:
            name = f"farandole-group-{self.rank}-{number}"
            group.worker = threading.Thread(target=self.work, args=(group,), name=name, daemon=True)
            group.worker.start()
        for peer, asked in self.early_requests.pop(number, []):
            self.coordinate(number, peer, asked)

    def change_groups(self, kind: Kind, splits: list[int]) -> Outcome:
        with self.monitor:
            if kind == Kind.REMOVE_GROUP:
                self.groups.pop(splits[0]).bucket_queue.put(None)
                return Outcome()
            first, rest = self.next_group, list(splits)
            while rest:
                count = rest.pop(0)
                self.open_group(sorted(rest[:count]))
                del rest[:count]
            return Outcome(value=first)

    def work(self, group: Group) -> None:
        while (bucket := group.bucket_queue.get()) is not None:
            with self.monitor:
                waiting = [p for p in self.handles.values() if p.request.group == group.number and not p.done]
                concerned = [p for p in waiting if p.request.kind < Kind.SEND and bucket["name"] in (p.name, None)]
            outcome: Outcome | None = None
            error: Exception | None = None
            began = time.monotonic_ns()
            try:
                if bucket["error"] is not None:
                    raise errors.translate(*bucket["error"], name=bucket["name"] or "")
                outcome = self.execute(group, bucket, concerned[0].request if concerned else None)
            except Exception as caught:  # raised to the caller that waits for the handle
                error = caught
            with self.monitor:
                self.record.note(Kind(bucket["kind"]), bucket["name"], began)
                for pending in concerned:
                    if not pending.done:
                        pending.outcome, pending.error = outcome, error
                    self.last = pending, time.monotonic()
                self.monitor.notify_all()

    def execute(self, group: Group, bucket: Bucket, request: Request | None) -> Outcome:
        """Runs one bucket. A member that has joined has no request and contributes zeros."""
        kind, me = Kind(bucket["kind"]), group.ranks.index(self.rank)
        if kind == Kind.BARRIER:  # the coordinator issues it only after every member has entered
            return Outcome()
        if kind == Kind.JOIN:
            return Outcome(value=group.ranks[bucket["value"]])
        if kind in (Kind.ADD_GROUP, Kind.REMOVE_GROUP):
            return self.change_groups(kind, bucket["splits"])
        contribution = request.input if request else np.zeros(bucket["shape"], STORAGE[DType(bucket["dtype"])])
        assert contribution is not None
        values = contribution.view(STORAGE[DType(bucket["dtype"])])
        sequence = bucket["sequence"]
        comm = Communicator(
            me,
            [self.hosts[rank] for rank in group.ranks],
            lambda member, data: self.send(group.ranks[member], ["data", group.number, sequence], data),
            lambda member: self.receive_data(group.ranks[member], group.number, sequence),
        )
        result = run_collective(comm, values, bucket, self.algorithm, group.ranks)
        splits = [row[me] for row in bucket["splits"]] if kind == Kind.ALLTOALL else None
        self.record.count(collectives=1)
        if request is None or request.output is None or request.output.shape != result.shape:
            return Outcome(result.copy(), splits)
        request.output.view(values.dtype)[...] = result
        return Outcome(request.output, splits)

    def receive_data(self, peer: int, group: int, sequence: int) -> bytes:
        key = (peer, group, sequence)
        with self.monitor:
            self.monitor.wait_for(lambda: self.received[key] or self.ended is not None or peer in self.departed)
            if not self.received[key]:
                raise self.ended or left_error(peer)
            data = self.received[key].popleft()
            if not self.received[key]:
                del self.received[key]
            return data

    # Counters and traces.

    def counter(self, name: str) -> int:
        return self.record.counter(name)

    def tuning(self) -> list[int]:
        return []  # nothing can be tuned

    def trace(self, on: bool, mark_plans: bool = False) -> None:
        del mark_plans  # there are none
        self.record.trace(on)

    def trace_drain(self) -> bytes:
        return self.record.drain()
