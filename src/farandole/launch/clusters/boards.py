# Boards: where rank 0 pins its invitation and the others look for it. A file, an address that is known, MPI.
# Touches the file system and, when it is installed and MPI started us, mpi4py.
"""`pin` may be called again with news; `look` gives what is there now; `take_down` leaves nothing."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any, Protocol

from farandole.launch.clusters.found import ClusterError, Found
from farandole.launch.clusters.invitation import LARGEST, Invitation, Owner, decode
from farandole.launch.clusters.private import PrivateDirectory
from farandole.rendezvous import sockets

REFRESH_SECONDS = 2.0  # network file systems remember for a while that a file was not there
MPI_PAUSE = 0.001

log = logging.getLogger("farandole.launch")


class Board(Protocol):
    """What carries an invitation. `place` says in words where that is."""

    place: str

    def pin(self, invitation: Invitation) -> None:
        """Rank 0 shows this invitation from now on."""
        ...

    def look(self) -> Invitation | None:
        """What hangs there now."""
        ...

    def met(self) -> None:
        """This rank has found rank 0 and will look no more."""
        ...

    def take_down(self) -> None:
        """Rank 0 shows nothing any more."""
        ...


class FileBoard:
    """A file of mode 0600 in a private directory, named by the job's key."""

    def __init__(self, directory: PrivateDirectory, found: Found) -> None:
        self.directory = directory
        self.place = f"{directory.path}/{found.name}"
        self._name = found.name
        self._key = found.key
        self._refresh_at = time.monotonic() + REFRESH_SECONDS
        self._swept = False

    def pin(self, invitation: Invitation) -> None:
        if not self._swept:
            self._swept = True
            self._sweep()
        self.directory.write(self._name, invitation.encode())

    def look(self) -> Invitation | None:
        found = self._read(self._name)
        if found is not None:
            # Another key under the same name cannot be; an owner that is gone left it behind.
            return None if found.key != self._key or found.owner.gone() else found
        if time.monotonic() > self._refresh_at:
            self._refresh_at = time.monotonic() + REFRESH_SECONDS
            self.directory.refresh()
        return None

    def met(self) -> None:
        pass

    def take_down(self) -> None:
        self.directory.remove(self._name)

    def _sweep(self) -> None:
        """Removes what killed jobs left; one of ours that lives under the same key is an error."""
        for name in self.directory.names():
            try:
                found = self._read(name)
            except ClusterError:
                continue  # not ours to judge
            if found is None:
                continue
            if found.stale():
                _clean(found)
                self.directory.remove(name)
            elif name == self._name and found.owner != Owner.me() and found.owner.gone() is False:
                raise ClusterError(
                    f"process {found.owner.pid} is rank 0 of a job with the same key ({self._key}) that is just "
                    "starting; start one after the other, or with `farandole run`"
                )

    def _read(self, name: str) -> Invitation | None:
        data = self.directory.read(name, LARGEST)
        if data is None:
            return None
        with contextlib.suppress(ValueError):
            return decode(data)
        return None  # a temporary file that is being written, or something else


def _clean(left: Invitation) -> None:
    for address in left.addresses:
        place = sockets.split(address)
        if isinstance(place, str) and left.owner.gone():
            sockets.remove_directory(place.rpartition("/")[0])


class KnownAddress:
    """No board at all: every rank knows the address and has the secret."""

    def __init__(self, address: str, found: Found) -> None:
        self.place = address
        self._invitation = Invitation(found.key, (address,), True, "", "", Owner("", "", 0, 0), 0.0)

    def pin(self, invitation: Invitation) -> None:
        pass

    def look(self) -> Invitation | None:
        return self._invitation

    def met(self) -> None:
        pass

    def take_down(self) -> None:
        pass


class MpiBoard:
    """MPI broadcasts the invitation, and once more if the address had to be tried first."""

    place = "MPI's broadcast"

    def __init__(self, communicator: Any, deadline: float) -> None:
        self._world = communicator
        self._deadline = deadline
        self._last: Invitation | None = None

    def pin(self, invitation: Invitation) -> None:
        self._broadcast(invitation.encode())

    def look(self) -> Invitation | None:
        if self._last is None or not self._last.proven:
            self._last = decode(self._broadcast(b""))
        return self._last

    def met(self) -> None:
        if self._last is not None and not self._last.proven:
            self.look()

    def take_down(self) -> None:
        pass

    def _broadcast(self, data: bytes) -> bytes:
        buffer = bytearray(data.ljust(LARGEST))
        request = self._world.Ibcast(buffer, root=0)
        while not request.Test():
            if time.monotonic() > self._deadline:
                raise ClusterError("MPI's broadcast did not end in time: some rank has not come to init")
            time.sleep(MPI_PAUSE)
        return bytes(buffer)


def mpi_board(found: Found, deadline: float) -> MpiBoard | None:
    """A board over mpi4py, if it is installed and belongs to the MPI that started this job."""
    if not found.mpi:
        return None
    try:
        from mpi4py import MPI
    except Exception as error:  # not installed, or no MPI library that it can load
        log.debug("mpi4py is not used: %s", error)
        return None
    world = MPI.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (found.rank, found.size):
        # Built for another MPI: every rank sees itself alone, so that all of them go on to the next way.
        log.debug("mpi4py is not used: it sees rank %d of %d", world.Get_rank(), world.Get_size())
        return None
    return MpiBoard(world, deadline)
