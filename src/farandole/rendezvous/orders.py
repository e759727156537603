# The messages between the launcher and its agents, and between an agent and a worker that waits for calls.
# Pure. Touches nothing.
"""Orders go from the launcher to the agent of a host, reports come back. The layout is that of codec.py."""

from __future__ import annotations

import typing
from dataclasses import dataclass

from farandole.rendezvous.codec import Codec

MARK = b"\n#farandole-agent "  # an agent's first words; the launcher skips whatever a login shell prints before them
STDOUT, STDERR = 0, 1
ALL = -1  # every rank of the host


@dataclass(frozen=True)
class Prepare:
    """Launcher to agent: find out which of these addresses of the hub can be reached."""

    addresses: tuple[str, ...]
    interfaces: tuple[str, ...]  # those that ranks may listen on; none: all that are up


@dataclass(frozen=True)
class Prepared:
    """Agent to launcher: the hub is reached at `address`; "" with the reason when it is not."""

    address: str
    reason: str
    addresses: tuple[str, ...]  # of this host
    port: int  # held free for a server that rank 0 may want to start
    cores: int


@dataclass(frozen=True)
class Environment:
    """Launcher to agent: more variables for every rank of this host, each as NAME=VALUE."""

    variables: tuple[bytes, ...]


@dataclass(frozen=True)
class Command:
    """Launcher to agent: more words of the command that every rank of this host runs."""

    words: tuple[bytes, ...]


@dataclass(frozen=True)
class Launch:
    """Launcher to agent: start this rank. `calls`: it gets a channel for functions to call."""

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
    """Agent to launcher: a rank has printed this; nothing: the stream is at its end."""

    rank: int
    stream: int
    data: bytes


@dataclass(frozen=True)
class Written:
    """Launcher to agent: so many bytes of output have been written; the ranks of this host may print as many more."""

    count: int


@dataclass(frozen=True)
class Ended:
    """Agent to launcher: a rank's process has ended, and its children with it."""

    rank: int
    code: int
    report: str  # what the worker itself said about its failure (observe/ending.py)
    cause: str  # what the kernel said about it


@dataclass(frozen=True)
class Signal:
    """Launcher to agent: send this signal to a rank (ALL: to each), alone or with its whole process group."""

    rank: int
    number: int
    group: int


@dataclass(frozen=True)
class Asked:
    """Agent to launcher: somebody has sent the agent this signal; the job shall end."""

    number: int


@dataclass(frozen=True)
class Call:
    """A piece of a function for a rank, or of a result from it. Launcher, agent and worker pass it on."""

    rank: int
    call: int
    kind: int
    last: int
    data: bytes


@dataclass(frozen=True)
class Taken:
    """Worker to agent to launcher: the rank has read a piece of a call, and one more may be sent."""

    rank: int


@dataclass(frozen=True)
class Watch:
    """Launcher to agent: this job is elastic; tick, and watch the ranks' signs of life. Times are milliseconds."""

    agent: int  # its number, for when it has to knock at the hub's door
    beat_ms: int  # between two ticks
    suspect_ms: int
    evict_ms: int
    stubborn_ms: int  # when nothing speaks for a rank any more
    drain_ms: int  # what ranks that have something to save get when the launcher is gone


@dataclass(frozen=True)
class Tick:
    """Launcher to agent and back: I am here; for so many milliseconds I have not heard from you."""

    unheard_ms: int


@dataclass(frozen=True)
class Quiet:
    """Agent to launcher: a rank has shown no sign of life for so long; 0: it has again."""

    rank: int
    silent_ms: int
    state: str  # of its process, as the kernel names it: T stopped, D waits in the kernel, ...


Order = (
    Prepare | Prepared | Environment | Command | Launch | Running | NotStarted | Output | Written | Ended | Signal
    | Asked | Call | Taken | Watch | Tick | Quiet
)  # fmt: skip

_CODEC = Codec(typing.get_args(Order))
encode = _CODEC.encode
decode = _CODEC.decode
LAYOUT = _CODEC.layout()
