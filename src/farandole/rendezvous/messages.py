# The messages between ranks and the hub: typed data with a strict layout in bytes, never pickle.
# Pure. Touches nothing.
"""Every message is a frozen dataclass; codec.py defines its bytes."""

from __future__ import annotations

import typing
from dataclasses import dataclass

from farandole.rendezvous.codec import Codec
from farandole.rendezvous.codec import MessageError as MessageError


@dataclass(frozen=True)
class Hello:
    """Rank to hub: the rank wants to join the next round."""

    rank: int
    size: int
    host: str
    pid: int
    package: str  # version of the package
    sharing: int  # 0: this rank does not use shared memory
    timeout_ms: int  # how long it waits for the others
    streams: int  # TCP connections to each peer on another host; rank 0 decides
    local: str  # address for ranks of the same host
    remote: str  # addresses for other ranks, with commas between them
    worker: int = -1  # the number of this process in an elastic job
    commit: int = 0  # the number of its last commit; 0: it has none
    wire: str = ""  # version of its engine's protocol


@dataclass(frozen=True)
class Welcome:
    """Hub to rank: all ranks have connected."""

    generation: int
    hosts: tuple[int, ...]  # the host number of each rank
    names: tuple[str, ...]  # the host name of each rank
    locals: tuple[str, ...]
    remotes: tuple[str, ...]
    streams: int  # TCP connections between two ranks of different hosts
    # in an elastic job: rank, size, local rank, local size, cross rank, cross size of the receiver
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class MemoryProved:
    """Rank to hub: shared memory works with every rank of this host except these."""

    generation: int
    unshared: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class HostsAgreed:
    """Hub to rank: the hosts that count from now on, and the reason if they changed."""

    generation: int
    hosts: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Linked:
    """Rank to hub: all links of this rank are made."""

    generation: int


@dataclass(frozen=True)
class Started:
    """Hub to rank: the links of all ranks are made."""

    generation: int


@dataclass(frozen=True)
class Failed:
    """Rank to hub: this rank cannot continue; the hub tells the others."""

    generation: int
    text: str


@dataclass(frozen=True)
class Rejected:
    """Hub to rank: the round was rejected; the text says why."""

    text: str


@dataclass(frozen=True)
class LinkRequest:
    """Rank to hub: this rank needs a link to this peer."""

    generation: int
    peer: int


@dataclass(frozen=True)
class ListenRequest:
    """Hub to rank: listen for a connection of this peer, and send a ListenAddress."""

    generation: int
    peer: int


@dataclass(frozen=True)
class ListenAddress:
    """Rank to hub to rank: the address at which a rank listens. From a rank, `peer` is the receiver; from the hub, the
    sender."""

    generation: int
    peer: int
    address: str


@dataclass(frozen=True)
class LinkRefused:
    """Hub to rank: there will be no link to this peer."""

    generation: int
    peer: int
    text: str


@dataclass(frozen=True)
class Leave:
    """Rank to hub: this rank leaves without a failure."""

    generation: int
    # 1: it joins the next generation at once; 2: it leaves for good because it was asked to; 3: as 1, after its
    # save callbacks have run
    again: int = 0


@dataclass(frozen=True)
class Lost:
    """Hub to rank: this rank was lost."""

    generation: int
    rank: int
    text: str


@dataclass(frozen=True)
class Retry:
    """Hub to rank: this attempt has failed; join again."""

    text: str


@dataclass(frozen=True)
class MembershipUpdate:
    """Hub to rank: hosts or workers want to join or must leave; reset at the next step on which all ranks agree."""

    generation: int
    stamp: int  # number of this change in the job, from 1
    result: int  # 1: some leave, 2: some join, 3: both
    drain_ms: int  # workers that leave have this long to save; 0: no limit


@dataclass(frozen=True)
class Removed:
    """Hub to rank: there is no slot for this process any more; it ends without an error."""

    text: str


@dataclass(frozen=True)
class LinkBroken:
    """Rank to hub: this rank cannot reach this peer, although both reach the hub."""

    generation: int
    peer: int
    text: str


@dataclass(frozen=True)
class WaitReport:
    """Rank to hub: how long this rank has waited for others since its last report."""

    generation: int
    waited_ms: int
    of_ms: int  # the time since its last report
    links: tuple[int, ...] = ()  # four numbers for each peer on another host, see rates.py


Message = (
    Hello
    | Welcome
    | MemoryProved
    | HostsAgreed
    | Linked
    | Started
    | Failed
    | Rejected
    | LinkRequest
    | ListenRequest
    | ListenAddress
    | LinkRefused
    | Leave
    | Lost
    | Retry
    | MembershipUpdate
    | Removed
    | LinkBroken
    | WaitReport
)

_CODEC = Codec(typing.get_args(Message))
encode = _CODEC.encode
decode = _CODEC.decode
LAYOUT = _CODEC.layout()
