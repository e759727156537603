# Sockets: addresses, listening, connecting, the user of the other side. Only this file opens sockets.
# Touches sockets and the private directory of unix sockets.
"""An address is a text: "unix:/private/dir/name" or "tcp:host:port"."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import struct
import tempfile

from farandole.rendezvous.flow import WRITE, Flow, Wait, pause

BACKLOG = 1024
SILENCE_SECONDS = 60  # in a static job a peer that acknowledges nothing for this long is lost
LOCAL, TCP = 0, 1  # kinds of links, with the numbers of the core
ELASTIC_SILENCE_SECONDS = 4  # in an elastic job; less than the time after which a silent host is evicted
_silence_seconds = SILENCE_SECONDS  # HOROVOD_GLOO_TIMEOUT_SECONDS can raise it
_MAX_PATH = 100  # the kernel's limit for unix sockets is 108
_CREDENTIALS = struct.Struct("3i")


def private_directory() -> str:
    """A new directory that only this user can enter; short enough for unix sockets."""
    directory = tempfile.gettempdir()
    if len(directory) > _MAX_PATH - 40:
        directory = "/tmp"
    return tempfile.mkdtemp(prefix="farandole-", dir=directory)  # 0700 by mkdtemp


def remove_directory(directory: str) -> None:
    """Removes a private directory with the sockets in it."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets; the first one does not block."""
    first, second = socket.socketpair()
    first.setblocking(False)
    return first, second


def inherited(descriptor: int) -> socket.socket:
    """A socket inherited from another process."""
    sock = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    sock.setblocking(False)
    return sock


def hold_port() -> tuple[socket.socket, int]:
    """A port that no other process gets by chance, and that a server on this host can still bind."""
    # Both sides set this option and neither listens, so the kernel allows the second bind.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("", 0))
    return sock, sock.getsockname()[1]


def split(address: str) -> tuple[str, int] | str:
    """(host, port) of a TCP address, or the path of a unix one."""
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest.startswith("/") and "\0" not in rest:
        return rest
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536:
        return host.strip("[]"), int(port)
    raise ValueError(f"{address!r} is not an address; expected unix:/path or tcp:host:port")


def split_addresses(addresses: str) -> list[str]:
    """Splits TCP addresses at commas; a unix address stays whole, since its path may have commas.

    >>> split_addresses("tcp:a:1,tcp:b:2"), split_addresses("unix:/tmp/a,b")
    (['tcp:a:1', 'tcp:b:2'], ['unix:/tmp/a,b'])
    """
    return [addresses] if addresses.startswith("unix:") else addresses.split(",")


def is_local(address: str) -> bool:
    """Whether only this host can reach an address."""
    sockaddr = split(address)
    return isinstance(sockaddr, str) or sockaddr[0] in ("localhost", "::1") or sockaddr[0].startswith("127.")


def listen(address: str) -> tuple[socket.socket, str]:
    """A listening socket and its address. For `tcp:host` without a port the kernel chooses one."""
    if address.startswith("tcp:"):
        return _listen_tcp(*_host_and_port(address[4:]))
    path = split(address)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        os.chmod(str(path), 0o600)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock, address


def _host_and_port(address: str) -> tuple[str, int]:
    """Parses `host`, `host:port`, `[v6]`, `[v6]:port` or a bare v6 address; port 0 if there is none."""
    if address.startswith("["):
        host, _, port = address[1:].partition("]")
    else:
        host, _, port = address.partition(":") if address.count(":") == 1 else (address, "", "")
    return host, int(port.lstrip(":") or 0)


def _listen_tcp(host: str, port: int) -> tuple[socket.socket, str]:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        # Accepted connections inherit this, so they do not block a later listener on the same port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Set again for the accepted connections: without it the port could not be bound while they exist.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    name, port = sock.getsockname()[:2]
    return sock, f"tcp:[{name}]:{port}" if ":" in name else f"tcp:{name}:{port}"


def accept(listener: socket.socket) -> socket.socket | None:
    """The next connection (over a unix socket: of this user), or None when none waits."""
    while True:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, InterruptedError):
            return None
        except ConnectionError:
            continue  # the other side closed it while it waited
        sock.setblocking(False)
        if same_user(sock):
            tune(sock)
            return sock
        sock.close()


def connect(address: str) -> Flow[socket.socket]:
    """A connected socket; raises OSError when it cannot connect."""
    sockaddr = split(address)
    if isinstance(sockaddr, str):
        family = socket.AF_UNIX
    else:
        found = socket.getaddrinfo(*sockaddr, type=socket.SOCK_STREAM)[0]
        family, sockaddr = found[0], found[4][:2]  # type: ignore[assignment]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while True:
            code = sock.connect_ex(sockaddr)
            if code != errno.EAGAIN:
                break
            yield from pause(0.005)  # a unix listener whose queue is full
        if code == errno.EINPROGRESS:
            yield Wait(sock, WRITE)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        if not same_user(sock):
            raise PermissionError(errno.EACCES, "the listener belongs to another user")
        tune(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end of a unix socket runs as this user. Always true over TCP, which cannot
    tell.
    """
    if sock.family != socket.AF_UNIX:
        return True
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid())


def set_minimum_silence(seconds: float) -> None:
    """Sets how long a peer may be silent; never less than SILENCE_SECONDS."""
    global _silence_seconds
    _silence_seconds = max(SILENCE_SECONDS, round(seconds))


def use_elastic_silence() -> None:
    """From now on a peer that is silent for ELASTIC_SILENCE_SECONDS is lost: an elastic job continues without it."""
    global _silence_seconds
    _silence_seconds = ELASTIC_SILENCE_SECONDS


def tune(sock: socket.socket) -> None:
    """Sends small messages without delay and detects a peer that vanished."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _silence_seconds // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _silence_seconds // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _silence_seconds * 1000)


def explain(error: BaseException) -> str:
    """The text of an error; for a lack of descriptors with the fix."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"too few file descriptors (the limit is {limit}): raise it with `ulimit -n {max(4096, 2 * limit)}`"
    return str(error) or type(error).__name__
