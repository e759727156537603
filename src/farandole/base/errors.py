# The errors that users catch, and the translation of the core's codes into exceptions.
# Touches nothing.
"""Errors have their data as attributes; Horovod's names are kept."""

from __future__ import annotations

from collections.abc import Callable


class HorovodInternalError(RuntimeError):
    """An operation failed. Elastic loops catch this, restore the last commit and continue."""


class PeerLost(HorovodInternalError):
    """A rank died or cannot be reached; every pending operation of this generation ended with it."""

    def __init__(self, message: str, *, rank: int = -1, phase: str = "", generation: int = 0, name: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase
        self.generation = generation
        self.name = name


class Revoked(HorovodInternalError):
    """The generation was ended for another reason than a lost rank; `rank` requested it, or -1."""

    def __init__(self, message: str, *, rank: int = -1, phase: str = "", generation: int = 0) -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase
        self.generation = generation


class ShutDown(HorovodInternalError):
    """This or another rank has left while the operation was pending."""

    def __init__(self, message: str, *, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class Mismatch(HorovodInternalError):
    """Ranks requested different things (dtype, shape, op ...). All ranks get this error, and the job can continue."""

    def __init__(self, message: str, *, name: str = "", rank: int = -1) -> None:
        super().__init__(message)
        self.name = name
        self.rank = rank


class NoRows(Mismatch, ValueError):
    """A tensor without dimensions was given to an operation on rows; Horovod raises HorovodInternalError for it."""


def no_rows(operation: str) -> NoRows:
    """The error with Horovod's text; `operation` is its name in lower case."""
    return NoRows(
        f"Process-set rank zero tried to {operation} a rank-zero tensor. "
        f"{operation} needs at least one dimension; reshape the scalar to (1,)"
    )


class FarandoleTimeout(TimeoutError):
    """A deadline passed. After a timed-out wait the operation is still pending and can be waited for again."""

    def __init__(self, message: str, *, seconds: float | None = None, rank: int = -1) -> None:
        super().__init__(message)
        self.seconds = seconds
        self.rank = rank


class RankFailed(RuntimeError):
    """A rank of `run` or of an executor ended, or raised something that cannot be sent; `code` is its exit code."""

    def __init__(self, message: str, *, rank: int = -1, code: int = 0) -> None:
        super().__init__(message)
        self.rank = rank
        self.code = code


# How Horovod's messages begin when the generation has ended, and when there was none. Programs look for these texts.
# farandole_words.h has them as well.
OVER = "Horovod has been shut down"
NOT_INITIALIZED = (
    "Horovod has not been initialized; use hvd.init(). It joins the job, and has to come before this call."
)


class NotInitialized(ValueError, RuntimeError):
    """init() has not been called, or shutdown() has. It is a RuntimeError too, as operations of Horovod raise one."""

    def __init__(self, message: str = NOT_INITIALIZED) -> None:
        super().__init__(message)


class LibraryMissing(ImportError):
    """The native library is absent or does not belong to this package."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts were added or removed; `skip_sync`: the state need not be synchronised again."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync


class Removed(SystemExit):
    """An elastic job has no slot for this process any more. If it is not caught, the process ends with exit code 0."""

    def __init__(self, message: str = "") -> None:
        super().__init__(0)
        self.message = message


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """What HorovodVersionMismatchError says."""
    return f"{name} {installed_version} is installed, but {version} was expected"


class HorovodVersionMismatchError(ImportError):
    """The installed version of a framework is not the one that the package was built for."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


# The codes of core/base/error.h.
OK = 0
IN_PROGRESS = 1
INVALID_ARGUMENT = 2
PRECONDITION = 3
ABORTED = 4
SHUT_DOWN = 5
PEER_LOST = 6
REVOKED = 7
TIMED_OUT = 8
NO_MEMORY = 9
INTERNAL = 10


def cause_of(rank: int) -> str:
    """Why a rank ended, as a sentence, or "". In the ranks of a job it asks what tracebacks.py has set."""
    return causes[0](rank) if causes else ""


causes: list[Callable[[int], str]] = []


def translate(
    code: int, message: str, *, rank: int = -1, phase: str = "", generation: int = 0, name: str = ""
) -> Exception:
    """The exception for a code of the core other than OK and IN_PROGRESS."""
    message = message or f"the engine ended the operation with code {code} and no message"
    if code in (SHUT_DOWN, PEER_LOST) and rank >= 0 and (cause := cause_of(rank)) and cause not in message:
        message = f"{cause}; {message}"
    if code in (SHUT_DOWN, PEER_LOST, REVOKED) and not message.startswith(OVER):
        message = f"{OVER}: {message}"
    if code == INVALID_ARGUMENT:
        return ValueError(message)
    if code == PRECONDITION:
        return Mismatch(message, name=name, rank=rank)
    if code == SHUT_DOWN:
        return ShutDown(message, rank=rank)
    if code == PEER_LOST:
        return PeerLost(message, rank=rank, phase=phase, generation=generation, name=name)
    if code == REVOKED:
        return Revoked(message, rank=rank, phase=phase, generation=generation)
    if code == TIMED_OUT:
        return FarandoleTimeout(message, rank=rank)
    if code == NO_MEMORY:
        return MemoryError(message)
    return HorovodInternalError(message)
