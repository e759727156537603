# The handshake: who is accepted, who is refused, and that the refusal does not show its reason.
# Touches socket pairs.
from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from waiting import in_time

from farandole.rendezvous.flow import Flow, Loop
from farandole.rendezvous.handshake import (
    GREETING_BYTES,
    NOBODY,
    PROOF_BYTES,
    WIRE_VERSION,
    Greeting,
    Proven,
    Refused,
    Role,
    VersionMismatch,
    answer,
    call,
)
from farandole.rendezvous.secret import Secret

SECRET = Secret(bytes(range(32)))
OTHER = Secret(bytes(32))
CALLER = Greeting(Role.CALLER, rank=1, target=2, generation=7)
CALLEE = Greeting(Role.CALLEE, rank=2, target=0, generation=7)


class Counting(socket.socket):
    """Counts and keeps the bytes that go through."""

    read = 0
    sent = b""

    def recv(self, *arguments: Any) -> bytes:
        data = super().recv(*arguments)
        self.read += len(data)
        return data

    def send(self, data: Any, *flags: int) -> int:
        count = super().send(data, *flags)
        self.sent += bytes(data[:count])
        return count


@contextmanager
def pair() -> Iterator[tuple[Counting, Counting]]:
    left, right = (Counting(fileno=end.detach()) for end in socket.socketpair())
    left.setblocking(False)
    right.setblocking(False)
    with left, right:
        yield left, right


def run(*flows: tuple[socket.socket, Flow[Proven]], seconds: float = 5.0) -> list[Any]:
    """Runs flows beside each other; the result or the error of each. A flow that fails closes its socket."""
    loop = Loop()
    results: list[Any] = [None] * len(flows)
    left = set(range(len(flows)))
    try:
        for index, (sock, flow) in enumerate(flows):

            def done(
                result: Proven | None, error: Exception | None, index: int = index, sock: socket.socket = sock
            ) -> None:
                results[index] = error if error is not None else result
                left.discard(index)
                if error is not None:
                    sock.close()

            loop.spawn(flow, time.monotonic() + seconds, done)
        while left:
            loop.turn()
    finally:
        loop.close()
    return results


def talk(
    caller: Greeting = CALLER,
    callee: Greeting = CALLEE,
    caller_secret: Secret = SECRET,
    callee_secret: Secret = SECRET,
    admit: Callable[[Greeting], bool] = lambda peer: peer.role is Role.CALLER,
) -> tuple[Any, Any, bytes, bytes]:
    """One talk: both results, and the bytes both sides sent."""
    with pair() as (left, right):
        results = run(
            (left, call(left, caller_secret, caller, Role.CALLEE)), (right, answer(right, callee_secret, callee, admit))
        )
        return results[0], results[1], left.sent, right.sent


def test_both_sides_authenticate_and_derive_the_same_keys() -> None:
    one, two, sent, received = talk()
    assert one.peer == replace(CALLEE, target=1) and two.peer == CALLER
    assert one.send_key == two.receive_key and one.receive_key == two.send_key
    assert len({one.send_key, one.receive_key, SECRET.key}) == 3
    assert len(sent) == GREETING_BYTES + PROOF_BYTES <= 96
    assert len(received) == GREETING_BYTES + PROOF_BYTES + 1
    again, _, _, _ = talk()
    assert again.send_key != one.send_key, "every talk has keys of its own"
    assert one.send_key.hex() not in repr(one) and SECRET.key.hex() not in repr(SECRET)


def test_a_greeting_has_sixty_bytes() -> None:
    assert len(CALLER.encode(SECRET.job(), bytes(32))) == GREETING_BYTES == 60


@pytest.mark.parametrize(
    "wrong",
    [
        {"caller_secret": OTHER},
        {"callee_secret": OTHER},
        {"caller": replace(CALLER, generation=8)},
        {"callee": replace(CALLEE, generation=6)},
        {"caller": replace(CALLER, target=3)},
        {"caller": replace(CALLER, role=Role.WORKER)},
        {"caller": replace(CALLER, role=Role.CALLEE)},
        {"callee": replace(CALLEE, role=Role.HUB)},
        {"admit": lambda peer: False},
    ],
)
@pytest.mark.security
def test_row_29_mismatched_greetings_are_refused(wrong: dict[str, Any]) -> None:
    one, two, _, received = talk(**wrong)
    assert isinstance(one, Refused | EOFError | ConnectionError), one
    assert isinstance(two, Refused | EOFError | ConnectionError), two
    assert len(received) == GREETING_BYTES + PROOF_BYTES, "no word of welcome"


def attack(flight: Callable[[Counting], Flow[Proven]]) -> tuple[Any, bytes, int]:
    """Plays a caller against an honest callee: the callee's result, what it sent, how many bytes it read."""
    with pair() as (left, right):
        results = run(
            (left, flight(left)), (right, answer(right, SECRET, CALLEE, lambda peer: peer.role is Role.CALLER))
        )
        return results[1], right.sent, right.read


