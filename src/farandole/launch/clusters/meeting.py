# How the ranks of a job that another launcher started come together: rank 0 runs the hub, the others find it.
# Touches boards, hub and mesh.
"""`meet(config, found, environ, wire)` is to such a job what `mesh.join(config)` is to one of ours."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import stat
import time
from collections import Counter
from dataclasses import dataclass

from farandole.config import SETTINGS, Config
from farandole.errors import HorovodInternalError
from farandole.launch.clusters import private
from farandole.launch.clusters.boards import Board, FileBoard, KnownAddress, mpi_board
from farandole.launch.clusters.found import ClusterError, Environ, Found
from farandole.launch.clusters.invitation import Invitation, Owner
from farandole.rendezvous import interfaces, mesh, sockets
from farandole.rendezvous.guests import GuestHub
from farandole.rendezvous.reach import reach
from farandole.rendezvous.secret import SECRET_BYTES, Secret
from farandole.rendezvous.session import Session
from farandole.version import package_version

LOOK_SECONDS = 0.01  # between two looks at the board
REACH_SECONDS = 2.0  # one try of all addresses
LOCAL_SECONDS = 3.0  # ranks of rank 0's host let those of other hosts find the address that works

log = logging.getLogger("farandole.launch")


@dataclass
class Meeting:
    """What came of it. `hub` runs in rank 0 alone and ends with `close`."""

    config: Config
    session: Session
    hub: GuestHub | None

    def hub_lost(self, reason: str) -> None:
        """The hub ends with rank 0: whether that left or died, the links of the engine tell better."""
        log.debug("the hub in rank 0 has ended: %s", reason)

    def close(self) -> None:
        """Ends the hub; calling it again does nothing."""
        hub, self.hub = self.hub, None
        if hub is not None:
            hub.close()


class NoMeeting(HorovodInternalError):
    """The ranks did not find each other; the text says where this one looked."""


def meet(config: Config, found: Found, environ: Environ, wire: str) -> Meeting:
    """Joins the job; blocks until every link of every rank stands."""
    log.log(
        logging.INFO if found.rank == 0 else logging.DEBUG,
        "%s started this process: rank %d of %d, local rank %d, on %s",
        *(found.title, found.rank, found.size, found.local_rank, found.hostname),
    )
    if found.size == 1:
        return Meeting(config, mesh.join(config), None)
    deadline = time.monotonic() + config.start_timeout
    given = given_secret(config, found)
    board = _board(config, found, environ, given, deadline)
    if found.rank == 0:
        return _host(config, found, board, given, deadline, wire)
    return _visit(config, found, board, given, deadline, wire)


def given_secret(config: Config, found: Found) -> Secret | None:
    """The secret that a descriptor or a file holds, bound to this job so that two jobs with one file never meet."""
    if config.secret_fd is not None:
        secret = Secret.read(config.secret_fd)
    elif config.secret_file is not None:
        secret = read_secret(config.secret_file)
    else:
        return None
    return Secret(secret.derive(b"farandole job", found.key.encode()))


def read_secret(path: str) -> Secret:
    """A user's secret: 32 bytes, or as many in hexadecimal. ClusterError when others than its owner can read it."""
    variable = SETTINGS["secret_file"].variable
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ClusterError(f"{variable}={path}: {error.strerror}") from None
    try:
        state = os.fstat(fd)
        # Kubernetes mounts secrets as root's and lets the pod's group read them.
        forbidden = 0o037 if state.st_uid == 0 != os.geteuid() else 0o077
        if not stat.S_ISREG(state.st_mode) or state.st_uid not in (0, os.geteuid()) or state.st_mode & forbidden:
            raise ClusterError(
                f"{variable}={path}: it must be a file of user {os.geteuid()} that nobody else can read (chmod 600), "
                f"but it belongs to {state.st_uid} and has mode {stat.S_IMODE(state.st_mode):04o}"
            )
        data = os.read(fd, 4 * SECRET_BYTES)
    finally:
        os.close(fd)
    text = data.strip()
    if len(data) != SECRET_BYTES and len(text) == 2 * SECRET_BYTES:
        try:
            data = bytes.fromhex(text.decode("ascii"))
        except (ValueError, UnicodeDecodeError):
            data = b""
    if len(data) != SECRET_BYTES:
        raise ClusterError(
            f"{variable}={path}: expected {SECRET_BYTES} random bytes (head -c {SECRET_BYTES} /dev/urandom) or "
            f"{2 * SECRET_BYTES} hexadecimal digits"
        )
    return Secret(data)


def _board(config: Config, found: Found, environ: Environ, given: Secret | None, deadline: float) -> Board:
    """Where the invitation hangs. The order is that of the places' privacy; SECURITY.md has it as a table."""
    kind, _, place = (config.meet_at or "").partition(":")
    if kind == "tcp":
        sockets.split(config.meet_at or "")
        if given is not None:
            return KnownAddress(config.meet_at or "", found)
    elif kind == "dir" and place.startswith("/"):
        return FileBoard(private.PrivateDirectory(os.path.join(place, f"farandole-{os.geteuid()}")), found)
    elif kind:
        raise ClusterError(f"{SETTINGS['meet_at'].variable}={config.meet_at}: expected tcp:HOST:PORT or dir:/PATH")
    if found.one_host:
        return FileBoard(private.PrivateDirectory(private.on_this_host(environ)), found)
    if (board := mpi_board(found, deadline)) is not None:
        return board
    home = FileBoard(private.PrivateDirectory(private.at_home(environ)), found)
    if found.store:
        from farandole.launch.clusters.store import StoreBoard  # only then torch is loaded

        return StoreBoard(found, home, deadline)
    return home


