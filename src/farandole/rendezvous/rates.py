# What the kernel knows of a rank's streams to other hosts: how many bytes arrived, and at which rate.
# Touches sockets that the engine owns; it reads their statistics and changes nothing.
"""`Rates.report(seconds)` returns a few numbers for each peer; slow_links.py compares those of all ranks."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from dataclasses import dataclass

_COUNTS = struct.Struct("=Q")
_TIMES = struct.Struct("=QQQ")
_BYTES_ACKED, _DELIVERY_RATE = 120, 160  # offsets in Linux's `struct tcp_info`
_LENGTH = _DELIVERY_RATE + _TIMES.size
MAX_PEERS = 8  # in a report: the busiest ones


@dataclass
class _Stream:
    peer: int
    descriptor: int
    inode: int  # the number of a closed descriptor may be used again
    acked: int = 0
    busy_us: int = 0


class Rates:
    """The streams of one rank. The engine owns them; a stream that it has closed is dropped here."""

    def __init__(self) -> None:
        self._streams: list[_Stream] = []

    def add(self, peer: int, descriptor: int) -> None:
        """Adds a TCP stream to this peer."""
        with contextlib.suppress(OSError):
            self._streams.append(_Stream(peer, descriptor, os.fstat(descriptor).st_ino))

    def report(self, seconds: float) -> tuple[int, ...]:
        """For each of the busiest peers: its number, two times in milliseconds, and the kB that arrived.

        `seconds`: since the last report. The first time: data was in flight and the peer would have taken it; late
        acknowledgements are included. The second time: what the bytes need at the last rate that the kernel measured,
        if that is less; it can be too small when little is sent at a time.
        """
        found: dict[int, tuple[float, float, int]] = {}
        for stream in list(self._streams):
            statistics = self._ask(stream)
            if statistics is None:
                self._streams.remove(stream)
                continue
            acked, rate, busy_us = statistics
            sent, busy = acked - stream.acked, min(seconds, (busy_us - stream.busy_us) / 1e6)
            stream.acked, stream.busy_us = acked, busy_us
            before = found.get(stream.peer, (0.0, 0.0, 0))  # of another stream, at the same time
            least = min(busy, sent / rate if rate else 0.0)
            found[stream.peer] = (max(before[0], busy), max(before[1], least), before[2] + sent)
        busiest = sorted(found, key=lambda peer: found[peer], reverse=True)[:MAX_PEERS]
        rows = [(peer, *found[peer]) for peer in busiest]
        return tuple(
            int(number) for peer, busy, least, sent in rows for number in (peer, 1e3 * busy, 1e3 * least, sent / 1e3)
        )

    def _ask(self, stream: _Stream) -> tuple[int, int, int] | None:
        """Bytes that arrived, the rate, and how long there was data to send that the peer would take."""
        try:
            if os.fstat(stream.descriptor).st_ino != stream.inode:
                return None
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, stream.descriptor)
            try:
                statistics = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
            finally:
                sock.detach()
        except OSError:
            return None
        if len(statistics) < _LENGTH:
            return None  # an older kernel without these fields
        rate, busy_us, unread_us = _TIMES.unpack_from(statistics, _DELIVERY_RATE)
        return _COUNTS.unpack_from(statistics, _BYTES_ACKED)[0], rate, busy_us - unread_us