def say(first: bytes, then: bytes) -> Callable[[Counting], Flow[Any]]:
    """A caller that sends fixed bytes, whatever the answer."""

    def flight(sock: Counting) -> Flow[Any]:
        from farandole.rendezvous.flow import receive, send

        yield from send(sock, first)
        yield from receive(sock, GREETING_BYTES + PROOF_BYTES)
        yield from send(sock, then)
        yield from receive(sock, 1)

    return flight


@pytest.mark.security
def test_row_29_a_replayed_handshake_is_refused() -> None:
    _, good, sent, _ = talk()
    assert isinstance(good, Proven)
    result, received, read = attack(say(sent[:GREETING_BYTES], sent[GREETING_BYTES:]))
    assert isinstance(result, Refused) and len(received) == GREETING_BYTES + PROOF_BYTES and read <= 96


@pytest.mark.security
def test_row_29_the_bytes_of_the_callee_are_refused_from_a_caller() -> None:
    _, _, _, received = talk()
    result, _, _ = attack(say(received[:GREETING_BYTES], received[GREETING_BYTES : GREETING_BYTES + PROOF_BYTES]))
    assert isinstance(result, Refused)


@pytest.mark.security
def test_row_29_a_reflected_handshake_is_refused() -> None:
    def mirror(sock: Counting) -> Flow[Any]:
        from farandole.rendezvous.flow import receive, send

        greeting = yield from receive(sock, GREETING_BYTES)
        yield from send(sock, greeting + bytes(PROOF_BYTES))
        yield from receive(sock, PROOF_BYTES)

    with pair() as (left, right):
        result, _ = run((left, call(left, SECRET, CALLER, Role.CALLEE)), (right, mirror(right)))
        assert isinstance(result, Refused)
        assert len(left.sent) == GREETING_BYTES, "a caller proves nothing to somebody who has not proven himself"


@pytest.mark.security
def test_row_29_every_refusal_looks_the_same() -> None:
    """Whatever an unauthenticated process sends as its greeting, it gets 92 bytes and the end of the connection after
    its
    proof.
    """
    _, _, sent, _ = talk()
    greetings = [
        sent[:GREETING_BYTES],
        bytes(GREETING_BYTES),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".ljust(GREETING_BYTES, b"x"),
        replace(CALLER, generation=9).encode(SECRET.job(), bytes(32)),
        replace(CALLER, version=99).encode(OTHER.job(), bytes(32)),
    ]
    seen = set()
    for greeting in greetings:
        result, received, read = attack(say(greeting, bytes(PROOF_BYTES)))
        seen.add((type(result), str(result), len(received), read))
    assert seen == {
        (
            Refused,
            "the other side did not prove that it belongs to this job",
            GREETING_BYTES + PROOF_BYTES,
            GREETING_BYTES + PROOF_BYTES,
        )
    }


@pytest.mark.parametrize("count", [0, 1, 4, 59, 60, 61, 91])
@pytest.mark.security
def test_row_30_a_handshake_that_stops_early_ends(count: int) -> None:
    _, _, sent, _ = talk()
    with pair() as (left, right):
        left.sendall(sent[:count])
        left.shutdown(socket.SHUT_WR)
        (result,) = run((right, answer(right, SECRET, CALLEE, lambda peer: True)))
        assert isinstance(result, EOFError) and right.read == count


@pytest.mark.security
def test_row_28_at_most_96_bytes_of_an_unauthenticated_connection_are_read() -> None:
    with pair() as (left, right):
        left.send(bytes(64 << 10))
        (result,) = run((right, answer(right, SECRET, CALLEE, lambda peer: True)))
        assert isinstance(result, Refused) and right.read <= 96


@pytest.mark.security
def test_row_28_an_unauthenticated_silent_connection_is_not_waited_for() -> None:
    with pair() as (left, right):
        left.send(b"F")
        began = time.monotonic()
        (result,) = run((right, answer(right, SECRET, CALLEE, lambda peer: True)), seconds=0.1)
        assert isinstance(result, TimeoutError)
        in_time(time.monotonic() - began, 2.0, "a handshake that may take 0.1 s")


@pytest.mark.security
def test_row_31_another_version_is_named_on_both_sides() -> None:
    one, two, _, _ = talk(caller=replace(CALLER, version=WIRE_VERSION ^ 1))
    # The caller speaks the newer version; the greeting's layout is for ever, so both can still read it.
    assert isinstance(two, VersionMismatch) and (two.ours, two.theirs) == (WIRE_VERSION, WIRE_VERSION ^ 1)
    assert isinstance(one, VersionMismatch) and (one.ours, one.theirs) == (WIRE_VERSION ^ 1, WIRE_VERSION)
    for error in (one, two):
        for part in ("protocol version", str(WIRE_VERSION), str(WIRE_VERSION ^ 1), "install the same version"):
            assert part in str(error)


def test_the_other_byte_order_is_refused() -> None:
    one, two, _, _ = talk(caller=replace(CALLER, order=3))
    assert "byte order" in str(one) and "byte order" in str(two)


def test_the_hub_has_no_rank() -> None:
    one, two, _, _ = talk(Greeting(Role.CALLER, 5, NOBODY), Greeting(Role.CALLEE, NOBODY, 0))
    assert isinstance(one, Proven) and isinstance(two, Proven)
