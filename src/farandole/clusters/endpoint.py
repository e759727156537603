# The endpoint of the hub in rank 0: where it listens, and the job's secret.
# Pure, except that it checks whether the writer still runs.
"""Small JSON with a strict layout, because others may have written to the file or store."""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import asdict, dataclass, field, fields

from farandole.clusters.ancestors import kernel, look

MAX_BYTES = 16384  # bytes
DAY = 86400.0


@dataclass(frozen=True)
class Owner:
    """The process that wrote the endpoint."""

    host: str
    boot: str  # its kernel and PID namespace: in another one the same pid is another process
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
class Endpoint:
    """How other ranks reach the hub in rank 0."""

    key: str
    addresses: tuple[str, ...]
    proven: bool  # a rank of another host has reached the only address
    hostname: str
    secret: str = field(repr=False)  # hexadecimal; empty when every rank has the secret already
    owner: Owner
    written: float  # wall clock
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    def encode(self) -> bytes:
        """As text."""
        return json.dumps(asdict(self)).encode()

    def stale(self) -> bool:
        """Whether its writer has ended, or, if that is unknown, wrote more than a day ago."""
        gone = self.owner.gone()
        return gone if gone is not None else time.time() - self.written > DAY


def decode(data: bytes) -> Endpoint:
    """Parses an endpoint; ValueError when it is not exactly one."""
    try:
        raw = json.loads(data[: MAX_BYTES + 1])
        owner = raw["owner"]
        if set(raw) != {one.name for one in fields(Endpoint)} or set(owner) != {one.name for one in fields(Owner)}:
            raise ValueError("other fields than expected")
        return Endpoint(
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
        raise ValueError(f"this is not the endpoint of a job: {error}") from None
