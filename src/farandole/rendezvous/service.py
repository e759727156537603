# A service for those who have a key: a question, an answer, and again, on a connection of its own.
# Touches TCP sockets, and a thread for each connection.
"""`Service` answers, `ask` asks.

Both sides open with a nonce; every message after it carries the key's mac over both, its number and its direction, so
that a message without the key, or one that is repeated, is refused. The messages are not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

NONCE_BYTES, MAC_BYTES, MAX_BYTES = 32, 32, 1 << 16
MAX_CLIENTS = 512  # more than so many at a time are turned away
CONNECT_S = 10.0
REQUEST, RESPONSE = b"ask", b"answer"


class _Connection:
    """One connection after both nonces are known: the service's, then the client's."""

    def __init__(self, sock: socket.socket, key: bytes, nonce: bytes, most: int) -> None:
        self._sock, self._key, self._nonce, self._most = sock, key, nonce, most
        self._counts = {REQUEST: 0, RESPONSE: 0}

    def _mac(self, way: bytes, body: bytes) -> bytes:
        self._counts[way] += 1
        return hmac.digest(self._key, self._nonce + way + struct.pack(">Q", self._counts[way]) + body, hashlib.sha256)

    def send(self, way: bytes, body: bytes) -> None:
        if len(body) > self._most:
            raise ValueError(f"a message of {len(body)} bytes is above the limit of {self._most} bytes")
        self._sock.sendall(struct.pack(">I", len(body)) + self._mac(way, body) + body)

    def receive(self, way: bytes, deadline: float | None = None) -> bytes:
        size, mac = struct.unpack(f">I{MAC_BYTES}s", _exactly(self._sock, 4 + MAC_BYTES, deadline))
        if size > self._most:
            raise ConnectionError("a message that is too long")
        body = _exactly(self._sock, size, deadline)
        if not hmac.compare_digest(mac, self._mac(way, body)):
            raise ConnectionError("the other side does not have the key")
        return body


def _exactly(sock: socket.socket, count: int, deadline: float | None = None) -> bytes:
    found = b""
    while len(found) < count:
        if deadline is not None:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("the other side is too slow")
            sock.settimeout(left)
        part = sock.recv(count - len(found))
        if not part:
            raise ConnectionError("the other side closed the connection")
        found += part
    return found


class Service:
    """Sends `answer(question, host of the client)` to each client that has the key; clients connect to `port`.

    If `answer` raises OSError, ValueError, KeyError or TypeError, the connection is closed.
    """

    def __init__(self, key: bytes, answer: Callable[[bytes, str], bytes], name: str, most: int = MAX_BYTES) -> None:
        self._key, self._answer, self._most = key, answer, most
        self._name = name
        self._closed = False
        self._connections: set[socket.socket] = set()
        self._listener = socket.create_server(("", 0), family=socket.AF_INET, backlog=MAX_CLIENTS)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name=f"farandole-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Closes all connections."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        for sock in list(self._connections):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(CONNECT_S)

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, address = self._listener.accept()
            except OSError:
                return
            if len(self._connections) >= MAX_CLIENTS:
                sock.close()
                continue
            self._connections.add(sock)
            threading.Thread(
                target=self._serve, args=(sock, str(address[0])), name="farandole-client", daemon=True
            ).start()

    def _serve(self, sock: socket.socket, host: str) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), sock:
            nonce, deadline = os.urandom(NONCE_BYTES), time.monotonic() + CONNECT_S
            sock.sendall(nonce)
            # The deadline is for all of it, however slowly it comes.
            line = _Connection(sock, self._key, nonce + _exactly(sock, NONCE_BYTES, deadline), self._most)
            asked = line.receive(REQUEST, deadline)
            sock.settimeout(None)  # it has the key
            while not self._closed:
                line.send(RESPONSE, self._answer(asked, host))
                asked = line.receive(REQUEST)
        self._connections.discard(sock)


def ask(
    addresses: Sequence[tuple[str, int]], key: bytes, question: bytes, seconds: float, most: int = MAX_BYTES
) -> bytes:
    """The answer of the first of these addresses that can be reached. Raises ConnectionError if none can."""
    with _reached(addresses, min(seconds, CONNECT_S)) as sock:
        nonce = os.urandom(NONCE_BYTES)
        sock.sendall(nonce)
        line = _Connection(sock, key, _exactly(sock, NONCE_BYTES) + nonce, most)
        sock.settimeout(seconds)
        line.send(REQUEST, question)
        return line.receive(RESPONSE)


def _reached(addresses: Sequence[tuple[str, int]], seconds: float) -> socket.socket:
    failure: OSError | None = None
    for address in addresses:
        try:
            return socket.create_connection(address, seconds)
        except OSError as error:
            failure = error
    raise ConnectionError(f"no server answers at {list(addresses)}: {failure}")
