# The messages between ranks and hub: typed data <-> bytes, with a strict layout. Never pickle.
# Pure. Touches nothing.
"""Every message is a frozen dataclass; the layout of its bytes is that of codec.py."""

from __future__ import annotations

import typing
from dataclasses import dataclass

from farandole.rendezvous.codec import Codec
from farandole.rendezvous.codec import MessageError as MessageError


@dataclass(frozen=True)
class Hello:
    """Rank to hub: I want to be in the next round."""

    rank: int
    size: int
    host: str
    pid: int
    package: str  # version of the package
    sharing: int  # 0: this rank wants no shared memory
    timeout_ms: int  # how long it waits for the others
    streams: int  # TCP connections to each peer on another host, if this is rank 0
    local: str  # where ranks of the same host reach it
    remote: str  # where others do: one or more addresses, with commas between them
    worker: int = -1  # the number of this process in the life of an elastic job
    commit: int = 0  # how far its state has come; 0: it has none
    wire: str = ""  # what its engine speaks


@dataclass(frozen=True)
class Welcome:
    """Hub to rank: all are here."""

    generation: int
    hosts: tuple[int, ...]  # the host number of each rank
    names: tuple[str, ...]  # the host name of each rank
    locals: tuple[str, ...]
    remotes: tuple[str, ...]
    streams: int  # TCP connections between two ranks of different hosts
    # rank, size, local rank, local size, cross rank, cross size of who reads this, in an elastic job
    place: tuple[int, ...] = ()


@dataclass(frozen=True)
class Proved:
    """Rank to hub: shared memory works with every rank of my host but these."""

    generation: int
    unshared: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Agreed:
    """Hub to rank: the hosts as everybody sees them from now on, and why if they changed."""

    generation: int
    hosts: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Linked:
    """Rank to hub: all my links stand."""

    generation: int


@dataclass(frozen=True)
class Started:
    """Hub to rank: everybody's links stand."""

    generation: int


@dataclass(frozen=True)
class Failed:
    """Rank to hub: I cannot go on, tell the others."""

    generation: int
    text: str


@dataclass(frozen=True)
class Sorry:
    """Hub to rank: this round is over before it began."""

    text: str


@dataclass(frozen=True)
class Wish:
    """Rank to hub: I need a link to this peer."""

    generation: int
    peer: int


@dataclass(frozen=True)
class Wanted:
    """Hub to rank: open an ear for this peer and send an Offer."""

    generation: int
    peer: int


@dataclass(frozen=True)
class Offer:
    """Rank to hub to rank: the peer listens here. From a rank, `peer` is whom it is for; from the hub, whose it is."""

    generation: int
    peer: int
    address: str


@dataclass(frozen=True)
class NoLink:
    """Hub to rank: there will be no link to this peer."""

    generation: int
    peer: int
    text: str


@dataclass(frozen=True)
class Leave:
    """Rank to hub: I leave in good order."""

    generation: int
    # 1: to say Hello at once, for the next generation; 2: for good, because somebody asked it to go; 3: as 1, having
    # saved what it would save before it goes
    again: int = 0


@dataclass(frozen=True)
class Lost:
    """Hub to rank: this rank went without leaving."""

    generation: int
    rank: int
    text: str


@dataclass(frozen=True)
class Again:
    """Hub to rank: this attempt has failed; come anew."""

    text: str


@dataclass(frozen=True)
class Updated:
    """Hub to rank: hosts or workers wait to come or have to go; reset at the next step that all agree on."""

    generation: int
    stamp: int  # counts the changes of a job, from 1
    result: int  # 1: some go, 2: some come, 3: both
    drain_ms: int  # those who go have this long to save; 0: nobody is in a hurry


@dataclass(frozen=True)
class Removed:
    """Hub to rank: there is no place for this process any more; end quietly."""

    text: str


@dataclass(frozen=True)
class Broken:
    """Rank to hub: I have no link to this peer, though both of us reach you."""

    generation: int
    peer: int
    text: str


@dataclass(frozen=True)
class Waited:
    """Rank to hub: since my last report I have waited so long for others."""

    generation: int
    waited_ms: int
    of_ms: int
    links: tuple[int, ...] = ()  # four numbers for each peer on another host, as rates.py has them


Message = (
    Hello
    | Welcome
    | Proved
    | Agreed
    | Linked
    | Started
    | Failed
    | Sorry
    | Wish
    | Wanted
    | Offer
    | NoLink
    | Leave
    | Lost
    | Again
    | Updated
    | Removed
    | Broken
    | Waited
)

_CODEC = Codec(typing.get_args(Message))
encode = _CODEC.encode
decode = _CODEC.decode
LAYOUT = _CODEC.layout()
