# Ranks as threads of one process that take turns, for the tests of the mirror: any rank can die in any collective.
# Touches farandole.elastic.mirror, whose collectives it replaces.
"""`Cast(seed).play(...)`: what runs next, who dies and when follows from the seed alone."""

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
    """This rank is gone."""


class Actor:
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

    def __init__(self, actors: list[Actor], hosts: list[int]) -> None:
        self.actors, self.hosts = actors, hosts
        self.deposits: dict[int, dict[int, Any]] = {}
        self.revoked = False
        for rank, actor in enumerate(actors):
            actor.rank, actor.number, actor.deposited = rank, 0, False

    def exchange(self, actor: Actor, value: Any) -> list[Any]:
        """Everybody's values, once all have come; an error when somebody was lost before this rank took them."""
        actor.pause()
        if self.revoked:
            raise HorovodInternalError("lost")
        actor.number += 1
        own_deposits = self.deposits.setdefault(actor.number, {})
        own_deposits[actor.rank] = value
        while len(own_deposits) < len(self.actors):
            actor.pause()
            if self.revoked:
                raise HorovodInternalError("lost")
        actor.pause()
        if self.revoked:  # the others may have their results already
            raise HorovodInternalError("lost")
        return [own_deposits[rank] for rank in range(len(self.actors))]


class Cast:
    """All ranks there ever are, and the stand-ins for what the mirror calls."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.local = threading.local()
        self.names = 0

    def install(self) -> Callable[[], None]:
        before = module.ops, module.allgather_object, module.runtime
        local = self.local

        def together(value: Any) -> list[Any]:
            found: list[Any] = local.world.exchange(local.actor, value)
            return found

        def alltoall(data: Any, splits: Any, name: str) -> Any:
            ends = np.cumsum(splits)
            pieces = [data[end - count : end] for end, count in zip(ends, splits, strict=True)]
            received = [pieces[local.actor.rank] for pieces in together(pieces)]
            return np.concatenate(received), np.array([len(one) for one in received])

        class Here:
            @property
            def world(self) -> Any:
                engine = SimpleNamespace(rank=local.actor.rank, size=len(local.world.actors))
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

    def newcomer(self) -> Actor:
        self.names += 1
        return Actor(self.names)

    def play(
        self,
        actors: list[Actor],
        hosts: list[int],
        part: Callable[[Actor], None],
        dies: Actor | None,
        may_die: Callable[[], bool],
    ) -> None:
        """Runs `part(actor)` on all of them, in random turns; `dies` ends somewhere on the way, once it may.

        Some generations end without a death: a newcomer could not be reached, say.
        """
        world = World(actors, hosts)

        def body(actor: Actor) -> None:
            actor.turn.acquire()
            self.local.world, self.local.actor = world, actor
            try:
                part(actor)
            except BaseException as error:
                actor.error = error
            actor.done = True
            actor.given_back.release()

        for actor in actors:
            actor.error, actor.done, actor.dies_in = None, False, -1
        threads = [threading.Thread(target=body, args=(actor,)) for actor in actors]
        for thread in threads:
            thread.start()
        life = self.draw.randrange(1, 40)
        turns = self.draw.randrange(1, 80) if self.draw.random() < 0.4 else -1
        while any(not actor.done for actor in actors):
            actor = self.draw.choice([actor for actor in actors if not actor.done])
            if actor is dies and may_die():
                life -= 1
                actor.dies_in = max(life, 0)
            actor.turn.release()
            actor.given_back.acquire()
            turns -= 1
            if turns == 0:
                world.revoked = True
            if any(one.error is not None for one in actors):
                world.revoked = world.revoked or self.draw.random() < 0.2  # some get the error later
        for thread in threads:
            thread.join()
