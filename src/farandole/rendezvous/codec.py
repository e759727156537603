# Turns typed messages into bytes and back, with a strict layout. Never pickle.
# Pure. Touches nothing.
"""Every message is a frozen dataclass of integers, texts, bytes and lists of them.

An integer takes 8 bytes; texts, bytes and lists begin with their length. A length is checked against the bytes present
before anything is allocated. Missing or extra bytes, an unknown type or a text that is not UTF-8 raise MessageError.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

_INT = struct.Struct("!q")
_LENGTH = struct.Struct("!I")


class MessageError(ValueError):
    """The bytes are not a valid message."""


class Codec:
    """Turns messages of the given types into bytes and back; a type's number is its position in the list, from 1."""

    def __init__(self, types: tuple[type[Any], ...]) -> None:
        self._types = types
        self._numbers = {kind: number for number, kind in enumerate(types, start=1)}

    def layout(self) -> str:
        """All types with their fields, as text: another text means another version of the protocol."""
        return "\n".join(
            f"{kind.__name__}: {', '.join(f'{field.name} {field.type}' for field in dataclasses.fields(kind))}"
            for kind in self._types
        )

    def encode(self, message: Any) -> tuple[int, bytes]:
        """The type's number and the bytes of a message."""
        parts: list[bytes] = []
        for field in dataclasses.fields(message):
            _WRITERS[str(field.type)](parts, getattr(message, field.name))
        return self._numbers[type(message)], b"".join(parts)

    def decode(self, number: int, data: bytes) -> Any:
        """The message that the bytes contain. Raises MessageError if they are not exactly one message."""
        if not 1 <= number <= len(self._types):
            raise MessageError(f"message type {number} is unknown; the known types are 1 to {len(self._types)}")
        kind = self._types[number - 1]
        reader = _Reader(data)
        values = [_READERS[str(field.type)](reader) for field in dataclasses.fields(kind)]
        if reader.rest():
            raise MessageError(f"a {kind.__name__} message has {reader.rest()} extra bytes")
        return kind(*values)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.offset = 0

    def rest(self) -> int:
        return len(self.data) - self.offset

    def take(self, count: int) -> bytes:
        if count > self.rest():
            raise MessageError(f"a message is too short: {count} bytes expected, {self.rest()} present")
        self.offset += count
        return self.data[self.offset - count : self.offset]

    def integer(self) -> int:
        value: int = _INT.unpack(self.take(_INT.size))[0]
        return value

    def count(self, smallest: int) -> int:
        value: int = _LENGTH.unpack(self.take(_LENGTH.size))[0]
        if value * smallest > self.rest():
            raise MessageError(
                f"a list of {value} items cannot be in the {self.rest()} bytes that remain of the message"
            )
        return value

    def bytes(self) -> bytes:
        return self.take(self.count(1))

    def text(self) -> str:
        try:
            return self.bytes().decode()
        except UnicodeDecodeError:
            raise MessageError("a text in a message is not UTF-8") from None

    def integers(self) -> tuple[int, ...]:
        return tuple(self.integer() for _ in range(self.count(_INT.size)))

    def texts(self) -> tuple[str, ...]:
        return tuple(self.text() for _ in range(self.count(_LENGTH.size)))

    def pieces(self) -> tuple[Any, ...]:
        return tuple(self.bytes() for _ in range(self.count(_LENGTH.size)))


_READERS = {
    "int": _Reader.integer,
    "str": _Reader.text,
    "bytes": _Reader.bytes,
    "tuple[int, ...]": _Reader.integers,
    "tuple[str, ...]": _Reader.texts,
    "tuple[bytes, ...]": _Reader.pieces,
}


def _write_integer(parts: list[bytes], value: int) -> None:
    parts.append(_INT.pack(value))


def _write_bytes(parts: list[bytes], value: bytes) -> None:
    parts += (_LENGTH.pack(len(value)), value)


def _write_text(parts: list[bytes], value: str) -> None:
    _write_bytes(parts, value.encode(errors="replace"))


def _write_list(write: Any) -> Any:
    def write_all(parts: list[bytes], values: tuple[Any, ...]) -> None:
        parts.append(_LENGTH.pack(len(values)))
        for value in values:
            write(parts, value)

    return write_all


_WRITERS: dict[str, Any] = {
    "int": _write_integer,
    "str": _write_text,
    "bytes": _write_bytes,
    "tuple[int, ...]": _write_list(_write_integer),
    "tuple[str, ...]": _write_list(_write_text),
    "tuple[bytes, ...]": _write_list(_write_bytes),
}
