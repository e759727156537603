# The links of the Python engine, and what it counts and traces: its second half without the engine itself.
# Touches interface.py; sockets only as descriptors from rendezvous/.
"""`Link` moves whole messages between two ranks; `Record` counts them and keeps the events of a trace."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
import time
from typing import Any, Protocol

from .interface import COUNTERS, Kind

HEADER = struct.Struct("!IQ")  # bytes of the label (JSON), bytes of the data that follow it
MAX_LABEL_BYTES = 1 << 24


class Record:
    """The engine's counters, and the events of a trace while one is recorded."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lock = threading.Lock()  # guards everything below
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.events: list[str] | None = None

    def count(self, **more: int) -> None:
        """Adds to counters."""
        with self.lock:
            for name, by in more.items():
                self.counters[name] += by

    def counter(self, name: str) -> int:
        """The value of one counter."""
        with self.lock:
            return self.counters[name]

    def trace(self, on: bool) -> None:
        """Begins or ends a trace."""
        with self.lock:
            self.events = [] if on else None

    def drain(self) -> bytes:
        """The events since the last call."""
        with self.lock:
            lines, self.events = self.events or [], None if self.events is None else []
        return "".join(line + "\n" for line in lines).encode()

    def note(self, kind: Kind, tensor: str | None, began: int) -> None:
        """Adds a collective that ends now to the trace."""
        took = time.monotonic_ns() - began
        event = {"name": kind.name, "ph": "X", "ts": began / 1000, "dur": took / 1000}
        with self.lock:
            if self.events is not None:
                self.events.append(json.dumps({**event, "pid": self.rank, "tid": 0, "args": {"tensor": tensor}}))


class Owner(Protocol):
    """The engine, as its links see it."""

    rank: int
    record: Record

    def deliver(self, peer: int, label: list[Any], data: bytes) -> None:
        """A message from the peer, or from this rank to itself."""

    def peer_lost(self, peer: int) -> None:
        """The stream to the peer ended without a leave message."""


class Link:
    """Whole messages over one stream: one thread writes, one reads. A send never blocks."""

    def __init__(self, owner: Owner, peer: int) -> None:
        self.owner, self.peer = owner, peer
        self.send_queue: queue.SimpleQueue[tuple[list[Any], bytes] | None] = queue.SimpleQueue()
        self.stream: socket.socket | None = None
        self.threads: list[threading.Thread] = []
        self.has_left = False  # the peer has announced that it leaves

    def open(self, descriptor: int) -> None:
        self.stream = socket.socket(fileno=descriptor)
        self.stream.settimeout(None)
        for work in (self.write, self.read):
            name = f"farandole-{work.__name__}-{self.owner.rank}-{self.peer}"
            self.threads.append(threading.Thread(target=work, name=name, daemon=True))
            self.threads[-1].start()

    def write(self) -> None:
        assert self.stream is not None
        with contextlib.suppress(OSError):  # the reader sees the end of the stream and reports it
            while (message := self.send_queue.get()) is not None:
                label = json.dumps(message[0]).encode()
                self.stream.sendall(HEADER.pack(len(label), len(message[1])) + label)
                self.stream.sendall(message[1])
                self.owner.record.count(bytes_sent=HEADER.size + len(label) + len(message[1]), frames=1)
            self.stream.shutdown(socket.SHUT_WR)

    def read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while header := self.exactly(HEADER.size):
                label_bytes, data_bytes = HEADER.unpack(header)
                if label_bytes > MAX_LABEL_BYTES:
                    raise ValueError(f"a label of {label_bytes} bytes is above the limit of {MAX_LABEL_BYTES} bytes")
                label, data = json.loads(self.exactly(label_bytes)), self.exactly(data_bytes)
                self.owner.record.count(bytes_received=HEADER.size + label_bytes + data_bytes)
                self.owner.deliver(self.peer, label, data)
        if not self.has_left:
            self.owner.peer_lost(self.peer)

    def exactly(self, count: int) -> bytes:
        """Reads that many bytes; returns none at a clean end of the stream."""
        assert self.stream is not None
        parts, missing = [], count
        while missing:
            part = self.stream.recv(min(missing, 1 << 20))
            if not part and missing == count:
                return b""
            if not part:
                raise OSError("the stream ended within a message")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        if self.stream is not None:
            with contextlib.suppress(OSError):
                self.stream.shutdown(socket.SHUT_RDWR)  # wakes the reader
            for thread in self.threads:
                thread.join()
            self.stream.close()
