# The messages between ranks and hub: typed data <-> bytes, with a strict layout. Never pickle.
# Pure. Touches nothing.
"""Every message is a frozen dataclass of whole numbers, texts and lists of them.

Numbers travel as 8 bytes, texts and lists with their length in front. Lengths are checked against what is there before
anything is allocated; a byte too few or too many, an unknown type or a text that is no UTF-8 is a MessageError.
"""

from __future__ import annotations

import dataclasses
import struct
import typing
from dataclasses import dataclass
from typing import Any

_INT = struct.Struct("!q")
_LENGTH = struct.Struct("!I")


class MessageError(ValueError):
    """The bytes are no message."""


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
    remote: str  # where others do


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

_TYPES: tuple[type[Any], ...] = typing.get_args(Message)
_NUMBERS = {kind: number for number, kind in enumerate(_TYPES, start=1)}


def encode(message: Message) -> tuple[int, bytes]:
    """The type's number and the bytes of a message."""
    parts: list[bytes] = []
    for field in dataclasses.fields(message):
        _WRITERS[str(field.type)](parts, getattr(message, field.name))
    return _NUMBERS[type(message)], b"".join(parts)


def decode(number: int, data: bytes) -> Message:
    """The message behind the bytes; MessageError when they are not exactly one."""
    if not 1 <= number <= len(_TYPES):
        raise MessageError(f"unknown type of message: {number}")
    kind = _TYPES[number - 1]
    reader = _Reader(data)
    values = [_READERS[str(field.type)](reader) for field in dataclasses.fields(kind)]
    if reader.rest():
        raise MessageError(f"{reader.rest()} bytes too many in a {kind.__name__}")
    message: Message = kind(*values)
    return message


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.place = 0

    def rest(self) -> int:
        return len(self.data) - self.place

    def take(self, count: int) -> bytes:
        if count > self.rest():
            raise MessageError("bytes are missing at the end of a message")
        self.place += count
        return self.data[self.place - count : self.place]

    def integer(self) -> int:
        value: int = _INT.unpack(self.take(_INT.size))[0]
        return value

    def count(self, smallest: int) -> int:
        value: int = _LENGTH.unpack(self.take(_LENGTH.size))[0]
        if value * smallest > self.rest():
            raise MessageError("a length in a message is larger than the message")
        return value

    def text(self) -> str:
        try:
            return self.take(self.count(1)).decode()
        except UnicodeDecodeError:
            raise MessageError("a text in a message is no UTF-8") from None

    def integers(self) -> tuple[int, ...]:
        return tuple(self.integer() for _ in range(self.count(_INT.size)))

    def texts(self) -> tuple[str, ...]:
        return tuple(self.text() for _ in range(self.count(_LENGTH.size)))


_READERS = {
    "int": _Reader.integer,
    "str": _Reader.text,
    "tuple[int, ...]": _Reader.integers,
    "tuple[str, ...]": _Reader.texts,
}


def _write_integer(parts: list[bytes], value: int) -> None:
    parts.append(_INT.pack(value))


def _write_text(parts: list[bytes], value: str) -> None:
    data = value.encode(errors="replace")
    parts += (_LENGTH.pack(len(data)), data)


def _write_integers(parts: list[bytes], values: tuple[int, ...]) -> None:
    parts.append(_LENGTH.pack(len(values)))
    for value in values:
        _write_integer(parts, value)


def _write_texts(parts: list[bytes], values: tuple[str, ...]) -> None:
    parts.append(_LENGTH.pack(len(values)))
    for value in values:
        _write_text(parts, value)


_WRITERS: dict[str, Any] = {
    "int": _write_integer,
    "str": _write_text,
    "tuple[int, ...]": _write_integers,
    "tuple[str, ...]": _write_texts,
}
