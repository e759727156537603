# The handshake: two processes prove to each other that they know the job's secret, before anything else is read.
# Touches the socket it is given.
"""A mutual challenge of fixed size, the same over unix sockets and TCP.

The caller sends 60 bytes (who it is, a nonce). The answerer sends 60 bytes and its proof (32). The caller sends its
proof (32), and the answerer one byte: welcome. A proof is an HMAC over both greetings and the role of the prover, so
recorded or reflected bytes are never valid. Neither side reads more than 92 bytes from a process that has not proven
itself. If anything is wrong the answerer decides at the end and only closes the connection, so an attacker learns
nothing from the time or the form of a refusal. The layout of the greeting never changes. Versions are compared after
the proofs, so both sides can name both versions.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from farandole.rendezvous import agent_messages, messages
from farandole.rendezvous.flow import Flow, Stream, receive, send
from farandole.rendezvous.secret import Secret

# Two bytes of a hash of all messages between processes, so that no number must be raised by hand.
WIRE_VERSION = int.from_bytes(
    hashlib.sha256(f"{messages.LAYOUT}\n{agent_messages.LAYOUT}".encode()).digest()[:2], "big"
)
HANDSHAKE_SECONDS = 2.0  # a connection has this long to prove itself
MAGIC = b"FRDL"
NONCE_BYTES = 32
PROOF_BYTES = 32
_LAYOUT = struct.Struct("!4sHBB8sIII32s")
GREETING_BYTES = _LAYOUT.size
NOBODY = 0xFFFFFFFF  # the rank of the hub
_ORDER = 1 if sys.byteorder == "little" else 2
_WELCOME = b"\x01"


class Role(IntEnum):
    """The role of one side in a handshake. The two sides always differ."""

    WORKER = 1
    HUB = 2
    CALLER = 3  # the rank that opens a link
    CALLEE = 4
    LAUNCHER = 5  # towards its agents
    AGENT = 6


class Refused(Exception):
    """The other side did not prove itself, or did not accept our proof."""


class VersionMismatch(Exception):
    """The other side belongs to this job but has another version of the protocol; both sides get this."""

    def __init__(self, own: int, theirs: int) -> None:
        super().__init__(
            f"protocol version {own} here, {theirs} on the other side: install the same version of farandole on "
            f"every host"
        )
        self.ours = own
        self.theirs = theirs


@dataclass(frozen=True)
class Greeting:
    """Who one side is and whom it wants to reach."""

    role: Role
    rank: int
    target: int
    generation: int = 0
    version: int = WIRE_VERSION
    order: int = _ORDER

    def encode(self, job: bytes, nonce: bytes) -> bytes:
        """The bytes on the wire."""
        return _LAYOUT.pack(
            MAGIC, self.version, self.role, self.order, job, self.generation, self.rank, self.target, nonce
        )


@dataclass(frozen=True)
class Proven:
    """The result: who the peer is, and the keys for what follows."""

    peer: Greeting
    send_key: bytes = field(repr=False)
    receive_key: bytes = field(repr=False)


def call(sock: Stream, secret: Secret, me: Greeting, answerer: Role) -> Flow[Proven]:
    """The side that opened the connection."""
    nonce = os.urandom(NONCE_BYTES)
    greeting = me.encode(secret.job(), nonce)
    yield from send(sock, greeting)
    answer = yield from receive(sock, GREETING_BYTES + PROOF_BYTES)
    theirs, proof = answer[:GREETING_BYTES], answer[GREETING_BYTES:]
    transcript = greeting + theirs
    proven = hmac.compare_digest(proof, secret.mac(b"farandole answerer", transcript))
    peer = _decode(theirs, secret, nonce)
    wanted = Greeting(answerer, me.target, me.rank, me.generation)
    if not proven or peer is None or not _same_identity(peer, wanted):
        raise Refused("the other side did not prove that it belongs to this job")
    yield from send(sock, secret.mac(b"farandole caller", transcript))
    if (yield from receive(sock, 1)) != _WELCOME:
        raise Refused("the other side refused the connection")
    return _finish(secret, transcript, me, peer, caller=True)


def answer(sock: Stream, secret: Secret, me: Greeting, admit: Callable[[Greeting], bool]) -> Flow[Proven]:
    """The side that accepted the connection; `admit` decides about a proven peer."""
    theirs = yield from receive(sock, GREETING_BYTES)
    nonce = os.urandom(NONCE_BYTES)
    peer = _decode(theirs, secret, nonce)
    own_greeting = Greeting(me.role, me.rank, peer.rank if peer else 0, me.generation, me.version, me.order)
    greeting = own_greeting.encode(secret.job(), nonce)
    transcript = theirs + greeting
    yield from send(sock, greeting + secret.mac(b"farandole answerer", transcript))
    proof = yield from receive(sock, PROOF_BYTES)
    proven = hmac.compare_digest(proof, secret.mac(b"farandole caller", transcript))
    if not proven or peer is None or peer.target != me.rank or peer.generation != me.generation or not admit(peer):
        raise Refused("the other side did not prove that it belongs to this job")
    yield from send(sock, _WELCOME)
    return _finish(secret, transcript, own_greeting, peer, caller=False)


def _finish(secret: Secret, transcript: bytes, me: Greeting, peer: Greeting, caller: bool) -> Proven:
    if me.version != peer.version:
        raise VersionMismatch(me.version, peer.version)
    if me.order != peer.order:
        raise Refused("the other side has another byte order; all hosts of a job must have the same")
    from_caller = secret.derive(transcript, b"farandole caller to answerer")
    from_answerer = secret.derive(transcript, b"farandole answerer to caller")
    return Proven(peer, from_caller, from_answerer) if caller else Proven(peer, from_answerer, from_caller)


def _decode(data: bytes, secret: Secret, own_nonce: bytes) -> Greeting | None:
    magic, version, role, order, job, generation, rank, target, nonce = _LAYOUT.unpack(data)
    known = role in Role.__members__.values()
    if magic != MAGIC or not known or not hmac.compare_digest(job, secret.job()) or nonce == own_nonce:
        return None
    return Greeting(Role(role), rank, target, generation, version, order)


def _same_identity(peer: Greeting, wanted: Greeting) -> bool:
    return (peer.role, peer.rank, peer.target, peer.generation) == (
        wanted.role,
        wanted.rank,
        wanted.target,
        wanted.generation,
    )
