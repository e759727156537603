# The messages between a Spark task and the process that leads the job.
# Pure. Touches nothing.
"""A task says where it is; it may be asked to carry an agent. The layout is that of rendezvous/codec.py."""

from __future__ import annotations

import typing
from dataclasses import dataclass

from farandole.rendezvous.codec import Codec


@dataclass(frozen=True)
class Here:
    """Task to leader: one slot, of this executor."""

    host: str
    executor: str
    python: str
    cpus: int
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Carry:
    """Leader to task: start an agent, whose line shall call itself by this number."""

    number: int


@dataclass(frozen=True)
class Ended:
    """Task to leader: that agent has ended, and nothing of it is left."""

    number: int
    code: int


_CODEC = Codec(typing.get_args(Here | Carry | Ended))
encode = _CODEC.encode
decode = _CODEC.decode
