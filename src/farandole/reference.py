# The Python engine: the specification at work over the same links. Slow, complete, and meant to be read.
# Touches specification.py, engine.py, errors.py, config.py and NumPy; sockets only as descriptors from rendezvous/.
"""The second half of the executable specification:

4. links: threads that read and write whole messages;
5. the engine: a monitor (one lock) around handles, mail and groups.

There is no fusion, no shared memory, no plan and no stall report here: results depend on the definitions alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import socket
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from . import errors
from .config import Config
from .engine import COUNTERS, STORAGE, DType, Kind, Outcome, ReduceOp, Request, Span, Spans
from .specification import (
    Asked,
    Bucket,
    Circle,
    Coordinator,
    allgather,
    allreduce,
    alltoall,
    broadcast,
    check,
    reducescatter,
)

log = logging.getLogger("farandole")

Key = tuple[int, int, int]
NAME_LINGERS_SECONDS = 1.0  # that the name of what ended last stays taken, while nobody has seen it end

# --- 4. Links --------------------------------------------------------------------------------------------------------

HEADER = struct.Struct("!IQ")  # bytes of the label (JSON), bytes of the data that follow it
LABEL_LIMIT = 1 << 24


class Link:
    """Whole messages over one stream: a thread that writes, a thread that reads. Nobody ever blocks on a send."""

    def __init__(self, engine: ReferenceEngine, peer: int) -> None:
        self.engine, self.peer = engine, peer
        self.outbox: queue.SimpleQueue[tuple[list[Any], bytes] | None] = queue.SimpleQueue()
        self.stream: socket.socket | None = None
        self.threads: list[threading.Thread] = []
        self.polite = False  # the peer has said that it leaves

    def open(self, descriptor: int) -> None:
        self.stream = socket.socket(fileno=descriptor)
        self.stream.settimeout(None)
        for work in (self.write, self.read):
            name = f"farandole-{work.__name__}-{self.engine.rank}-{self.peer}"
            self.threads.append(threading.Thread(target=work, name=name, daemon=True))
            self.threads[-1].start()

    def write(self) -> None:
        assert self.stream is not None
        with contextlib.suppress(OSError):  # the reader sees the death and says so
            while (message := self.outbox.get()) is not None:
                label = json.dumps(message[0]).encode()
                self.stream.sendall(HEADER.pack(len(label), len(message[1])) + label)
                self.stream.sendall(message[1])
                self.engine.count(bytes_sent=HEADER.size + len(label) + len(message[1]), frames=1)
            self.stream.shutdown(socket.SHUT_WR)

    def read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while header := self.exactly(HEADER.size):
                label_bytes, data_bytes = HEADER.unpack(header)
                if label_bytes > LABEL_LIMIT:
                    raise ValueError("a label is too long")
                label, data = json.loads(self.exactly(label_bytes)), self.exactly(data_bytes)
                self.engine.count(bytes_received=HEADER.size + label_bytes + data_bytes)
                self.engine.deliver(self.peer, label, data)
        if not self.polite:
            self.engine.lose(self.peer)

    def exactly(self, count: int) -> bytes:
        """That many bytes; none at all at a clean end of the stream."""
        assert self.stream is not None
        parts, missing = [], count
        while missing:
            part = self.stream.recv(min(missing, 1 << 20))
            if not part and missing == count:
                return b""
            if not part:
                raise OSError("the stream ended within a message")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        if self.stream is not None:
            with contextlib.suppress(OSError):
                self.stream.shutdown(socket.SHUT_RDWR)  # wakes the reader
            for thread in self.threads:
                thread.join()
            self.stream.close()


# --- 5. The engine ---------------------------------------------------------------------------------------------------


@dataclass
class Group:
    """A set of ranks. Its worker runs what the coordinator orders, one after the other; no group waits for another."""

    number: int
    ranks: list[int]
    coordinator: Coordinator
    orders: queue.SimpleQueue[Bucket | None] = field(default_factory=queue.SimpleQueue)
    issued: int = 0
    worker: threading.Thread | None = None


@dataclass
class Pending:
    """A handle: a request, and in the end an outcome or an error."""

    request: Request
    name: str
    dtype: DType
    outcome: Outcome | None = None
    error: Exception | None = None
    seen: bool = False  # polled as done

    @property
    def done(self) -> bool:
        return self.outcome is not None or self.error is not None


def departure(peer: int) -> errors.ShutDown:
    return errors.ShutDown(f"Horovod has been shut down. Rank {peer} has left the job in good order.", rank=peer)


class ReferenceEngine:
    """Serves engine.Engine. Of the settings it knows one: allreduce_algorithm, which is "ring" or the ordered sum."""

    scatters = False

    def __init__(self, config: Config, rank: int, hosts: Sequence[int], generation: int = 0) -> None:
        """`hosts` has a host number for each rank of the job: they decide the order of additions."""
        self.rank, self.size, self.hosts = rank, len(hosts), list(hosts)
        self.generation, self.algorithm = generation, config.allreduce_algorithm
        self.monitor = threading.Condition()  # guards everything below
        self.handles: dict[int, Pending] = {}
        self.last_handle = 0
        self.unnamed: dict[tuple[int, Kind], int] = defaultdict(int)
        self.last: tuple[Pending, float] | None = None  # what ended last, and when
        self.mail: dict[Key, deque[bytes]] = defaultdict(deque)  # (peer, group, sequence)
        self.parcels: dict[Key, deque[tuple[Asked, bytes]]] = defaultdict(deque)  # (peer, group, tag)
        self.receivers: dict[Key, deque[Pending]] = defaultdict(deque)
        self.early: dict[int, list[tuple[int, Asked]]] = defaultdict(list)  # for groups this rank has yet to hear of
        self.groups: dict[int, Group] = {}
        self.next_group = 0
        self.departed: set[int] = set()
        self.ended: Exception | None = None
        self.closed = False
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.wanted: Callable[[int], None] | None = None
        self.events: list[str] | None = None
        self.links = {peer: Link(self, peer) for peer in range(self.size) if peer != rank}
        ENGINES.add(self)

    # Life.

    def add_link(self, peer: int, fd: int, kind: int) -> None:
        del kind  # a stream is a stream
        self.links[peer].open(fd)

    def watch_links(self, wanted: Callable[[int], None]) -> None:
        self.wanted = wanted

    def start(self, timeout: float) -> None:
        del timeout  # there is nothing to wait for: messages to missing links are kept
        if self.rank == 0:
            log.warning("the Python reference engine is at work: readable, correct and slow (engine=python)")
        with self.monitor:
            self.open_group(list(range(self.size)))

    def leave(self, linger: float = 2.0) -> None:
        with self.monitor:
            if self.ended is None:
                self.tell_all(["bye"])
            self.end(errors.ShutDown("Horovod has been shut down. This rank has left the job.", rank=self.rank))
            for link in self.links.values():
                link.outbox.put(None)
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
            group.orders.put(None)
        for group in self.groups.values():
            if group.worker is not None:
                group.worker.join()

    def forget(self) -> None:
        """In a forked child, which must not keep the streams open: the peers would not see the parent die."""
        self.closed, self.monitor = True, threading.Condition()
        self.ended = errors.ShutDown("this engine belongs to the parent process")
        for link in self.links.values():
            if link.stream is not None:
                link.stream.close()

    def revoke(self, code: int, rank: int, message: str) -> None:
        with self.monitor:
            if self.ended is None:  # each rank passes it on once
                self.tell_all(["revoke", code, rank, message])
            self.end(errors.translate(code, message, rank=rank, generation=self.generation))

    def lose(self, peer: int) -> None:
        """The stream to a peer ended without a good-bye: everything of this generation is over, everywhere."""
        self.revoke(errors.PEER_LOST, peer, f"rank {peer} was lost: its link ended without a good-bye")

    def end(self, error: Exception) -> None:
        with self.monitor:
            self.ended = self.ended or error
            for pending in self.handles.values():
                if not pending.done:
                    pending.error = self.ended
            self.monitor.notify_all()

    def depart(self, peer: int) -> None:
        """A peer leaves in good order: what is already ordered may finish, the rest cannot become ready."""
        self.links[peer].polite = True
        self.departed.add(peer)
        error = (errors.SHUT_DOWN, str(departure(peer)))
        for group in self.groups.values():
            if peer in group.ranks and group.ranks[0] == self.rank:
                self.order(group, group.coordinator.leave(*error))
            elif group.ranks[0] == peer:
                group.orders.put({"kind": Kind.BARRIER, "name": None, "error": error})
        for key, waiting in self.receivers.items():
            while key[0] == peer and waiting:
                waiting.popleft().error = departure(peer)

    # What users call.

    def submit(self, requests: Sequence[Request], bundle: bool = False, prompt: bool = False) -> list[int]:
        requests = [request.with_arrays() for request in requests]
        with self.monitor:
            if self.ended is not None:
                raise self.ended
            for request in requests:
                if request.kind in (Kind.ADD_GROUP, Kind.REMOVE_GROUP) and request.tag:
                    raise ValueError("the Python engine makes no groups of their members alone; use engine=native")
                group = self.groups.get(request.group)
                check(request, None if group is None else group.ranks, self.rank)
            names = self.names_for(requests)
            begun = [Pending(request, name, request.elements()) for request, name in zip(requests, names, strict=True)]
            handles = list(range(self.last_handle + 1, self.last_handle + 1 + len(begun)))
            self.last_handle += len(begun)
            self.handles.update(zip(handles, begun, strict=True))
            together = [pending.name for pending in begun if pending.request.kind < Kind.SEND] if bundle else None
            for pending in begun:
                request = pending.request
                if request.kind in (Kind.SEND, Kind.RECEIVE):
                    self.begin_parcel(pending)
                elif self.groups[request.group].ranks[0] in self.departed:
                    pending.error = departure(self.groups[request.group].ranks[0])
                else:
                    asked = self.describe(pending, together)
                    self.tell(self.groups[request.group].ranks[0], ["ask", request.group, asked])
            return handles

    def names_for(self, requests: Sequence[Request]) -> list[str]:
        """Unnamed requests are paired across ranks by their order, per group and kind."""
        busy = {(p.request.group, p.name) for p in self.handles.values() if not p.done and p.request.kind < Kind.SEND}
        if self.last is not None and time.monotonic() - self.last[1] < NAME_LINGERS_SECONDS:
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
                    f"that is currently being processed: {name}. Use a different name, or wait for the first one."
                )
            busy.add((request.group, name))
            names.append(name)
        return names

    def describe(self, pending: Pending, bundle: list[str] | None) -> Asked:
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

    def begin_parcel(self, pending: Pending) -> None:
        """send and receive: no negotiation, first come first served per (peer, group, tag)."""
        request = pending.request
        key = (request.peer, request.group, request.tag)
        if request.kind == Kind.SEND:
            assert request.input is not None
            about = {"dtype": pending.dtype, "shape": list(request.input.shape)}
            self.tell(request.peer, ["parcel", request.group, request.tag, about], request.input.tobytes())
            pending.outcome = Outcome()
            self.last = None  # it has no name that could linger; that of an earlier one does no more
        else:
            self.receivers[key].append(pending)
            self.hand_out(key)
            if not pending.done and request.peer in self.departed:
                pending.error = departure(request.peer)

    def run(self, request: Request) -> Outcome:
        return self.wait(self.submit([request])[0])

    def prepare(self, request: Request) -> Request:
        return request

    def run_again(self, prepared: Request, input_at: int, output_at: int, spans: Spans, *owners: Any) -> Outcome:
        first, output = spans(*owners)
        return self.run(replace(prepared, input=first, output=output))

    def poll(self, handle: int, seconds: float = 0.0) -> bool:
        with self.monitor:
            if handle not in self.handles:
                raise ValueError(f"there is no handle {handle}")
            pending = self.handles[handle]
            pending.seen = self.monitor.wait_for(lambda: pending.done, seconds)
            return pending.seen

    def settle(self, memory: Span) -> None:
        """Pages are as good as others here."""

    def share(self, fd: int, address: int, size: int) -> int:
        """Here everything is sent."""
        return 0

    def unshare(self, region: int) -> None:
        """Nothing was shared."""

    def wait(self, handle: int, timeout: float | None = None, aside: bool = False) -> Outcome:
        with self.monitor:
            if handle not in self.handles:
                raise ValueError(f"there is no handle {handle}")
            pending = self.handles[handle]
            began = time.monotonic_ns()
            done = self.monitor.wait_for(lambda: pending.done, timeout)
            self.counters["waited_ns"] += time.monotonic_ns() - began
            if not done:
                text = f"{pending.request.kind.name} {pending.name} is not done after {timeout} s"
                raise errors.FarandoleTimeout(text, seconds=timeout)
            del self.handles[handle]
        if pending.error is not None:
            raise pending.error
        assert pending.outcome is not None
        return pending.outcome

    # Messages.

    def tell(self, rank: int, label: list[Any], data: bytes = b"") -> None:
        if rank == self.rank:
            self.deliver(rank, label, data)
            return
        link = self.links[rank]
        link.outbox.put((label, data))
        if link.stream is None and self.wanted is not None:
            threading.Thread(target=self.wanted, args=(rank,), daemon=True).start()

    def tell_all(self, label: list[Any]) -> None:
        for link in self.links.values():
            if link.stream is not None:
                link.outbox.put((label, b""))

    def deliver(self, peer: int, label: list[Any], data: bytes) -> None:
        """A message from a peer (or from this rank to itself), on the link's reading thread."""
        with self.monitor:
            if label[0] == "data":
                self.mail[peer, label[1], label[2]].append(data)
            elif label[0] == "ask":
                self.coordinate(label[1], peer, label[2])
            elif label[0] == "run":
                self.groups[label[1]].orders.put(label[2])
            elif label[0] == "parcel":
                self.parcels[peer, label[1], label[2]].append((label[3], data))
                self.hand_out((peer, label[1], label[2]))
            elif label[0] == "bye":
                self.depart(peer)
            elif label[0] == "revoke":
                self.revoke(label[1], label[2], label[3])
            self.monitor.notify_all()

    def coordinate(self, number: int, peer: int, asked: Asked) -> None:
        group = self.groups.get(number)
        if group is None:
            self.early[number].append((peer, asked))
        else:
            self.order(group, group.coordinator.submit(group.ranks.index(peer), asked))

    def order(self, group: Group, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            bucket["sequence"] = group.issued
            group.issued += 1
            for rank in group.ranks:
                if rank not in self.departed:
                    self.tell(rank, ["run", group.number, bucket])

    def hand_out(self, key: Key) -> None:
        while self.parcels[key] and self.receivers[key]:
            about, data = self.parcels[key].popleft()
            pending = self.receivers[key].popleft()
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
        for peer, asked in self.early.pop(number, []):
            self.coordinate(number, peer, asked)

    def change_groups(self, kind: Kind, splits: list[int]) -> Outcome:
        with self.monitor:
            if kind == Kind.REMOVE_GROUP:
                self.groups.pop(splits[0]).orders.put(None)
                return Outcome()
            first, rest = self.next_group, list(splits)
            while rest:
                count = rest.pop(0)
                self.open_group(sorted(rest[:count]))
                del rest[:count]
            return Outcome(value=first)

    def work(self, group: Group) -> None:
        while (bucket := group.orders.get()) is not None:
            with self.monitor:
                waiting = [p for p in self.handles.values() if p.request.group == group.number and not p.done]
                concerned = [p for p in waiting if p.request.kind < Kind.SEND and bucket["name"] in (p.name, None)]
            outcome: Outcome | None = None
            error: Exception | None = None
            began = time.monotonic_ns()
            try:
                if bucket["error"] is not None:
                    raise errors.translate(*bucket["error"], name=bucket["name"] or "")
                outcome = self.carry_out(group, bucket, concerned[0].request if concerned else None)
            except Exception as caught:  # belongs to whoever waits for the handle
                error = caught
            with self.monitor:
                self.note(bucket, began)
                for pending in concerned:
                    if not pending.done:
                        pending.outcome, pending.error = outcome, error
                    self.last = pending, time.monotonic()
                self.monitor.notify_all()

    def carry_out(self, group: Group, bucket: Bucket, request: Request | None) -> Outcome:
        """Carries out one bucket. A member that has joined has no request: it contributes zeros."""
        kind, me = Kind(bucket["kind"]), group.ranks.index(self.rank)
        if kind == Kind.BARRIER:  # that it was ordered proves that every member has entered it
            return Outcome()
        if kind == Kind.JOIN:
            return Outcome(value=group.ranks[bucket["value"]])
        if kind in (Kind.ADD_GROUP, Kind.REMOVE_GROUP):
            return self.change_groups(kind, bucket["splits"])
        given = request.input if request else np.zeros(bucket["shape"], STORAGE[DType(bucket["dtype"])])
        assert given is not None
        values = given.view(STORAGE[DType(bucket["dtype"])])
        sequence = bucket["sequence"]
        circle = Circle(
            me,
            [self.hosts[rank] for rank in group.ranks],
            lambda member, data: self.tell(group.ranks[member], ["data", group.number, sequence], data),
            lambda member: self.take_mail(group.ranks[member], group.number, sequence),
        )
        splits = None
        if kind == Kind.ALLREDUCE:
            result = allreduce(circle, values.reshape(-1), bucket, self.algorithm).reshape(values.shape)
        elif kind == Kind.ALLGATHER:
            result = allgather(circle, values, bucket["first_dims"])
        elif kind == Kind.BROADCAST:
            result = broadcast(circle, values.reshape(-1), group.ranks.index(bucket["root"])).reshape(values.shape)
        elif kind == Kind.ALLTOALL:
            result = alltoall(circle, values, bucket["splits"])
            splits = [row[me] for row in bucket["splits"]]
        else:
            result = reducescatter(circle, values, bucket)
        self.count(collectives=1)
        if request is None or request.output is None or request.output.shape != result.shape:
            return Outcome(result.copy(), splits)
        request.output.view(values.dtype)[...] = result
        return Outcome(request.output, splits)

    def take_mail(self, peer: int, group: int, sequence: int) -> bytes:
        key = (peer, group, sequence)
        with self.monitor:
            self.monitor.wait_for(lambda: self.mail[key] or self.ended is not None or peer in self.departed)
            if not self.mail[key]:
                raise self.ended or departure(peer)
            data = self.mail[key].popleft()
            if not self.mail[key]:
                del self.mail[key]
            return data

    # Looking at it.

    def count(self, **more: int) -> None:
        with self.monitor:
            for name, by in more.items():
                self.counters[name] += by

    def counter(self, name: str) -> int:
        with self.monitor:
            return self.counters[name]

    def tuning(self) -> list[int]:
        return []  # nothing can be tuned

    def trace(self, on: bool, mark_plans: bool = False) -> None:
        del mark_plans  # there are none
        with self.monitor:
            self.events = [] if on else None

    def trace_drain(self) -> bytes:
        with self.monitor:
            lines, self.events = self.events or [], None if self.events is None else []
        return "".join(line + "\n" for line in lines).encode()

    def note(self, bucket: Bucket, began: int) -> None:
        if self.events is not None:
            took = time.monotonic_ns() - began
            event = {"name": Kind(bucket["kind"]).name, "ph": "X", "ts": began / 1000, "dur": took / 1000}
            self.events.append(json.dumps({**event, "pid": self.rank, "tid": 0, "args": {"tensor": bucket["name"]}}))


ENGINES: weakref.WeakSet[ReferenceEngine] = weakref.WeakSet()


def forget_in_child() -> None:
    for engine in ENGINES:
        engine.forget()


os.register_at_fork(after_in_child=forget_in_child)
