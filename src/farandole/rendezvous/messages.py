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


@dataclass(frozen=True)
class Welcome:
    """Hub to rank: all are here."""

    generation: int
    hosts: tuple[int, ...]  # the host number of each rank
    names: tuple[str, ...]  # the host name of each rank
    locals: tuple[str, ...]
    remotes: tuple[str, ...]
    streams: int  # TCP connections between two ranks of different hosts


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


@dataclass(frozen=True)
class Lost:
    """Hub to rank: this rank went without leaving."""

    generation: int
    rank: int
    text: str


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
)

_CODEC = Codec(typing.get_args(Message))
encode = _CODEC.encode
decode = _CODEC.decode
