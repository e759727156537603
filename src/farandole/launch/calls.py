# Functions for ranks and their results: Python objects <-> pieces that travel over proven channels.
# The only pickle of the launcher; its bytes come from channels that have proven the job's secret, and nowhere else.
"""What `run` and `Executor` send: `pack` and `unpack` whole objects, `cut` and `Assembly` the pieces of one."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle

from farandole.errors import RankFailed
from farandole.observe.ending import blames
from farandole.rendezvous.orders import Call

PIECE_BYTES = 256 << 10
FUNCTION, RESULT, ERROR, END = 0, 1, 2, 3  # END: the worker ends, well unless there are bytes


class RemoteTraceback(Exception):
    """The traceback of another process, shown as the cause of its error."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Failure:
    """An exception of a rank."""

    rank: int
    error: BaseException
    blames: int | None


def pack(value: Any) -> bytes:
    """An object as bytes; what cannot be pickled is a TypeError or whatever pickle raises."""
    return bytes(cloudpickle.dumps(value))


def unpack(data: bytes) -> Any:
    """The object behind the bytes."""
    return cloudpickle.loads(data)


def pack_error(error: BaseException) -> bytes:
    """An exception with its traceback; one that cannot be pickled, or would end its reader, becomes a text."""
    # The frame of our own loop is of no interest.
    shown = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ is not None else None)
    text = "".join(traceback.format_exception(shown))
    try:
        data = b"" if isinstance(error, SystemExit) else pack(error)
        if data:
            unpack(data)  # some can be pickled and not read again
    except Exception:
        data = b""
    return pack((data, f"{type(error).__name__}: {error}", text, blames(error)))


def unpack_error(rank: int, data: bytes) -> Failure:
    """The other way."""
    pickled, summary, text, blamed = unpack(data)
    try:
        error = unpack(pickled) if pickled else None
    except Exception:
        error = None
    if not isinstance(error, BaseException):
        error = RankFailed(f"rank {rank}: {summary}", rank=rank)
    error.__cause__ = RemoteTraceback(f"rank {rank}: {text}")
    return Failure(rank, error, blamed)


def cut(rank: int, call: int, kind: int, data: bytes) -> Iterator[Call]:
    """The pieces of one object."""
    for start in range(0, max(1, len(data)), PIECE_BYTES):
        last = start + PIECE_BYTES >= len(data)
        yield Call(rank, call, kind, int(last), data[start : start + PIECE_BYTES])


class Assembly:
    """Puts pieces together again."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, int], bytearray] = {}

    def add(self, piece: Call) -> bytes | None:
        """The whole, when this was its last piece."""
        key = (piece.rank, piece.call)
        self._begun.setdefault(key, bytearray()).extend(piece.data)
        return bytes(self._begun.pop(key)) if piece.last else None
