# A listening socket in a loop. It authenticates a bounded number of connections at a time.
# Touches sockets.
"""Unauthenticated connections cost little: their number is bounded (the oldest is closed first), and each has two
seconds and 92 bytes.

Refused ones are counted and never logged one by one.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import time
from typing import Generic, Protocol, TypeVar

from farandole.rendezvous import sockets
from farandole.rendezvous.flow import READ, Flow, Loop, Task
from farandole.rendezvous.handshake import HANDSHAKE_SECONDS, VersionMismatch

MAX_UNAUTHENTICATED = 128  # connections at a time, in addition to one for each rank
ACCEPTS_PER_TURN = 64  # so that a flood of connections leaves time for authenticated ones
DESCRIPTOR_FAILURES = 64  # after so many failures in a row the lack of descriptors is reported
ACCEPT_PAUSE_SECONDS = 0.1  # without free descriptors the listener accepts nothing for this long

T = TypeVar("T")


class Owner(Protocol[T]):
    """What a listener needs from its owner."""

    def authenticate(self, sock: socket.socket) -> Flow[T]:
        """Authenticates a connection."""
        ...

    def authenticated(self, sock: socket.socket, result: T) -> None:
        """A connection is authenticated; `result` is that of `authenticate`."""
        ...

    def other_version(self, error: VersionMismatch) -> None:
        """A process of this job has another version."""
        ...

    def on_no_descriptors(self, error: OSError) -> None:
        """No connection can be accepted now."""
        ...


class Listener(Generic[T]):
    """Accepts connections for its owner; `most` is the number of unauthenticated connections at a time."""

    def __init__(self, loop: Loop, address: str, most: int, owner: Owner[T]) -> None:
        self._loop = loop
        self._most = most
        self._owner = owner
        self._names = itertools.count()
        self._unauthenticated: dict[int, tuple[Task[T], socket.socket]] = {}
        self._listener, self.address = sockets.listen(address)
        self._descriptor_failures = 0  # failures for lack of descriptors since the last authenticated connection
        self.refused = 0  # connections that did not authenticate

    def open(self) -> None:
        """Starts accepting. Until then callers wait in the kernel's queue."""
        self._loop.watch(self._listener, READ, self._accept)

    def close(self) -> None:
        """Closes unauthenticated connections and removes the socket, also from the file system."""
        self._loop.forget(self._listener)
        self._loop.at(self, None, self.open)
        for name in list(self._unauthenticated):
            self._reject(name)
        if self._listener.fileno() < 0:
            return
        self._listener.close()
        sockaddr = sockets.split(self.address)
        if isinstance(sockaddr, str) and os.path.exists(sockaddr):
            os.unlink(sockaddr)

    def abandon(self) -> None:
        """In a forked child: closes only this process's copies."""
        self._listener.close()
        for _, sock in self._unauthenticated.values():
            sock.close()

    def _accept(self, _events: int) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock = sockets.accept(self._listener)
            except OSError as error:
                self._pause_accepting(error)
                return
            if sock is None:
                return
            self._authenticate(sock)

    def _pause_accepting(self, error: OSError) -> None:
        if error.errno in (errno.EMFILE, errno.ENFILE) and self._unauthenticated:
            self._reject(next(iter(self._unauthenticated)))
            # The closed one may have been a rank of this job: if every one is closed in turn, none ever gets in.
            self._descriptor_failures += 1
            if self._descriptor_failures < DESCRIPTOR_FAILURES:
                return
        self._descriptor_failures = 0
        self._owner.on_no_descriptors(error)
        self._loop.forget(self._listener)
        self._loop.at(self, time.monotonic() + ACCEPT_PAUSE_SECONDS, self.open)

    def _authenticate(self, sock: socket.socket) -> None:
        if len(self._unauthenticated) >= self._most:
            self._reject(next(iter(self._unauthenticated)))
        name = next(self._names)
        over = False

        def done(result: T | None, error: Exception | None) -> None:
            nonlocal over
            over = True
            self._unauthenticated.pop(name, None)
            if result is not None:
                self._descriptor_failures = 0
                self._owner.authenticated(sock, result)
                return
            if isinstance(error, VersionMismatch):
                self._owner.other_version(error)
            else:
                self.refused += 1
            sock.close()

        task = self._loop.spawn(self._owner.authenticate(sock), time.monotonic() + HANDSHAKE_SECONDS, done)
        if not over:
            self._unauthenticated[name] = (task, sock)

    def _reject(self, name: int) -> None:
        task, sock = self._unauthenticated.pop(name)
        self._loop.cancel(task)
        self.refused += 1
        sock.close()
