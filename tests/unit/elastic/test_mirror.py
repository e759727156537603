"""Sharded state through random histories: ranks die in the middle of commits and of recoveries, new ones come.
Ranks are threads that take turns (mirror_world.py); real ones die in tests/ranks/test_elastic_ledger.py."""

from __future__ import annotations

import os

from mirror_world import AllRanks, Died, RankThread

from farandole.base.errors import HorovodInternalError
from farandole.elastic.mirror import Mirror, Sharded

KEYS = 5


class Member:
    """A rank's state: shards that all count steps."""

    def __init__(self, thread: RankThread) -> None:
        self.thread = thread
        self.part = Sharded(dict.fromkeys(range(KEYS), 0))
        self.mirror = Mirror({"part": self.part})
        self.commits = 0


class History:
    """One job, from its seed."""

    def __init__(self, seed: int) -> None:
        self.all_ranks = AllRanks(seed)
        self.members = [Member(self.all_ranks.new_rank()) for _ in range(self.all_ranks.draw.randrange(2, 5))]
        self.truth = {1: 0}  # commit -> what every shard holds
        self.recovered: set[RankThread] = set()
        self.whole = True  # a second loss before the first has been made good may lose something
        self.lost = 0

    def work(self, thread: RankThread) -> None:
        """What a rank does in a generation: begins with the newest commit, and makes some more."""
        member = next(one for one in self.members if one.thread is thread)
        mirror = member.mirror
        mirror.recover()
        if mirror.agreed == 0:
            mirror.begin()
        member.commits = mirror.agreed
        self.recovered.add(thread)
        assert {member.part[key] for key in member.part} <= {self.truth[member.commits]}
        for _ in range(4):
            number = member.commits + 1
            for key in member.part:
                member.part[key] += 1
            mirror.prepare(number)
            mirror.agree(number)
            member.commits = number
            for key in member.part:
                self.truth[number] = member.part[key]

    def may_die(self) -> bool:
        return self.whole or len(self.recovered) == len(self.members)

    def generation(self) -> None:
        draw, members = self.all_ranks.draw, self.members
        self.recovered.clear()
        dies = draw.choice(members).thread if len(members) > 1 and draw.random() < 0.8 else None
        hosts = sorted(draw.randrange(2) for _ in members)
        self.all_ranks.run([one.thread for one in members], hosts, self.work, dies, self.may_die)
        for one in members:
            error = one.thread.error
            assert error is None or isinstance(error, (Died, HorovodInternalError)), repr(error)
        dead = [one for one in members if isinstance(one.thread.error, Died)]
        self.lost += len(dead)
        self.whole = not dead and (self.whole or len(self.recovered) == len(members) > 1)
        if len(self.recovered) == len(members) == 1:
            self.whole = False  # one that is alone has nobody to keep its copies
        self.members = sorted((one for one in members if one not in dead), key=lambda one: -one.commits)
        for one in self.members:
            one.mirror.restore()
        newcomers = min(draw.randrange(0, 3), 4 - len(self.members))
        self.members += [Member(self.all_ranks.new_rank()) for _ in range(newcomers)]

    def run(self) -> int:
        """How many ranks it lost."""
        restore = self.all_ranks.install()
        try:
            for _ in range(self.all_ranks.draw.randrange(2, 8)):
                self.generation()
        finally:
            restore()
        return self.lost


def test_no_committed_part_is_ever_lost() -> None:
    seeds = 60 * int(os.environ.get("CHAOS_N", "1"))
    assert sum(History(seed).run() for seed in range(seeds)) > seeds
