# Ranks as threads of one process that take turns, for the tests of the mirror: any rank can die in any collective.
# Touches farandole.elastic.mirror, whose collectives it replaces.
"""`AllRanks(seed).run(...)`: the seed decides alone what runs next, and which rank dies when."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from farandole.base.errors import HorovodInternalError
from farandole.elastic import mirror

module: Any = mirror  # whose imports are replaced


class Died(BaseException):
    """This rank has died."""


class RankThread:
    """A rank's thread. It runs only when it has the turn, and gives it back at every collective."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.turn, self.given_back = threading.Semaphore(0), threading.Semaphore(0)
        self.rank = -1
        self.number = 0  # of the collective it is in
        self.deposited = False
        self.done = False
        self.dies_in = -1  # turns
        self.error: BaseException | None = None

    def pause(self) -> None:
        self.given_back.release()
        self.turn.acquire()
        if self.dies_in == 0:
            raise Died


class World:
    """One generation."""

    def __init__(self, rank_threads: list[RankThread], hosts: list[int]) -> None:
        self.rank_threads, self.hosts = rank_threads, hosts
        self.deposits: dict[int, dict[int, Any]] = {}
        self.revoked = False
        for rank, rank_thread in enumerate(rank_threads):
            rank_thread.rank, rank_thread.number, rank_thread.deposited = rank, 0, False

    def exchange(self, rank_thread: RankThread, value: Any) -> list[Any]:
        """The values of all ranks, when all have come; an error if a rank was lost before this one took them."""
        rank_thread.pause()
        if self.revoked:
            raise HorovodInternalError("lost")
        rank_thread.number += 1
        own_deposits = self.deposits.setdefault(rank_thread.number, {})
        own_deposits[rank_thread.rank] = value
        while len(own_deposits) < len(self.rank_threads):
            rank_thread.pause()
            if self.revoked:
                raise HorovodInternalError("lost")
        rank_thread.pause()
        if self.revoked:  # the others may have their results already
            raise HorovodInternalError("lost")
        return [own_deposits[rank] for rank in range(len(self.rank_threads))]


class AllRanks:
    """All ranks of a test, and the functions that replace what the mirror calls."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.local = threading.local()
        self.names = 0

    def install(self) -> Callable[[], None]:
        before = module.ops, module.allgather_object, module.runtime
        local = self.local

        def together(value: Any) -> list[Any]:
            found: list[Any] = local.world.exchange(local.rank_thread, value)
            return found

        def alltoall(data: Any, splits: Any, name: str) -> Any:
            ends = np.cumsum(splits)
            pieces = [data[end - count : end] for end, count in zip(ends, splits, strict=True)]
            received = [pieces[local.rank_thread.rank] for pieces in together(pieces)]
            return np.concatenate(received), np.array([len(one) for one in received])

        class Here:
            @property
            def world(self) -> Any:
                engine = SimpleNamespace(rank=local.rank_thread.rank, size=len(local.world.rank_threads))
                return SimpleNamespace(engine=engine, session=SimpleNamespace(hosts=local.world.hosts))

        stand_ins: Any = SimpleNamespace(
            Max=None,
            alltoall=alltoall,
            allreduce=lambda value, op, name: np.max(together(value), axis=0),
            barrier=lambda: together(None),
        )
        module.ops, module.runtime = stand_ins, Here()
        module.allgather_object = lambda value, name: together(value)

        def restore() -> None:
            module.ops, module.allgather_object, module.runtime = before

        return restore

    def new_rank(self) -> RankThread:
        self.names += 1
        return RankThread(self.names)

    def run(
        self,
        rank_threads: list[RankThread],
        hosts: list[int],
        work: Callable[[RankThread], None],
        dies: RankThread | None,
        may_die: Callable[[], bool],
    ) -> None:
        """Runs `work(rank_thread)` on all of them, in random turns; `dies` ends somewhere on the way, once it may.

        Some generations end without a death, for instance because a new rank could not be reached.
        """
        world = World(rank_threads, hosts)

        def body(rank_thread: RankThread) -> None:
            rank_thread.turn.acquire()
            self.local.world, self.local.rank_thread = world, rank_thread
            try:
                work(rank_thread)
            except BaseException as error:
                rank_thread.error = error
            rank_thread.done = True
            rank_thread.given_back.release()

        for rank_thread in rank_threads:
            rank_thread.error, rank_thread.done, rank_thread.dies_in = None, False, -1
        threads = [threading.Thread(target=body, args=(rank_thread,)) for rank_thread in rank_threads]
        for thread in threads:
            thread.start()
        life = self.draw.randrange(1, 40)
        turns = self.draw.randrange(1, 80) if self.draw.random() < 0.4 else -1
        while any(not rank_thread.done for rank_thread in rank_threads):
            rank_thread = self.draw.choice([rank_thread for rank_thread in rank_threads if not rank_thread.done])
            if rank_thread is dies and may_die():
                life -= 1
                rank_thread.dies_in = max(life, 0)
            rank_thread.turn.release()
            rank_thread.given_back.acquire()
            turns -= 1
            if turns == 0:
                world.revoked = True
            if any(one.error is not None for one in rank_threads):
                world.revoked = world.revoked or self.draw.random() < 0.2  # some get the error later
        for thread in threads:
            thread.join()
