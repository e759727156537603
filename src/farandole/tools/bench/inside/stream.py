"""The yardstick of links: plain TCP streams in a ring, each host to the next, as the kernel carries them.
Opens sockets between the addresses it is given; nothing secret is sent, and it ends with the measurement."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from typing import Any

from .libraries import Call, Library

PIECE = 1 << 20
PATIENCE_SECONDS = 30.0


class Streams(Library):
    """One rank per host; `both`: every host sends to the next at once; `one`: the first to the second alone."""

    def __init__(self, rank: int, addresses: Sequence[str]) -> None:
        self.rank, self.size = rank, len(addresses)
        self._addresses = [(host, int(port)) for host, port in (address.split(":") for address in addresses)]

    def open(self) -> None:
        with socket.create_server(self._addresses[self.rank], family=socket.AF_INET) as door:
            door.settimeout(PATIENCE_SECONDS)
            self._to = self._reach(self._addresses[(self.rank + 1) % self.size])
            self._from, _ = door.accept()

    def close(self) -> None:
        self._to.close()
        self._from.close()

    def _reach(self, address: tuple[str, int]) -> socket.socket:
        """The next one may not listen yet."""
        for _ in range(int(PATIENCE_SECONDS / 0.05)):
            try:
                return socket.create_connection(address, PATIENCE_SECONDS)
            except ConnectionRefusedError:
                threading.Event().wait(0.05)
        raise TimeoutError("the next host does not listen")

    def call(self, operation: str, name: str, fresh: bool) -> Call:
        sends = operation == "both" or self.rank == 0
        receives = operation == "both" or self.rank == 1

        def run(tensor: Any) -> Any:
            view = memoryview(tensor).cast("B")
            result = memoryview(bytearray(PIECE))
            sender = threading.Thread(target=self._to.sendall, args=(view,)) if sends else None
            if sender is not None:
                sender.start()
            left = len(view) if receives else 0
            while left:
                left -= self._from.recv_into(result[: min(PIECE, left)])
            if sender is not None:
                sender.join()
            return tensor

        return run
