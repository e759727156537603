# A door: a listening socket in a loop that hears a bounded number of strangers and lets in those who prove themselves.
# Touches sockets.
"""Strangers cost little: a bounded number is heard at a time (the oldest has to go), each for two seconds and 92 bytes.

They are counted, never logged one by one.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from farandole.rendezvous import sockets
from farandole.rendezvous.flow import READ, Flow, Loop, Task
from farandole.rendezvous.handshake import HANDSHAKE_SECONDS, VersionMismatch

MOST_STRANGERS = 128  # heard at a time, beside one for each rank
ACCEPTS_PER_TURN = 64  # so that a flood of connections does not starve those who have proven themselves
TIGHT_TIMES = 64  # without descriptors so often, and nobody let in: there is a problem to tell
BREATH_SECONDS = 0.1  # without descriptors nobody is accepted for this long

T = TypeVar("T")


class Door(Generic[T]):
    """`talk(sock)` is the flow that a stranger has to pass, `enter(sock, result)` what happens then, `most` the
    number of strangers that are heard at a time.

    `other_version(error)`: one of ours that cannot be understood. `starved(error)`: nobody can be let in for a moment.
    """

    def __init__(
        self,
        loop: Loop,
        address: str,
        most: int,
        talk: Callable[[socket.socket], Flow[T]],
        enter: Callable[[socket.socket, T], None],
        other_version: Callable[[VersionMismatch], None],
        starved: Callable[[OSError], None],
    ) -> None:
        self._loop = loop
        self._most = most
        self._talk = talk
        self._enter = enter
        self._other_version = other_version
        self._starved = starved
        self._names = itertools.count()
        self._strangers: dict[int, tuple[Task[T], socket.socket]] = {}
        self._listener, self.address = sockets.listen(address)
        self._tight = 0  # how often a descriptor was lacking since somebody came in
        self.refused = 0  # strangers that were turned away

    def open(self) -> None:
        """Begins to hear. Until then the kernel keeps callers waiting."""
        self._loop.watch(self._listener, READ, self._accept)

    def close(self) -> None:
        """Turns the last strangers away and removes the socket, also from the file system."""
        self._loop.forget(self._listener)
        self._loop.at(self, None, self.open)
        for name in list(self._strangers):
            self._turn_away(name)
        if self._listener.fileno() < 0:
            return
        self._listener.close()
        place = sockets.split(self.address)
        if isinstance(place, str) and os.path.exists(place):
            os.unlink(place)

    def abandon(self) -> None:
        """In a forked child: closes this process's copies alone."""
        self._listener.close()
        for _, sock in self._strangers.values():
            sock.close()

    def _accept(self, _events: int) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock = sockets.accept(self._listener)
            except OSError as error:
                self._hold_breath(error)
                return
            if sock is None:
                return
            self._hear(sock)

    def _hold_breath(self, error: OSError) -> None:
        if error.errno in (errno.EMFILE, errno.ENFILE) and self._strangers:
            self._turn_away(next(iter(self._strangers)))
            # It may have been one of ours: those that are turned away in turn would never get in.
            self._tight += 1
            if self._tight < TIGHT_TIMES:
                return
        self._tight = 0
        self._starved(error)
        self._loop.forget(self._listener)
        self._loop.at(self, time.monotonic() + BREATH_SECONDS, self.open)

    def _hear(self, sock: socket.socket) -> None:
        if len(self._strangers) >= self._most:
            self._turn_away(next(iter(self._strangers)))
        name = next(self._names)
        over = False

        def done(result: T | None, error: Exception | None) -> None:
            nonlocal over
            over = True
            self._strangers.pop(name, None)
            if result is not None:
                self._tight = 0
                self._enter(sock, result)
                return
            if isinstance(error, VersionMismatch):
                self._other_version(error)
            else:
                self.refused += 1
            sock.close()

        task = self._loop.spawn(self._talk(sock), time.monotonic() + HANDSHAKE_SECONDS, done)
        if not over:
            self._strangers[name] = (task, sock)

    def _turn_away(self, name: int) -> None:
        task, sock = self._strangers.pop(name)
        self._loop.cancel(task)
        self.refused += 1
        sock.close()
