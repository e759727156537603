# The messages between a Spark task and the process that leads the job.
# Pure. Touches nothing.
"""A task registers; the leader may ask it to start an agent. rendezvous/codec.py defines the bytes."""

from __future__ import annotations

import typing
from dataclasses import dataclass

from farandole.rendezvous.codec import Codec


@dataclass(frozen=True)
class TaskReady:
    """Task to leader: the task is ready, with one slot of this executor."""

    host: str
    executor: str
    python: str
    cpus: int
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class StartAgent:
    """Leader to task: start an agent, whose connection uses this number."""

    number: int


@dataclass(frozen=True)
class AgentEnded:
    """Task to leader: the agent has ended, and nothing of it is left."""

    number: int
    code: int


_CODEC = Codec(typing.get_args(TaskReady | StartAgent | AgentEnded))
encode = _CODEC.encode
decode = _CODEC.decode
