# Which of several addresses reaches a host, found by probes that a listener reads.
# Touches TCP on this host.
"""rendezvous/reach.py: send_probe and read_probes; reach itself is in clusters/test_join.py."""

from __future__ import annotations

import contextlib
import socket

from farandole.rendezvous import sockets
from farandole.rendezvous.reach import read_probes, send_probe


def test_probes_arrive_at_every_open_address() -> None:
    first, here = sockets.listen("tcp:127.0.0.1")
    second, there = sockets.listen("tcp:127.0.0.1")
    closed, nowhere = sockets.listen("tcp:127.0.0.1")
    closed.close()
    with contextlib.closing(first), contextlib.closing(second):
        send_probe([here, nowhere, there], b"from one", 5.0)
        send_probe([there], b"from two", 5.0)
        send_probe([there], b"short", 5.0)
        assert read_probes(first, 8, 5.0) == {b"from one"}
        assert read_probes(second, 8, 5.0) == {b"from one", b"from two", b"short"}
        assert read_probes(second, 8, 5.0) == set()  # nobody waits there now


def test_a_silent_connection_does_not_block_the_others() -> None:
    listener, address = sockets.listen("tcp:127.0.0.1")
    place = sockets.split(address)
    assert isinstance(place, tuple)
    with contextlib.closing(listener), socket.create_connection(place):
        send_probe([address], b"a note", 5.0)
        assert read_probes(listener, 6, 0.05) == {b"a note"}
