# The key-value store: only processes with the key can use it.
# Touches sockets of this host.
"""Real connections. Messages of processes without the key are ignored, and their connections are closed."""

from __future__ import annotations

import json
import socket
import struct
import threading

import pytest

from farandole.rendezvous.key_value import KeyValueClient, KeyValueServer
from farandole.rendezvous.service import MAX_BYTES, NONCE_BYTES, REQUEST, RESPONSE, _Connection, _exactly


def test_a_client_waits_for_a_value() -> None:
    with KeyValueServer(b"key") as board:
        client = KeyValueClient([("127.0.0.1", board.port)], b"key")
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(client.wait("place", 20)))
        thread.start()
        client.put("place", ["host", 1])
        thread.join()
        assert found == [["host", 1]]
        with pytest.raises(TimeoutError, match="no process set 'other'"):
            client.wait("other", 0.05)
        with pytest.raises(ValueError, match="above the limit of 65536 bytes"):
            client.put("large", "x" * (1 << 17))


def test_a_client_without_the_key_gets_no_answer() -> None:
    with KeyValueServer(b"key") as board:
        with pytest.raises(ConnectionError):
            KeyValueClient([("127.0.0.1", board.port)], b"another").put("a", 1)
        with pytest.raises(TimeoutError):
            KeyValueClient([("127.0.0.1", board.port)], b"key").wait("a", 0.05)
        with socket.create_connection(("127.0.0.1", board.port)) as noise:
            noise.sendall(b"\xff" * 100)  # a length that nobody reads
            assert len(_exactly(noise, NONCE_BYTES)) == NONCE_BYTES
            with pytest.raises(ConnectionError):
                _exactly(noise, 1)


def test_a_connection_that_sends_too_slowly_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit is for the whole proof: a received byte does not restart it."""
    monkeypatch.setattr("farandole.rendezvous.service.CONNECT_S", 0.3)
    with KeyValueServer(b"key") as board, socket.create_connection(("127.0.0.1", board.port)) as unauthenticated:
        _exactly(unauthenticated, NONCE_BYTES)
        unauthenticated.sendall(bytes(NONCE_BYTES))
        unauthenticated.settimeout(0.05)
        unauthenticated.sendall(struct.pack(">I", 1 << 16))  # so much would take an hour
        with pytest.raises(OSError, match=r"closed|reset|Broken"):
            for _ in range(200):
                try:
                    unauthenticated.sendall(b"\0")
                    _exactly(unauthenticated, 1)
                except TimeoutError:
                    continue


def test_a_message_cannot_be_replayed() -> None:
    with KeyValueServer(b"key") as board, socket.create_connection(("127.0.0.1", board.port)) as sock:
        own_nonce = bytes(NONCE_BYTES)
        sock.sendall(own_nonce)
        line = _Connection(sock, b"key", _exactly(sock, NONCE_BYTES) + own_nonce, MAX_BYTES)
        question = json.dumps({"put": "a", "value": 1}).encode()
        line.send(REQUEST, question)
        assert json.loads(line.receive(RESPONSE)) == {"ok": True}
        line._counts[REQUEST] = 0  # the same bytes once more
        line.send(REQUEST, question)
        with pytest.raises(ConnectionError):
            line.receive(RESPONSE)


def test_closing_ends_every_wait() -> None:
    board = KeyValueServer(b"key")
    client = KeyValueClient([("127.0.0.1", 1), ("127.0.0.1", board.port)], b"key")  # the first place answers nobody
    client.put("here", True)
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            client.wait("never", 60)
        except (OSError, TimeoutError) as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    board.close()
    thread.join(20)
    assert len(failed) == 1
