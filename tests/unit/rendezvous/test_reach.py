# Notes at doors: which of several addresses leads to a host, found by trying.
# Touches TCP on this host.
"""rendezvous/reach.py: leave_note and read_notes; reach itself is in launch/clusters/test_meeting.py."""

from __future__ import annotations

import contextlib
import socket

from farandole.rendezvous import sockets
from farandole.rendezvous.reach import leave_note, read_notes


def test_a_note_arrives_at_every_door_that_is_open() -> None:
    first, here = sockets.listen("tcp:127.0.0.1")
    second, there = sockets.listen("tcp:127.0.0.1")
    closed, nowhere = sockets.listen("tcp:127.0.0.1")
    closed.close()
    with contextlib.closing(first), contextlib.closing(second):
        leave_note([here, nowhere, there], b"from one", 5.0)
        leave_note([there], b"from two", 5.0)
        leave_note([there], b"short", 5.0)
        assert read_notes(first, 8, 5.0) == {b"from one"}
        assert read_notes(second, 8, 5.0) == {b"from one", b"from two", b"short"}
        assert read_notes(second, 8, 5.0) == set()  # nobody waits there now


def test_a_visitor_who_says_nothing_holds_nobody_up() -> None:
    listener, address = sockets.listen("tcp:127.0.0.1")
    place = sockets.split(address)
    assert isinstance(place, tuple)
    with contextlib.closing(listener), socket.create_connection(place):
        leave_note([address], b"a note", 5.0)
        assert read_notes(listener, 6, 0.05) == {b"a note"}
