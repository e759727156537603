# A pool of real ranks that run random programs through the public API, as the parent sends them.
# Touches farandole as users see it; programs and results go over the test's own unix socket.
"""`Pool` is the parent's side; `serve` is a rank's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import jobs
from programs import Item, Program, input_of, takes_part

import farandole as hvd
from farandole.engine.interface import Array, Kind

KEY = b"the programs of this test"
PATIENCE_S = 60.0


def begin(item: Item, rank: int, step: int, sets: dict[tuple[int, ...], Any]) -> int:
    """Submits one item as a user would."""
    member = item.ranks.index(rank)
    data = input_of(item, member, step)
    common: dict[str, Any] = {"process_set": sets[item.ranks], "dtype": item.dtype}
    scales: dict[str, Any] = {"prescale_factor": item.prescale, "postscale_factor": item.postscale, "op": item.op}
    call: Callable[..., int]
    if item.kind == Kind.ALLREDUCE:
        call = hvd.allreduce_async_ if item.in_place else hvd.allreduce_async
        return call(data, name=item.name, **scales, **common)
    if item.kind == Kind.ALLGATHER:
        return hvd.allgather_async(data, name=item.name, **common)
    if item.kind == Kind.BROADCAST:
        call = hvd.broadcast_async_ if item.in_place else hvd.broadcast_async
        return call(data, item.ranks[item.root], name=item.name, **common)
    if item.kind == Kind.ALLTOALL:
        return hvd.alltoall_async(data, splits=list(item.splits[member]), name=item.name, **common)
    if item.kind == Kind.REDUCESCATTER:
        return hvd.reducescatter_async(data, name=item.name, **scales, **common)
    if member == item.root:
        sender = item.ranks[(item.root + 1) % len(item.ranks)]
        return hvd.irecv(data, sender, tag=item.seed, **common)
    return hvd.isend(data, item.ranks[item.root], tag=item.seed, **common)


def outcome(item: Item, result: Any) -> tuple[Array | None, Any]:
    if item.kind == Kind.ALLTOALL:
        return result[0], result[1]
    return result, None


def perform(program: Program, rank: int, sets: dict[tuple[int, ...], Any]) -> list[Any]:
    """Does the same as programs.run_program with the public functions. (Their barrier blocks: programs have none.)"""
    results = []
    for step in range(program.steps):
        begun: dict[int, list[tuple[Item, int]]] = {}
        for index in program.order(rank, step, 0):
            items = [item for item in program.bundles[index] if takes_part(item, rank)]
            begun[index] = [(item, begin(item, rank, step, sets)) for item in items]
        outputs: list[Any] = [None] * len(program.bundles)
        for index in program.order(rank, step, 1):
            outputs[index] = [outcome(item, hvd.synchronize(handle, 30.0)) for item, handle in begun[index]]
        results.append(outputs)
    return results


def serve(address: str, groups: Sequence[tuple[int, ...]]) -> None:
    """The loop of a rank: it receives programs and sends results; None ends it."""
    proper = [hvd.ProcessSet(list(ranks)) for ranks in groups[1:]]
    hvd.init(process_sets=proper)
    sets = dict(zip(groups, [hvd.global_process_set, *proper], strict=True))
    with Client(address, "AF_UNIX", authkey=KEY) as parent:
        parent.send(hvd.rank())
        while (program := parent.recv()) is not None:
            try:
                parent.send(perform(program, hvd.rank(), sets))
            except Exception as error:
                parent.send(f"rank {hvd.rank()}: {type(error).__name__}: {error}")
    hvd.shutdown()


class Pool:
    """Ranks that wait for programs."""

    def __init__(self, hosts: Sequence[str], groups: Sequence[tuple[int, ...]], env: dict[str, str]) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="pool-")
        address = str(Path(self.directory.name) / "programs")
        self.listener = Listener(address, "AF_UNIX", backlog=len(hosts), authkey=KEY)
        body = f"import pool\npool.serve({address!r}, {list(groups)!r})\n"
        # A pool exists for longer than the time limit of one program.
        body = "faulthandler.cancel_dump_traceback_later()\n" + body
        self.job = jobs.start(body, len(hosts), hosts, env, stop_on_failure=True)
        self.ranks: dict[int, Any] = {}
        for _ in hosts:
            connection = self.listener.accept()
            self.ranks[connection.recv()] = connection

    def run(self, program: Program) -> list[list[Any]]:
        for rank in self.ranks.values():
            rank.send(program)
        results = []
        for number in range(len(self.ranks)):
            assert self.ranks[number].poll(PATIENCE_S), f"rank {number} has not answered within {PATIENCE_S} s"
            results.append(self.ranks[number].recv())
        assert all(isinstance(result, list) for result in results), results
        return results

    def close(self) -> int:
        for rank in self.ranks.values():
            rank.send(None)
        code = self.job.wait(60)
        self.abandon()
        return code

    def abandon(self) -> None:
        self.job.close()
        for rank in self.ranks.values():
            rank.close()
        self.listener.close()
        self.directory.cleanup()
        assert not os.path.exists(self.directory.name)
