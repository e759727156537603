# The endpoint of the hub in rank 0: where it listens, and the job's secret.
# Touches /proc through ancestors.py, to check whether the process that wrote it still runs.
"""An endpoint is JSON with a strict layout, because another program may have written to the file or store."""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import asdict, dataclass, field, fields

from farandole.clusters.ancestors import pid_namespace, read_process

MAX_BYTES = 16384  # bytes
DAY = 86400.0  # seconds


@dataclass(frozen=True)
class Owner:
    """The process that wrote the endpoint."""

    host: str
    # The boot of its kernel, and its PID namespace: in another one the same pid is another process.
    pid_namespace: str
    pid: int
    started: int  # clock ticks since the machine started

    @classmethod
    def me(cls) -> Owner:
        """This process."""
        found = read_process(os.getpid())
        return cls(os.uname().nodename, pid_namespace(), os.getpid(), found[0].started if found else 0)

    def has_ended(self) -> bool | None:
        """Whether this process has ended; None if it runs where this process cannot see it."""
        if self.pid_namespace != pid_namespace():
            return None
        found = read_process(self.pid)
        return found is None or found[0].started != self.started


@dataclass(frozen=True)
class Endpoint:
    """How other ranks reach the hub in rank 0."""

    key: str  # identifies the job, so that ranks do not join another one
    addresses: tuple[str, ...]
    proven: bool  # whether a rank of another host has reached the address; then `addresses` has only that one
    hostname: str
    secret: str = field(repr=False)  # hexadecimal; empty when every rank has the secret already
    owner: Owner
    written: float  # wall clock
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    def encode(self) -> bytes:
        """The endpoint as JSON in bytes."""
        return json.dumps(asdict(self)).encode()

    def stale(self) -> bool:
        """Whether its writer has ended, or, if that is unknown, wrote more than a day ago."""
        ended = self.owner.has_ended()
        return ended if ended is not None else time.time() - self.written > DAY


def decode(data: bytes) -> Endpoint:
    """Parses an endpoint. Raises ValueError if the data has missing or additional fields, or wrong types."""
    try:
        raw = json.loads(data[: MAX_BYTES + 1])
        owner = raw["owner"]
        if set(raw) != {one.name for one in fields(Endpoint)} or set(owner) != {one.name for one in fields(Owner)}:
            raise ValueError("it has missing or additional fields")
        return Endpoint(
            key=str(raw["key"]),
            addresses=tuple(str(address) for address in raw["addresses"]),
            proven=bool(raw["proven"]),
            hostname=str(raw["hostname"]),
            secret=str(raw["secret"]),
            owner=Owner(str(owner["host"]), str(owner["pid_namespace"]), int(owner["pid"]), int(owner["started"])),
            written=float(raw["written"]),
            nonce=str(raw["nonce"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is not the endpoint of a job: {error}") from None
