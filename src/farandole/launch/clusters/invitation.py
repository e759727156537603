# The invitation of rank 0 to the others: where its hub listens, and the job's secret.
# Pure but for the question whether its writer still lives.
"""Small JSON with a strict layout, since it is read from a file or a store that others may have written to."""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import asdict, dataclass, field, fields

from farandole.launch.clusters.ancestors import kernel, look

LARGEST = 16384  # bytes
DAY = 86400.0


@dataclass(frozen=True)
class Owner:
    """The process that wrote it."""

    host: str
    boot: str  # of its kernel, and the number of its PID namespace: elsewhere the number means somebody else
    pid: int
    started: int

    @classmethod
    def me(cls) -> Owner:
        """This process."""
        seen = look(os.getpid())
        return cls(os.uname().nodename, kernel(), os.getpid(), seen[0].started if seen else 0)

    def gone(self) -> bool | None:
        """Whether it has ended; None when this host cannot know."""
        if self.boot != kernel():
            return None
        seen = look(self.pid)
        return seen is None or seen[0].started != self.started


@dataclass(frozen=True)
class Invitation:
    """What rank 0 tells the others."""

    key: str
    addresses: tuple[str, ...]
    proven: bool  # somebody from another host has come to the only address
    hostname: str
    secret: str = field(repr=False)  # hexadecimal; empty when every rank has it from elsewhere
    owner: Owner
    written: float  # wall clock
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    def encode(self) -> bytes:
        """As text."""
        return json.dumps(asdict(self)).encode()

    def stale(self) -> bool:
        """Whether its writer is gone for sure, or has been silent for a day."""
        gone = self.owner.gone()
        return gone if gone is not None else time.time() - self.written > DAY


def decode(data: bytes) -> Invitation:
    """ValueError when it is not exactly an invitation."""
    try:
        raw = json.loads(data[: LARGEST + 1])
        owner = raw["owner"]
        if set(raw) != {one.name for one in fields(Invitation)} or set(owner) != {one.name for one in fields(Owner)}:
            raise ValueError("other fields than expected")
        return Invitation(
            key=str(raw["key"]),
            addresses=tuple(str(address) for address in raw["addresses"]),
            proven=bool(raw["proven"]),
            hostname=str(raw["hostname"]),
            secret=str(raw["secret"]),
            owner=Owner(str(owner["host"]), str(owner["boot"]), int(owner["pid"]), int(owner["started"])),
            written=float(raw["written"]),
            nonce=str(raw["nonce"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no invitation to a job: {error}") from None
