# Functions for ranks and their results: turns Python objects into pieces for authenticated channels, and back.
# The only file of the launcher that uses pickle. It reads only bytes from channels that have proven the job's secret.
"""`run` and `Executor` use it: `pack` and `unpack` for whole objects, `cut` and `Assembly` for the pieces of one."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle

from farandole.base.ending import blames
from farandole.base.errors import RankFailed
from farandole.launch import blame
from farandole.rendezvous.agent_messages import END, Call

PIECE_BYTES = 256 << 10
FUNCTION, RESULT, ERROR = 0, 1, 2  # and END: the worker ends with code 0, or with code 1 if the piece has bytes
assert END not in (FUNCTION, RESULT, ERROR)


class RemoteTraceback(Exception):
    """The traceback of another process. It is the cause of the error from that process."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank = rank

    def __str__(self) -> str:
        return f"\nrank {self.rank}: {self.args[1]}"


@dataclass(frozen=True)
class Failure:
    """An exception of a rank. `blames`: the rank that it is about, if it is about another rank."""

    rank: int
    error: BaseException
    blames: int | None


def pack(value: Any) -> bytes:
    """An object as bytes. TypeError, or another error of pickle, when it cannot be pickled."""
    return bytes(cloudpickle.dumps(value))


def unpack(data: bytes) -> Any:
    """The object from the bytes of `pack`."""
    return cloudpickle.loads(data)


def pack_error(error: BaseException) -> bytes:
    """An exception with its traceback. It becomes text if nothing of it can be pickled or if it is SystemExit."""
    # The first frame is our own loop, which does not help the user.
    shown = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ is not None else None)
    text = "".join(traceback.format_exception(shown))
    data = b"" if isinstance(error, SystemExit) else _packed(error) or _packed(_Parts.of(error))
    return pack((data, f"{type(error).__name__}: {error}", text, blames(error)))


@dataclass(frozen=True)
class _Parts:
    """An exception whose class cannot be called with `args` alone, as pickle would call it."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> _Parts:
        return cls(type(error), error.args, vars(error))

    def together(self) -> BaseException:
        error = self.kind.__new__(self.kind, *self.args)
        vars(error).update(self.attributes)
        return error


def _packed(value: BaseException | _Parts) -> bytes:
    """The bytes from which it can be made again, or none."""
    try:
        data = pack(value)
        unpack(data)  # some exceptions can be pickled but not unpickled
    except Exception:
        return b""
    return data


def unpack_error(rank: int, data: bytes) -> Failure:
    """The exception of a rank, from the bytes of `pack_error`."""
    pickled, summary, text, blamed = unpack(data)
    try:
        error = unpack(pickled) if pickled else None
        error = error.together() if isinstance(error, _Parts) else error
    except Exception:
        error = None
    if not isinstance(error, BaseException):
        error = RankFailed(f"rank {rank}: {summary}", rank=rank)
    error.__cause__ = RemoteTraceback(rank, text)
    return Failure(rank, error, blamed)


def job_failed(error: BaseException) -> RankFailed | None:
    """The error that `run` raises for an error of a rank, with Horovod's text; None: it is not an error of a rank."""
    if isinstance(error, RankFailed):
        return RankFailed(f"{blame.EXITED} {error}", rank=error.rank, code=error.code)
    if isinstance(error.__cause__, RemoteTraceback):
        rank = error.__cause__.rank
        return RankFailed(f"{blame.EXITED} rank {rank}: {type(error).__name__}: {error}", rank=rank, code=1)
    return None


def cut(rank: int, call: int, kind: int, data: bytes) -> Iterator[Call]:
    """Splits one object into pieces."""
    for start in range(0, max(1, len(data)), PIECE_BYTES):
        last = start + PIECE_BYTES >= len(data)
        yield Call(rank, call, kind, int(last), data[start : start + PIECE_BYTES])


class Assembly:
    """Joins the pieces of objects."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, int], bytearray] = {}

    def add(self, piece: Call) -> bytes | None:
        """The whole object, if this was its last piece."""
        key = (piece.rank, piece.call)
        self._begun.setdefault(key, bytearray()).extend(piece.data)
        return bytes(self._begun.pop(key)) if piece.last else None
