# What the ranks of jobs of fixed size and those of elastic jobs have in common.
# Touches nothing.
"""`FixedRanks` and `ElasticRanks` derive from `JobRanks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from farandole.launch.agents import Agents
from farandole.launch.outcome import Outcome
from farandole.launch.plan import Plan

# What a job gives to its ranks: also a function that tells the user, and one that is called with the rank and the exit
# code of each rank that ends without a failure.
Parts: TypeAlias = tuple[Plan, Agents, Outcome, Callable[[str], None], Callable[[int, int], None]]


class JobRanks:
    """The common part of both classes."""

    def __init__(self, *parts: *Parts) -> None:
        self._plan, self._agents, self._outcome, self._say, self._on_ended = parts
        self.on_warning: Callable[[str], None] = lambda text: None  # the hub has warned the user
