# The notice board: words between processes that have the key, and nobody else.
# Touches sockets of this host.
"""Real connections; strangers are not heard, and cost nothing that lasts."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from farandole.rendezvous.board import ANSWER, ASK, NONCE_BYTES, Board, Visitor, _exactly, _Line


def test_words_are_waited_for() -> None:
    with Board(b"key") as board:
        visitor = Visitor([("127.0.0.1", board.port)], b"key")
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(visitor.wait("place", 20)))
        thread.start()
        visitor.put("place", ["host", 1])
        thread.join()
        assert found == [["host", 1]]
        with pytest.raises(TimeoutError, match="nobody said 'other'"):
            visitor.wait("other", 0.05)
        with pytest.raises(ValueError, match="too much for a notice"):
            visitor.put("large", "x" * (1 << 17))


def test_nobody_without_the_key_is_heard() -> None:
    with Board(b"key") as board:
        with pytest.raises(ConnectionError):
            Visitor([("127.0.0.1", board.port)], b"another").put("a", 1)
        with pytest.raises(TimeoutError):
            Visitor([("127.0.0.1", board.port)], b"key").wait("a", 0.05)
        with socket.create_connection(("127.0.0.1", board.port)) as noise:
            noise.sendall(b"\xff" * 100)  # a length that nobody reads
            assert len(_exactly(noise, NONCE_BYTES)) == NONCE_BYTES
            with pytest.raises(ConnectionError):
                _exactly(noise, 1)


def test_who_drips_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for a proof is for all of it: each byte that comes does not begin it anew."""
    monkeypatch.setattr("farandole.rendezvous.board.CONNECT_S", 0.3)
    with Board(b"key") as board, socket.create_connection(("127.0.0.1", board.port)) as stranger:
        _exactly(stranger, NONCE_BYTES)
        stranger.settimeout(0.05)
        stranger.sendall(struct.pack(">I", 1 << 16))  # so much would take an hour
        with pytest.raises(OSError, match=r"hung up|reset|Broken"):
            for _ in range(200):
                try:
                    stranger.sendall(b"\0")
                    _exactly(stranger, 1)
                except TimeoutError:
                    continue


def test_what_was_said_cannot_be_said_again() -> None:
    with Board(b"key") as board, socket.create_connection(("127.0.0.1", board.port)) as sock:
        line = _Line(sock, b"key", _exactly(sock, NONCE_BYTES))
        line.send(ASK, {"put": "a", "words": 1})
        assert line.receive(ANSWER) == {"ok": True}
        line._counts[ASK] = 0  # the same bytes once more
        line.send(ASK, {"put": "a", "words": 1})
        with pytest.raises(ConnectionError):
            line.receive(ANSWER)


def test_closing_wakes_whoever_waits() -> None:
    board = Board(b"key")
    visitor = Visitor([("127.0.0.1", 1), ("127.0.0.1", board.port)], b"key")  # the first place answers nobody
    visitor.put("here", True)
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            visitor.wait("never", 60)
        except (OSError, TimeoutError) as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    board.close()
    thread.join(20)
    assert len(failed) == 1
