# A notice board: words by name, put up by one process and waited for by others; for jobs that know each other's key.
# Touches TCP sockets, and a thread for each visitor.
"""`Board` serves, `Visitor` puts and waits.

The board opens with a nonce; every message after it carries the key's mac over the nonce, its number and its direction,
so that nobody without the key is heard, believed, or repeated. What is said is JSON, and not secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

NONCE_BYTES, MAC_BYTES, MOST_BYTES = 32, 32, 1 << 16
VISITORS = 512  # more than so many at a time are turned away
CONNECT_S = 10.0
ASK, ANSWER = b"ask", b"answer"


class _Line:
    """One connection, once the nonce is known."""

    def __init__(self, sock: socket.socket, key: bytes, nonce: bytes) -> None:
        self._sock, self._key, self._nonce = sock, key, nonce
        self._counts = {ASK: 0, ANSWER: 0}

    def _mac(self, way: bytes, body: bytes) -> bytes:
        self._counts[way] += 1
        return hmac.digest(self._key, self._nonce + way + struct.pack(">Q", self._counts[way]) + body, hashlib.sha256)

    def send(self, way: bytes, words: Any) -> None:
        body = json.dumps(words).encode()
        if len(body) > MOST_BYTES:
            raise ValueError(f"{len(body)} bytes are too much for a notice; {MOST_BYTES} at most")
        self._sock.sendall(struct.pack(">I", len(body)) + self._mac(way, body) + body)

    def receive(self, way: bytes, deadline: float | None = None) -> Any:
        size, mac = struct.unpack(f">I{MAC_BYTES}s", _exactly(self._sock, 4 + MAC_BYTES, deadline))
        if size > MOST_BYTES:
            raise ConnectionError("a message that is too long")
        body = _exactly(self._sock, size, deadline)
        if not hmac.compare_digest(mac, self._mac(way, body)):
            raise ConnectionError("the other side does not have the key")
        return json.loads(body)


def _exactly(sock: socket.socket, count: int, deadline: float | None = None) -> bytes:
    found = b""
    while len(found) < count:
        if deadline is not None:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("the other side is too slow")
            sock.settimeout(left)
        part = sock.recv(count - len(found))
        if not part:
            raise ConnectionError("the other side has hung up")
        found += part
    return found


class Board:
    """Keeps the words; `port` is where visitors come."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._words: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._visitors: set[socket.socket] = set()
        self._door = socket.create_server(("", 0), family=socket.AF_INET, backlog=VISITORS)
        self.port: int = self._door.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="farandole-board", daemon=True)
        self._thread.start()

    def __enter__(self) -> Board:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Sends everybody away."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._door.close()
        for sock in list(self._visitors):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(CONNECT_S)

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._door.accept()
            except OSError:
                return
            if len(self._visitors) >= VISITORS:
                sock.close()
                continue
            self._visitors.add(sock)
            threading.Thread(target=self._serve, args=(sock,), name="farandole-visitor", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), sock:
            nonce = os.urandom(NONCE_BYTES)
            sock.sendall(nonce)
            line = _Line(sock, self._key, nonce)
            asked = line.receive(ASK, time.monotonic() + CONNECT_S)  # for all of it, however slowly it comes
            sock.settimeout(None)  # it has the key
            while not self._closed:
                line.send(ANSWER, self._answer(asked))
                asked = line.receive(ASK)
        self._visitors.discard(sock)

    def _answer(self, asked: dict[str, Any]) -> Any:
        with self._changed:
            if "put" in asked:
                self._words[str(asked["put"])] = asked["words"]
                self._changed.notify_all()
                return {"ok": True}
            name, deadline = str(asked["wait"]), time.monotonic() + float(asked["seconds"])
            while name not in self._words and not self._closed and time.monotonic() < deadline:
                self._changed.wait(max(0.0, deadline - time.monotonic()))
            return {"ok": name in self._words, "words": self._words.get(name)}


class Visitor:
    """Puts words up and waits for them; a connection for each, so that nobody holds one while it thinks."""

    def __init__(self, places: Sequence[tuple[str, int]], key: bytes) -> None:
        self._places = [(host, int(port)) for host, port in places]
        self._key = key

    def put(self, name: str, words: Any) -> None:
        """Puts words up; those that had the name are replaced."""
        self._ask({"put": name, "words": words}, CONNECT_S)

    def wait(self, name: str, seconds: float) -> Any:
        """The words of that name; TimeoutError when nobody has put them up in time."""
        answer = self._ask({"wait": name, "seconds": seconds}, seconds + CONNECT_S)
        if not answer["ok"]:
            raise TimeoutError(f"nobody said {name!r} within {seconds:g} s")
        return answer["words"]

    def _ask(self, words: dict[str, Any], seconds: float) -> Any:
        with self._reached() as sock:
            line = _Line(sock, self._key, _exactly(sock, NONCE_BYTES))
            sock.settimeout(seconds)
            line.send(ASK, words)
            return line.receive(ANSWER)

    def _reached(self) -> socket.socket:
        failure: OSError | None = None
        for place in self._places:
            try:
                return socket.create_connection(place, CONNECT_S)
            except OSError as error:
                failure = error
        raise ConnectionError(f"nobody answers at {self._places}: {failure}")
