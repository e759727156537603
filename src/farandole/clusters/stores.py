# Endpoint stores: rank 0 publishes the endpoint of its hub, the others read it. A file, a known address, or MPI.
# Touches the file system and, when it is installed and MPI started us, mpi4py.
"""`publish` may be called again with a new endpoint; `read` returns the current one; `withdraw` removes it."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any, Protocol

from farandole.clusters.cluster_rank import ClusterError, ClusterRank
from farandole.clusters.endpoint import MAX_BYTES, Endpoint, Owner, decode
from farandole.clusters.private import PrivateDirectory
from farandole.rendezvous import sockets

REFRESH_SECONDS = 2.0  # network file systems cache for some time that a file did not exist
MPI_PAUSE = 0.001

log = logging.getLogger("farandole.launch")


class EndpointStore(Protocol):
    """Where an endpoint is stored. `location` names it in messages."""

    location: str

    def publish(self, endpoint: Endpoint) -> None:
        """Rank 0 stores this endpoint."""
        ...

    def read(self) -> Endpoint | None:
        """The stored endpoint, or None."""
        ...

    def stop_reading(self) -> None:
        """Tells the store that this rank has reached rank 0 and will not read again."""
        ...

    def withdraw(self) -> None:
        """Rank 0 removes the endpoint."""
        ...


class FileStore:
    """A file of mode 0600 in a private directory, named by the job's key."""

    def __init__(self, directory: PrivateDirectory, found: ClusterRank) -> None:
        self.directory = directory
        self.location = f"{directory.path}/{found.name}"
        self._name = found.name
        self._key = found.key
        self._refresh_at = time.monotonic() + REFRESH_SECONDS
        self._swept = False

    def publish(self, endpoint: Endpoint) -> None:
        if not self._swept:
            self._swept = True
            self._sweep()
        self.directory.write(self._name, endpoint.encode())

    def read(self) -> Endpoint | None:
        found = self._read(self._name)
        if found is not None:
            # The file is named by the key. If its owner has ended, a killed job left it.
            return None if found.key != self._key or found.owner.has_ended() else found
        if time.monotonic() > self._refresh_at:
            self._refresh_at = time.monotonic() + REFRESH_SECONDS
            self.directory.refresh()
        return None

    def stop_reading(self) -> None:
        pass

    def withdraw(self) -> None:
        self.directory.remove(self._name)

    def _sweep(self) -> None:
        """Removes files that killed jobs left; a living job with the same key is an error."""
        for name in self.directory.names():
            try:
                found = self._read(name)
            except ClusterError:
                continue  # it may belong to another job
            if found is None:
                continue
            if found.stale():
                _clean(found)
                self.directory.remove(name)
            elif name == self._name and found.owner != Owner.me() and found.owner.has_ended() is False:
                raise ClusterError(
                    f"process {found.owner.pid} is rank 0 of a job with the same key ({self._key}) that is just "
                    "starting; start one after the other, or with `farandole run`"
                )

    def _read(self, name: str) -> Endpoint | None:
        data = self.directory.read(name, MAX_BYTES)
        if data is None:
            return None
        with contextlib.suppress(ValueError):
            return decode(data)
        return None  # a temporary file that is being written, or something else


def _clean(left: Endpoint) -> None:
    for address in left.addresses:
        sockaddr = sockets.split(address)
        if isinstance(sockaddr, str) and left.owner.has_ended():
            sockets.remove_directory(sockaddr.rpartition("/")[0])


class FixedAddress:
    """Nothing is stored: every rank knows the address and has the secret."""

    def __init__(self, address: str, found: ClusterRank) -> None:
        self.location = address
        self._endpoint = Endpoint(
            found.key, (address,), proven=True, hostname="", secret="", owner=Owner("", "", 0, 0), written=0.0
        )

    def publish(self, endpoint: Endpoint) -> None:
        pass

    def read(self) -> Endpoint | None:
        return self._endpoint

    def stop_reading(self) -> None:
        pass

    def withdraw(self) -> None:
        pass


class MpiStore:
    """MPI broadcasts the endpoint, and again if rank 0 had to try its addresses first."""

    location = "MPI's broadcast"

    def __init__(self, communicator: Any, deadline: float) -> None:
        self._world = communicator
        self._deadline = deadline
        self._last: Endpoint | None = None

    def publish(self, endpoint: Endpoint) -> None:
        self._broadcast(endpoint.encode())

    def read(self) -> Endpoint | None:
        if self._last is None or not self._last.proven:
            self._last = decode(self._broadcast(b""))
        return self._last

    def stop_reading(self) -> None:
        if self._last is not None and not self._last.proven:
            self.read()

    def withdraw(self) -> None:
        pass

    def _broadcast(self, data: bytes) -> bytes:
        buffer = bytearray(data.ljust(MAX_BYTES))
        request = self._world.Ibcast(buffer, root=0)
        while not request.Test():
            if time.monotonic() > self._deadline:
                raise ClusterError("MPI's broadcast did not end in time: some rank has not called init")
            time.sleep(MPI_PAUSE)
        return bytes(buffer)


def mpi_store(found: ClusterRank, deadline: float) -> MpiStore | None:
    """A store over mpi4py, if it is installed and belongs to the MPI that started this job."""
    if not found.mpi:
        return None
    try:
        from mpi4py import MPI
    except Exception as error:  # not installed, or no MPI library that it can load
        log.debug("mpi4py is not used: %s", error)
        return None
    world = MPI.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (found.rank, found.size):
        # It was built for another MPI: every rank sees a world of one, so all ranks use the next kind of store.
        log.debug("mpi4py is not used: it sees rank %d of %d", world.Get_rank(), world.Get_size())
        return None
    return MpiStore(world, deadline)
