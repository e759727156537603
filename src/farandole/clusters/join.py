# How ranks join a job that another launcher started: rank 0 runs the hub, the others find it.
# Touches the room rendezvous, which opens the sockets, and the endpoint stores.
"""`join_cluster(config, me, environ, wire)` does for such a job what `mesh.join(config)` does for `farandole
run`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import stat
import time
from collections import Counter
from dataclasses import dataclass

from farandole.base.config import SETTINGS, Config
from farandole.base.errors import HorovodInternalError
from farandole.base.version import package_version
from farandole.clusters import private, server
from farandole.clusters.cluster_rank import ClusterError, ClusterRank, Environ
from farandole.clusters.detection import with_numbers
from farandole.clusters.endpoint import Endpoint, Owner
from farandole.clusters.stores import EndpointStore, FileStore, FixedAddress, mpi_store
from farandole.rendezvous import interfaces, mesh, sockets
from farandole.rendezvous.rank_hub import RankHub
from farandole.rendezvous.reach import reach
from farandole.rendezvous.secret import SECRET_BYTES, Secret
from farandole.rendezvous.session import Session

POLL_SECONDS = 0.01  # between two reads of the store
REACH_SECONDS = 2.0  # for one try of all addresses
LOCAL_SECONDS = 3.0  # ranks on rank 0's host wait this long, so that other hosts find the working address first

log = logging.getLogger("farandole.launch")


@dataclass
class ClusterSession:
    """The joined session. Only rank 0 has a `hub`; `close` ends it."""

    config: Config
    session: Session
    hub: RankHub | None

    def hub_lost(self, reason: str) -> None:
        """The hub has ended with rank 0. The engine's links report whether rank 0 left or died."""
        log.debug("the hub in rank 0 has ended: %s", reason)

    def close(self) -> None:
        """Ends the hub; calling it again does nothing."""
        hub, self.hub = self.hub, None
        if hub is not None:
            hub.close()


class ClusterJoinError(HorovodInternalError):
    """The ranks did not find each other; the text says where this rank looked."""


def join_cluster(config: Config, me: ClusterRank, environ: Environ, wire: str) -> ClusterSession:
    """Joins the job; blocks until every link of every rank is made."""
    log.log(
        logging.INFO if me.rank == 0 else logging.DEBUG,
        "%s started this process: rank %d of %d, local rank %d, on %s",
        *(me.title, me.rank, me.size, me.local_rank, me.hostname),
    )
    if me.size == 1:
        return ClusterSession(config, mesh.join(config), None)
    deadline = time.monotonic() + config.start_timeout
    user_secret = given_secret(config, me)
    store: EndpointStore
    if me.launcher == "server":
        me, store, key = server.read_plan(me, environ, deadline)
        config, user_secret = with_numbers(config, me), Secret(Secret(key).derive(b"farandole job", me.key.encode()))
    else:
        store = _choose_store(config, me, environ, user_secret, deadline)
    if me.rank == 0:
        return _run_hub(config, me, store, user_secret, deadline, wire)
    return _join_hub(config, me, store, user_secret, deadline, wire)


def given_secret(config: Config, me: ClusterRank) -> Secret | None:
    """The secret from a descriptor or a file, bound to this job, so that two jobs with the same file stay separate."""
    if config.secret_fd is not None:
        secret = Secret.read(config.secret_fd)
    elif config.secret_file is not None:
        secret = read_secret(config.secret_file)
    else:
        return None
    return Secret(secret.derive(b"farandole job", me.key.encode()))


def read_secret(path: str) -> Secret:
    """A user's secret: 32 bytes, or 64 hexadecimal digits. Raises ClusterError if others than its owner can read it."""
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


def _choose_store(
    config: Config, me: ClusterRank, environ: Environ, user_secret: Secret | None, deadline: float
) -> EndpointStore:
    """Chooses the endpoint store, the most private first; SECURITY.md has the table."""
    kind, _, path = (config.meet_at or "").partition(":")
    if kind == "tcp":
        sockets.split(config.meet_at or "")
        if user_secret is not None:
            return FixedAddress(config.meet_at or "", me)
    elif kind == "dir" and path.startswith("/"):
        return FileStore(private.PrivateDirectory(os.path.join(path, f"farandole-{os.geteuid()}")), me)
    elif kind:
        raise ClusterError(f"{SETTINGS['meet_at'].variable}={config.meet_at}: expected tcp:HOST:PORT or dir:/PATH")
    if me.one_host:
        return FileStore(private.PrivateDirectory(private.on_this_host(environ)), me)
    if (store := mpi_store(me, deadline)) is not None:
        return store
    home = FileStore(private.PrivateDirectory(private.at_home(environ)), me)
    if me.store:
        from farandole.clusters.torch_store import TorchStore  # only then torch is loaded

        return TorchStore(me, home, deadline)
    return home


