"""The yardstick of links: plain TCP streams between hosts, as the kernel carries them.
Opens sockets between the addresses it is given; nothing secret is sent, and it ends with the measurement."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from typing import Any

from .library import Call, Library

PIECE = 1 << 20
TIMEOUT_SECONDS = 30.0


class Streams(Library):
    """One rank per host; `both`: every host sends to the next at once; `all`: a share to every other one, as direct
    does; `one`: the first to the second alone."""

    def __init__(self, rank: int, addresses: Sequence[str]) -> None:
        self.rank, self.size = rank, len(addresses)
        self._addresses = [(host, int(port)) for host, port in (address.split(":") for address in addresses)]

    def open(self) -> None:
        others = [(self.rank + shift) % self.size for shift in range(1, self.size)]
        self._to: dict[int, socket.socket] = {}
        self._from: dict[int, socket.socket] = {}
        with socket.create_server(self._addresses[self.rank], family=socket.AF_INET) as listener:
            listener.settimeout(TIMEOUT_SECONDS)
            for other in others:
                self._to[other] = self._reach(self._addresses[other])
                self._to[other].sendall(bytes([self.rank]))
            for _ in others:
                stream, _ = listener.accept()
                self._from[stream.recv(1)[0]] = stream

    def close(self) -> None:
        for stream in (*self._to.values(), *self._from.values()):
            stream.close()

    def _reach(self, address: tuple[str, int]) -> socket.socket:
        """The next one may not listen yet."""
        for _ in range(int(TIMEOUT_SECONDS / 0.05)):
            try:
                return socket.create_connection(address, TIMEOUT_SECONDS)
            except ConnectionRefusedError:
                threading.Event().wait(0.05)
        raise TimeoutError("the next host does not listen")

    def call(self, operation: str, name: str, fresh: bool) -> Call:
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        if operation == "all":
            to, from_ = list(self._to), list(self._from)
        else:
            to = [after] if operation == "both" or self.rank == 0 else []
            from_ = [before] if operation == "both" or self.rank == 1 else []

        def run(tensor: Any) -> Any:
            view = memoryview(tensor).cast("B")
            share = len(view) // (self.size - 1 if operation == "all" else 1)
            threads = [threading.Thread(target=self._to[other].sendall, args=(view[:share],)) for other in to]
            threads += [threading.Thread(target=receive, args=(self._from[other], share)) for other in from_]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return tensor

        return run


def receive(stream: socket.socket, left: int) -> None:
    """Takes so many bytes, and keeps none."""
    piece = memoryview(bytearray(PIECE))
    while left:
        left -= stream.recv_into(piece[: min(PIECE, left)])
