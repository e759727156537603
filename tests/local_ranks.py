# Ranks without an engine: a stub that takes links, a hub in this process, ranks as threads.
# Touches only the rendezvous room.
"""Code that the tests of rendezvous, launch and security share."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farandole.base.config import Config
from farandole.launch import local
from farandole.rendezvous import mesh, sockets
from farandole.rendezvous.hub import Hub
from farandole.rendezvous.secret import Secret
from farandole.rendezvous.session import Session

PACKAGE = "1.2.3"
STREAMS = 3  # TCP streams of a link; only rank 0 gets this number, because it decides


class StubEngine:
    """Records the links and calls of a session."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.links: dict[int, tuple[list[int], int]] = {}  # peer -> descriptors of its streams, kind
        self.revoked: list[tuple[int, int, str]] = []
        self.changed = threading.Condition()

    def add_link(self, peer: int, fd: int, kind: int) -> None:
        with self.changed:
            streams, before = self.links.setdefault(peer, ([], kind))
            streams.append(fd)
            most = 1 if kind == sockets.LOCAL else STREAMS
            assert before == kind and len(streams) <= most, f"a link to rank {peer}"
            self.changed.notify_all()

    def watch_links(self, wanted: Callable[[int], None]) -> None:
        self.wanted = wanted

    def revoke(self, code: int, rank: int, message: str) -> None:
        with self.changed:
            self.revoked.append((code, rank, message))
            self.changed.notify_all()

    def wait_for(self, ready: Callable[[], bool], timeout: float = 20.0) -> None:
        with self.changed:
            assert self.changed.wait_for(ready, timeout), (self.links, self.revoked)

    def send_greetings(self) -> None:
        """Sends this rank's number and the stream's over each stream."""
        for streams, _ in self.links.values():
            for number, fd in enumerate(streams):
                os.write(fd, bytes([self.rank, number]))

    def receive_greetings(self, timeout: float = 20.0) -> None:
        """Reads what each peer has sent, to check that each stream connects the right two ranks."""
        for peer, (streams, kind) in self.links.items():
            assert len(streams) == (1 if kind == sockets.LOCAL else STREAMS)
            for number, fd in enumerate(streams):
                assert select.select([fd], [], [], timeout)[0], f"nothing came from rank {peer}"
                assert os.read(fd, 3) == bytes([peer, number])

    def close(self) -> None:
        for streams, _ in self.links.values():
            for fd in streams:
                os.close(fd)
        self.links.clear()


@dataclass
class LocalJob:
    """A hub and what ranks need to find it."""

    hub: Hub
    secret: Secret
    size: int
    directory: str

    def config(self, rank: int, host: str = "here", **more: object) -> Config:
        more.setdefault("tcp_streams", STREAMS if rank == 0 else 1)
        return Config(rank=rank, size=self.size, hostname=host, rendezvous=self.hub.address, **more)  # type: ignore[arg-type]

    def join(self, rank: int, host: str = "here", package: str = PACKAGE, **more: object) -> Session:
        return mesh.join(self.config(rank, host, **more), self.secret, package)

    def join_later(self, pool: ThreadPoolExecutor, ranks: Sequence[int], **more: object) -> list[Future[Session]]:
        return [pool.submit(self.join, rank, **more) for rank in ranks]  # type: ignore[arg-type]

    def join_all(self, hosts: Sequence[str] | None = None, **more: object) -> list[Session]:
        """All ranks, each on its own thread."""
        names = hosts or ["here"] * self.size
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(self.join, rank, names[rank], **more) for rank in range(self.size)]  # type: ignore[arg-type]
        sessions = []
        try:
            for future in futures:
                sessions.append(future.result())
        except BaseException:
            for future in futures:
                if future.exception() is None:
                    future.result().close()
            raise
        return sessions


@contextlib.contextmanager
def local_job(size: int, address: str = "", secret: Secret | None = None) -> Iterator[LocalJob]:
    """A hub in a private directory, or at `address`."""
    directory = sockets.private_directory()
    secret = secret or Secret.create()
    hub = Hub(secret, size, address or f"unix:{directory}/hub", PACKAGE)
    hub.start()
    try:
        yield LocalJob(hub, secret, size, directory)
    finally:
        hub.close()
        left = os.listdir(directory)
        shutil.rmtree(directory)
    assert not left, f"left in the job's directory: {left}"


@contextlib.contextmanager
def engines(sessions: Sequence[Session]) -> Iterator[list[StubEngine]]:
    """A stub engine for each session, served; all closed at the end."""
    stubs = [StubEngine(session.rank) for session in sessions]
    try:
        for session, stub in zip(sessions, stubs, strict=True):
            session.hand_over(stub)
            session.serve(stub)
        yield stubs
    finally:
        for session in sessions:
            session.close()
        for stub in stubs:
            stub.close()


def greet(stubs: Sequence[StubEngine]) -> None:
    """Every rank sends its number over all links, and checks the numbers that it receives."""
    for stub in stubs:
        stub.send_greetings()
    for stub in stubs:
        stub.receive_greetings()


TESTS = Path(__file__).resolve().parent
PROGRAM = [sys.executable, str(TESTS / "rank_program.py")]
ENVIRONMENT = {"PYTHONPATH": f"{TESTS.parent / 'src'}{os.pathsep}{TESTS}", "FARANDOLE_TCP_STREAMS": str(STREAMS)}


def start_ranks(mode: str, np: int, **more: Any) -> local.Job:
    """Real processes that run rank_program.py in this mode."""
    return local.start([*PROGRAM, mode], np, env=ENVIRONMENT, **more)


def marked(mark: str) -> dict[int, str]:
    """The living processes that have the mark in their environment, with their short names."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() not in Path(f"/proc/{entry}/environ").read_bytes():
                continue
            name, _, rest = Path(f"/proc/{entry}/stat").read_text().partition("(")[2].rpartition(")")
            if rest.split()[0] != "Z":
                found[int(entry)] = name
    return found


def listening(pids: Iterable[int]) -> list[str]:
    """The TCP addresses (IPv4) on which these processes listen, as mesh.py writes them."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(link))
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
            address, port = words[1].split(":")
            octets = bytes.fromhex(address)[:: -1 if sys.byteorder == "little" else 1]
            found.append(f"tcp:{'.'.join(map(str, octets))}:{int(port, 16)}")
    return found