def _host(config: Config, found: Found, board: Board, given: Secret | None, deadline: float, wire: str) -> Meeting:
    secret = given or Secret.create()
    at_address = (config.meet_at or "").startswith("tcp:")
    directory = sockets.private_directory() if found.one_host and not at_address else ""
    try:
        hub = GuestHub(secret, found.size, _addresses(config, directory, deadline), package_version(), board.take_down)
    except BaseException:
        _forget(directory)
        raise
    try:
        hub.start()
        proven = len(hub.addresses) == 1
        invitation = Invitation(
            key=found.key,
            addresses=tuple(hub.addresses),
            proven=proven,
            hostname=found.hostname,
            secret="" if given else secret.key.hex(),
            owner=Owner.me(),
            written=time.time(),
        )
        board.pin(invitation)
        address = hub.addresses[0]
        if not proven:
            address = _wait_for_guest(hub, found, board, deadline)
            board.pin(dataclasses.replace(invitation, addresses=(address,), proven=True))
        return _join(config, found, address, secret, hub, wire)
    except BaseException:
        board.take_down()
        hub.close()
        raise
    finally:
        _forget(directory)


def _addresses(config: Config, directory: str, deadline: float) -> list[str]:
    """Where the hub listens: a unix socket for one host, the address that was asked for, or every one of this host."""
    if directory:
        return [f"unix:{directory}/hub"]
    if config.meet_at and config.meet_at.startswith("tcp:"):
        _wait_for_name(config.meet_at, deadline)
        return [config.meet_at]
    found = interfaces.candidates(tuple((config.gloo_iface or "").replace(",", " ").split()))
    if not found:
        raise NoMeeting("this host has no network address by which others could reach it")
    return [f"tcp:{address}" for address in found]


def _wait_for_name(address: str, deadline: float) -> None:
    """In a cluster that is just starting, names appear a little later than processes."""
    place = sockets.split(address)
    assert isinstance(place, tuple)
    while not interfaces.is_this_host(place[0]):
        if time.monotonic() > deadline:
            raise NoMeeting(f"{SETTINGS['meet_at'].variable}={address}: {place[0]} is not the host of rank 0")
        time.sleep(10 * LOOK_SECONDS)


def _wait_for_guest(hub: GuestHub, found: Found, board: Board, deadline: float) -> str:
    address = hub.reached(max(0.0, deadline - time.monotonic()))
    if address is None:
        raise NoMeeting(
            f"no rank of another host has come to {', '.join(hub.addresses)} in time; the invitation was in "
            f"{board.place}. {_remedy(found)}"
        )
    return address


def _remedy(found: Found) -> str:
    slow = f"If ranks are only slow, raise {SETTINGS['start_timeout'].variable}"
    if found.one_host:
        return slow
    at, file = SETTINGS["meet_at"].variable, SETTINGS["secret_file"].variable
    return f"{slow}; if the hosts share no home directory, set {at}=dir:PATH, or {at}=tcp:HOST:PORT and {file}"


def _visit(config: Config, found: Found, board: Board, given: Secret | None, deadline: float, wire: str) -> Meeting:
    reason = f"nothing was in {board.place}"
    # Where the launcher does not say how many ranks this host has, all of them may be here.
    wait_until = deadline if found.local_size is not None else time.monotonic() + LOCAL_SECONDS
    while True:
        invitation = board.look()
        if invitation is not None:
            secret = given or Secret(bytes.fromhex(invitation.secret))
            here = (invitation.hostname, invitation.owner.boot) == (found.hostname, Owner.me().boot)
            if here and not invitation.proven and time.monotonic() < wait_until:
                reason = "no rank of another host has reached rank 0"
            else:
                address, reason = reach(invitation.addresses, secret, REACH_SECONDS)
                if address is not None:
                    board.met()
                    return _join(config, found, address, secret, None, wire)
        if time.monotonic() > deadline:
            raise NoMeeting(
                f"rank {found.rank} has not found rank 0 within {config.start_timeout:g} s: {reason}. {_remedy(found)}"
            )
        time.sleep(LOOK_SECONDS)


def _join(config: Config, found: Found, address: str, secret: Secret, hub: GuestHub | None, wire: str) -> Meeting:
    session = mesh.join(dataclasses.replace(config, rendezvous=address), secret, wire=wire)
    place = sockets.split(address)
    if isinstance(place, str):
        _forget(os.path.dirname(place))
    return Meeting(_complete(config, found, session), session, hub)


def _complete(config: Config, found: Found, session: Session) -> Config:
    """What only all ranks together know: how many hosts there are, and which of them this is."""
    counts = Counter(session.names)
    across = [name for name in counts if counts[name] > found.local_rank]
    mine = found.hostname
    return dataclasses.replace(
        config,
        local_size=found.local_size or counts[mine],
        cross_rank=across.index(mine) if mine in across else 0,
        cross_size=max(1, len(across)),
    )


def _forget(directory: str) -> None:
    """The last rank that leaves the directory of sockets removes it."""
    if directory:
        with contextlib.suppress(OSError):
            os.rmdir(directory)