def _run_hub(
    config: Config, me: ClusterRank, store: EndpointStore, user_secret: Secret | None, deadline: float, wire: str
) -> ClusterSession:
    secret = user_secret or Secret.create()
    at_address = (config.meet_at or "").startswith("tcp:")
    directory = sockets.private_directory() if me.one_host and not at_address else ""
    try:
        hub = RankHub(secret, me.size, _addresses(config, directory, deadline), package_version(), store.withdraw)
    except BaseException:
        _remove_directory(directory)
        raise
    try:
        hub.start()
        proven = len(hub.addresses) == 1
        endpoint = Endpoint(
            key=me.key,
            addresses=tuple(hub.addresses),
            proven=proven,
            hostname=me.hostname,
            secret="" if user_secret else secret.key.hex(),
            owner=Owner.me(),
            written=time.time(),
        )
        store.publish(endpoint)
        address = hub.addresses[0]
        if not proven:
            address = _wait_for_rank(hub, me, store, deadline)
            store.publish(dataclasses.replace(endpoint, addresses=(address,), proven=True))
        return _join(config, me, address, secret, hub, wire)
    except BaseException:
        store.withdraw()
        hub.close()
        raise
    finally:
        _remove_directory(directory)


def _addresses(config: Config, directory: str, deadline: float) -> list[str]:
    """Where the hub listens: a unix socket for one host, the given address, or every address of this host."""
    if directory:
        return [f"unix:{directory}/hub"]
    if config.meet_at and config.meet_at.startswith("tcp:"):
        _wait_for_name(config.meet_at, deadline)
        return [config.meet_at]
    found = interfaces.candidates(tuple((config.gloo_iface or "").replace(",", " ").split()))
    if not found:
        raise ClusterJoinError("this host has no network address by which others could reach it")
    return [f"tcp:{address}" for address in found]


def _wait_for_name(address: str, deadline: float) -> None:
    """Waits for the host name: in a starting cluster, names appear later than processes."""
    sockaddr = sockets.split(address)
    assert isinstance(sockaddr, tuple)
    while not interfaces.is_this_host(sockaddr[0]):
        if time.monotonic() > deadline:
            raise ClusterJoinError(f"{SETTINGS['meet_at'].variable}={address}: {sockaddr[0]} is not the host of rank 0")
        time.sleep(10 * POLL_SECONDS)


def _wait_for_rank(hub: RankHub, me: ClusterRank, store: EndpointStore, deadline: float) -> str:
    address = hub.reached(max(0.0, deadline - time.monotonic()))
    if address is None:
        raise ClusterJoinError(
            f"no rank of another host has reached {', '.join(hub.addresses)} in time; the endpoint was in "
            f"{store.location}. {_remedy(me)}"
        )
    return address


def _remedy(me: ClusterRank) -> str:
    slow = f"If ranks are only slow, raise {SETTINGS['start_timeout'].variable}"
    if me.one_host:
        return slow
    at, file = SETTINGS["meet_at"].variable, SETTINGS["secret_file"].variable
    return f"{slow}; if the hosts share no home directory, set {at}=dir:PATH, or {at}=tcp:HOST:PORT and {file}"


def _join_hub(
    config: Config, me: ClusterRank, store: EndpointStore, user_secret: Secret | None, deadline: float, wire: str
) -> ClusterSession:
    reason = f"nothing was in {store.location}"
    # If the launcher does not say how many ranks this host has, all of them may be here.
    wait_until = deadline if me.local_size is not None else time.monotonic() + LOCAL_SECONDS
    while True:
        endpoint = store.read()
        if endpoint is not None:
            secret = user_secret or Secret(bytes.fromhex(endpoint.secret))
            here = (endpoint.hostname, endpoint.owner.pid_namespace) == (me.hostname, Owner.me().pid_namespace)
            if here and not endpoint.proven and time.monotonic() < wait_until:
                reason = "no rank of another host has reached rank 0"
            else:
                address, reason = reach(endpoint.addresses, secret, REACH_SECONDS)
                if address is not None:
                    store.stop_reading()
                    return _join(config, me, address, secret, None, wire)
        if time.monotonic() > deadline:
            raise ClusterJoinError(
                f"rank {me.rank} has not found rank 0 within {config.start_timeout:g} s: {reason}. {_remedy(me)}"
            )
        time.sleep(POLL_SECONDS)


def _join(
    config: Config, me: ClusterRank, address: str, secret: Secret, hub: RankHub | None, wire: str
) -> ClusterSession:
    session = mesh.join(dataclasses.replace(config, rendezvous=address), secret, wire=wire)
    sockaddr = sockets.split(address)
    if isinstance(sockaddr, str):
        _remove_directory(os.path.dirname(sockaddr))
    return ClusterSession(_complete(config, me, session), session, hub)


def _complete(config: Config, me: ClusterRank, session: Session) -> Config:
    """Completes the settings with what only all ranks together know: the number of hosts, and which one this is."""
    counts = Counter(session.names)
    across = [name for name in counts if counts[name] > me.local_rank]
    own_name = me.hostname
    return dataclasses.replace(
        config,
        local_size=me.local_size or counts[own_name],
        cross_rank=across.index(own_name) if own_name in across else 0,
        cross_size=max(1, len(across)),
    )


def _remove_directory(directory: str) -> None:
    """The last rank that leaves the directory of sockets removes it."""
    if directory:
        with contextlib.suppress(OSError):
            os.rmdir(directory)
