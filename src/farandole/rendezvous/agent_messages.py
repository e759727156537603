# The messages between the launcher and its agents, and between an agent and a worker that waits for calls.
# Pure. Touches nothing.
"""The launcher sends commands to the agent of a host, the agent sends reports back. codec.py defines the bytes."""

from __future__ import annotations

import typing
from dataclasses import dataclass

from farandole.rendezvous.codec import Codec

MARK = b"\n#farandole-agent "  # an agent's first bytes; the launcher skips what a login shell prints before them
STDOUT, STDERR = 0, 1
END = 3  # a kind of call: the worker ends; launch/calls.py has the other kinds
ALL = -1  # every rank of the host


@dataclass(frozen=True)
class Prepare:
    """Launcher to agent: find out which of these addresses reach the hub."""

    addresses: tuple[str, ...]
    interfaces: tuple[str, ...]  # on which ranks may listen; empty: all that are up


@dataclass(frozen=True)
class Prepared:
    """Agent to launcher: `address` reaches the hub; "" with the reason when none does."""

    address: str
    reason: str
    addresses: tuple[str, ...]  # of this host
    port: int  # kept free for a server that rank 0 may start
    cores: int


@dataclass(frozen=True)
class Environment:
    """Launcher to agent: more environment variables for every rank of this host, each as NAME=VALUE."""

    variables: tuple[bytes, ...]


@dataclass(frozen=True)
class Command:
    """Launcher to agent: more arguments of the command that every rank of this host runs."""

    words: tuple[bytes, ...]


@dataclass(frozen=True)
class Launch:
    """Launcher to agent: start this rank. `calls`: whether it gets a channel for function calls."""

    rank: int
    directory: bytes
    variables: tuple[bytes, ...]
    calls: int


@dataclass(frozen=True)
class Running:
    """Agent to launcher: the rank has been started."""

    rank: int
    pid: int


@dataclass(frozen=True)
class NotStarted:
    """Agent to launcher: the rank cannot be started."""

    rank: int
    number: int  # errno
    text: str


@dataclass(frozen=True)
class Output:
    """Agent to launcher: a rank has printed this; empty: the stream has ended."""

    rank: int
    stream: int
    data: bytes


@dataclass(frozen=True)
class OutputCredit:
    """Launcher to agent: this many bytes of output were written, so the ranks of this host may print as many more."""

    count: int


@dataclass(frozen=True)
class Ended:
    """Agent to launcher: the process of a rank has ended, and its children too."""

    rank: int
    code: int
    report: str  # what the worker itself reported about its failure (base/ending.py)
    cause: str  # what the kernel reported about it
    record: bytes  # its last operations, compressed; empty when it did not fail


@dataclass(frozen=True)
class Signal:
    """Launcher to agent: send this signal to a rank (ALL: to each), or to its whole process group."""

    rank: int
    number: int
    group: int


@dataclass(frozen=True)
class AgentSignaled:
    """Agent to launcher: the agent received this signal; the job must end."""

    number: int


@dataclass(frozen=True)
class Call:
    """A piece of a function for a rank, or of its result. Launcher, agent and worker pass it on."""

    rank: int
    call: int
    kind: int
    last: int
    data: bytes


@dataclass(frozen=True)
class CallCredit:
    """Worker to agent to launcher: the rank has read a piece of a call, so one more may be sent."""

    rank: int


@dataclass(frozen=True)
class WatchRanks:
    """Launcher to agent: this job is elastic; send heartbeats and watch those of the ranks. Times are milliseconds."""

    agent: int  # its number, with which it tries the hub's address
    heartbeat_ms: int  # between two heartbeats
    suspect_ms: int
    evict_ms: int
    give_up_ms: int  # after this time a rank is evicted without further conditions
    drain_ms: int  # how long ranks that have something to save may run after the launcher has ended


@dataclass(frozen=True)
class Heartbeat:
    """Launcher to agent and back: a heartbeat, with the time since the sender last heard from the other side."""

    launcher_silent_ms: int


@dataclass(frozen=True)
class RankSilent:
    """Agent to launcher: a rank has sent no heartbeat for this long; 0: it sends again."""

    rank: int
    silent_ms: int
    state: str  # of its process, as the kernel names it: T stopped, D waits in the kernel, ...


@dataclass(frozen=True)
class RankWaits:
    """Agent to launcher: an operation of this rank has been pending for this long; 0: it has ended."""

    rank: int
    waited_ms: int


@dataclass(frozen=True)
class Examine:
    """Launcher to agent: say of each rank what it does."""

    number: int


@dataclass(frozen=True)
class Examined:
    """Agent to launcher: what a rank does."""

    number: int
    rank: int
    facts: bytes  # JSON (launch/examine.py)
    record: bytes  # its last operations, compressed


AgentMessage = (
    Prepare | Prepared | Environment | Command | Launch | Running | NotStarted | Output | OutputCredit | Ended | Signal
    | AgentSignaled | Call | CallCredit | WatchRanks | Heartbeat | RankSilent | RankWaits | Examine | Examined
)  # fmt: skip

_CODEC = Codec(typing.get_args(AgentMessage))
encode = _CODEC.encode
decode = _CODEC.decode
LAYOUT = _CODEC.layout()
