# How a rank joins its job: it tells the hub where it listens, checks shared memory, makes its links, returns a Session.
# Touches sockets through the files links, session and channel.
"""`join(config)` takes the rank and the hub from the settings and returns authenticated descriptors for the engine."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import time
from typing import TypeVar

from farandole.base.config import Config
from farandole.base.errors import HorovodInternalError, Removed
from farandole.base.version import package_version
from farandole.rendezvous import interfaces, sockets
from farandole.rendezvous.channel import Channel
from farandole.rendezvous.flow import Flow, Loop, pause
from farandole.rendezvous.handshake import NOBODY, Greeting, Proven, Refused, Role, VersionMismatch, call
from farandole.rendezvous.links import LinkBuilder, Listeners, initial_links
from farandole.rendezvous.messages import (
    Failed,
    Hello,
    HostsAgreed,
    LinkBroken,
    Linked,
    MemoryProved,
    Message,
    Rejected,
    Retry,
    Started,
    Welcome,
)
from farandole.rendezvous.messages import Removed as RemovedMessage
from farandole.rendezvous.secret import Secret
from farandole.rendezvous.session import Links, Session, close_streams

HUB_SECONDS = 5.0  # the hub listens before any rank starts, so it answers at once, unless many connect
LOCAL_SECONDS = 20.0  # after this time the ranks of a host use TCP instead of shared memory
HUB_MARGIN_SECONDS = 60.0  # the hub applies the timeouts; a rank gives up by itself this much later
ROOT_CAUSE_WAIT_SECONDS = 0.5  # the hub may know why a peer cannot be reached
RETRY_SECONDS = 0.05
REOPEN_SECONDS = 1.0
MAX_ADDRESSES = 16  # of one host that other ranks try
QUICK_LINK_SECONDS = 5.0  # an elastic job continues without a peer that cannot be reached
HUB_RETRY_SECONDS = 1.0  # an elastic rank tries the hub again after this time: the network may recover
MAX_FAILURES = 5  # in a row, before this rank gives up in an elastic job

log = logging.getLogger("farandole.rendezvous")
M = TypeVar("M", Welcome, HostsAgreed, Started)


class JoinFailed(HorovodInternalError):
    """The ranks did not join; the message names those that caused it."""

    final = True  # a retry would not help


class _AttemptFailed(Exception):
    """This attempt in an elastic job has failed; the next one may succeed."""


def join(config: Config, secret: Secret | None = None, package: str = "", commit: int = 0, wire: str = "") -> Session:
    """Joins the next round of the job that `config` describes; blocks until every link of every rank is made.

    Without a hub the world has one rank. `secret` is for tests whose ranks are threads. In an elastic job `commit` is
    the number of this rank's last commit; raises Removed if the job has no slot for this rank any more. `wire` is the
    version of the engine's protocol, which must be the same on all ranks.
    """
    if config.rendezvous is None:
        if config.size != 1:
            raise ValueError(
                f"FARANDOLE_SIZE={config.size}, but FARANDOLE_RENDEZVOUS is not set: "
                "start the ranks with `farandole run`"
            )
        return Session(0, [0], 0, {})
    if secret is None:
        if config.secret_fd is None:
            raise ValueError("FARANDOLE_SECRET_FD is not set: start the ranks with `farandole run`")
        secret = Secret.read(config.secret_fd)
    elastic = config.worker >= 0
    if elastic:
        sockets.use_elastic_silence()
    else:
        sockets.set_minimum_silence(config.gloo_timeout_seconds)
    deadline = time.monotonic() + config.elastic_timeout
    failures = 0
    while True:
        joining = _Joining(config, config.rendezvous, secret, package or package_version(), commit, wire)
        try:
            return joining.run()
        except _AttemptFailed as error:
            log.debug("worker %d joins again: %s", config.worker, error)
        except (OSError, EOFError, Refused, VersionMismatch) as error:
            who = f"worker {config.worker}" if elastic else f"rank {config.rank}"
            text = f"{who} could not join its job: {sockets.explain(error)}"
            joining.tell(text)
            failures += joining.channel is not None
            known = isinstance(error, Refused | VersionMismatch) or failures >= MAX_FAILURES
            if not elastic or known or time.monotonic() > deadline:
                raise JoinFailed(text) from error
            time.sleep(RETRY_SECONDS)
        finally:
            joining.clean_up()


class _Joining:
    def __init__(self, config: Config, rendezvous: str, secret: Secret, package: str, commit: int, wire: str) -> None:
        self.config = config
        self.elastic = config.worker >= 0
        self.commit = commit
        self.rank = config.worker if self.elastic else config.rank  # until the hub assigns a rank to an elastic worker
        self.rendezvous = rendezvous
        self.secret = secret
        self.package = package
        self.wire = wire
        self.loop = Loop()
        self.local = LinkBuilder(self.loop, secret, config.rank, config.size, sockets.LOCAL)
        self.remote = LinkBuilder(self.loop, secret, config.rank, config.size, sockets.TCP)
        self.remote.streams = 1 if config.engine == "python" else config.tcp_streams
        self.listeners: list[Listeners] = []
        self.inbox: list[Message] = []
        self.ended: str | None = None
        self.channel: Channel | None = None
        self.session: Session | None = None
        self.own_directory: str | None = None
        self.deadline = time.monotonic() + config.start_timeout + HUB_MARGIN_SECONDS

    def run(self) -> Session:
        timeout = HUB_RETRY_SECONDS if self.elastic else max(HUB_SECONDS, self.config.start_timeout)
        sock, proven = self.loop.finish(self.call_hub(), time.monotonic() + timeout)
        self.channel = Channel(self.loop, sock, proven, self.handle_message, self.hub_closed)
        listen_at = self.listen_at(sock)
        self.listen(listen_at)
        self.channel.send(self.hello())
        if self.elastic:
            self.deadline = float("inf")  # a new worker may wait until a slot is free
        welcome = self.wait_for(Welcome)
        if self.elastic:
            self.deadline = time.monotonic() + HUB_MARGIN_SECONDS
            self.rank = welcome.numbers[0]
            for builder in (self.local, self.remote):
                builder.set_rank(*welcome.numbers[:2])
        self.local.generation = self.remote.generation = welcome.generation
        self.remote.streams = welcome.streams
        for listener in self.listeners:
            listener.open()
        hosts = self.link_locally(welcome)
        links = self.link_remotely(welcome, hosts)
        self.channel.send(Linked(welcome.generation))
        self.wait_for(Started)
        session = Session(
            self.rank,
            hosts,
            welcome.generation,
            links,
            welcome.streams,
            self.secret,
            self.loop,
            self.channel,
            listen_at,
            welcome.names,
            welcome.numbers,
        )
        self.session = session
        for message in self.inbox:  # a rank may already have requested a link, or be gone
            session.handle_message(message)
        self.inbox.clear()
        if self.ended is not None:
            session.ended(self.ended)
        return session

    def call_hub(self) -> Flow[tuple[socket.socket, Proven]]:
        began = time.monotonic()
        while True:
            try:
                sock = yield from sockets.connect(self.rendezvous)
            except (ConnectionRefusedError, FileNotFoundError):
                # A hub that had all its ranks listens again when one of them leaves.
                if time.monotonic() > began + REOPEN_SECONDS:
                    raise
                yield from pause(RETRY_SECONDS)
                continue
            try:
                me = Greeting(Role.WORKER, self.rank, NOBODY)
                return sock, (yield from call(sock, self.secret, me, Role.HUB))
            except (EOFError, ConnectionError):
                sock.close()
                yield from pause(RETRY_SECONDS)  # a crowded listener closed it
            except BaseException:
                sock.close()
                raise

    def listen_at(self, sock: socket.socket) -> str:
        """The addresses of this rank for others: first the one with which it reached the hub, then the others of this
        host.
        """
        if sockets.is_local(self.rendezvous):
            return "tcp:127.0.0.1"
        own_address = str(sock.getsockname()[0]).partition("%")[0]
        names = tuple(name for name in (self.config.network_interfaces or "").split(",") if name)
        addresses = dict.fromkeys([own_address, *interfaces.candidates(names)])
        return ",".join(f"tcp:{address}" for address in list(addresses)[:MAX_ADDRESSES])

    def listen(self, listen_at: str) -> None:
        sockaddr = sockets.split(self.rendezvous)
        if self.config.private_directory is not None and os.path.isdir(self.config.private_directory):
            directory = self.config.private_directory
        elif isinstance(sockaddr, str):
            directory = os.path.dirname(sockaddr)
        else:
            directory = self.own_directory = sockets.private_directory()
        name = f"{directory}/{self.rank}-{secrets.token_hex(4)}"
        self.listeners.append(self.local.listener(f"unix:{name}"))
        self.listeners.append(self.remote.listener(listen_at))

    def hello(self) -> Hello:
        config = self.config
        return Hello(
            rank=self.rank,
            size=config.size,
            host=config.hostname,
            pid=os.getpid(),
            package=self.package,
            sharing=int(config.links != "tcp"),
            timeout_ms=int(config.start_timeout * 1000),
            streams=self.remote.streams,
            local=self.listeners[0].address,
            remote=self.listeners[1].address,
            worker=config.worker,
            commit=self.commit,
            wire=self.wire,
        )

    def handle_message(self, message: Message) -> None:
        if self.session is not None:
            self.session.handle_message(message)
        else:
            self.inbox.append(message)

    def hub_closed(self, reason: str) -> None:
        if self.session is not None:
            self.session.ended(reason)
        else:
            self.ended = reason

    def take(self, kind: type[M]) -> M | None:
        """The next message of this kind if it has come; raises when the round has ended."""
        for message in self.inbox:
            if isinstance(message, Rejected):
                raise JoinFailed(message.text)
            if isinstance(message, Retry):
                raise _AttemptFailed(message.text)
            if isinstance(message, RemovedMessage):
                raise Removed(message.text)
        for index, message in enumerate(self.inbox):
            if isinstance(message, kind):
                del self.inbox[index]
                return message
        for builder in (self.local, self.remote):
            if builder.no_descriptors is not None:
                raise builder.no_descriptors
        if self.ended is not None and self.elastic:
            raise _AttemptFailed(f"the connection to the launcher was lost: {self.ended}")
        if self.ended is not None:
            raise JoinFailed(f"rank {self.rank} lost the connection to the launcher while it joined: {self.ended}")
        if time.monotonic() > self.deadline:
            raise JoinFailed(
                f"rank {self.rank} waited too long for the launcher's answer; if ranks are only slow, raise "
                "FARANDOLE_START_TIMEOUT"
            )
        return None

    def wait_for(self, kind: type[M]) -> M:
        while (message := self.take(kind)) is None:
            self.loop.turn(self.deadline)
        return message

    def link_locally(self, welcome: Welcome) -> tuple[int, ...]:
        """Tries shared memory with the ranks of the same host; returns the hosts that all ranks agree on."""
        assert self.channel is not None
        deadline = time.monotonic() + LOCAL_SECONDS
        peers, _ = initial_links(self.rank, welcome.hosts)
        self.local.want(peers)
        for peer in sorted(peers):
            if peer > self.rank:
                self.local.call(peer, welcome.locals[peer], deadline)
        reported = False
        while (agreed := self.take(HostsAgreed)) is None:
            if not reported and (self.local.settled() or time.monotonic() >= deadline):
                reported = True
                self.channel.send(self.memory_report(welcome))
                continue
            self.loop.turn(self.deadline if reported else deadline)
        if agreed.reason and self.rank == 0:
            log.warning("some ranks of one host do not share memory and will use TCP: %s", agreed.reason)
        return agreed.hosts

    def memory_report(self, welcome: Welcome) -> MemoryProved:
        unshared = sorted(self.local.wanted - set(self.local.made))
        reason = ""
        if unshared:
            why = self.local.failed.get(unshared[0], f"no answer within {LOCAL_SECONDS:g} s")
            reason = f"rank {self.rank} and rank {unshared[0]} on {welcome.names[self.rank]}: {why}"
        return MemoryProved(welcome.generation, tuple(unshared), reason)

    def link_remotely(self, welcome: Welcome, hosts: tuple[int, ...]) -> Links:
        """Makes the TCP links; returns all links of this rank, ready for the engine."""
        local_peers, remote_peers = initial_links(self.rank, hosts)
        self.remote.want(remote_peers)
        until = time.monotonic() + QUICK_LINK_SECONDS if self.elastic else self.deadline
        for peer in sorted(remote_peers):
            if peer > self.rank:
                self.remote.call(peer, welcome.remotes[peer], until)
        while not self.remote.settled():
            if self.remote.failed:
                break
            self.take(Started)  # raises when the round is over
            self.loop.turn(self.deadline)
        if self.remote.failed:
            self.report_unreachable(welcome)
        links: Links = {}
        for kind, builder in ((sockets.LOCAL, self.local), (sockets.TCP, self.remote)):
            wanted = local_peers if kind == sockets.LOCAL else remote_peers
            for peer, streams in builder.take().items():
                if peer in wanted:
                    links[peer] = ([sock.detach() for sock in streams], kind)
                else:
                    close_streams(streams)
        return links

    def report_unreachable(self, welcome: Welcome) -> None:
        """A peer cannot be reached. If it died, the hub says so; otherwise this rank reports it."""
        moment = time.monotonic() + ROOT_CAUSE_WAIT_SECONDS
        while time.monotonic() < moment:
            self.take(Started)
            self.loop.turn(moment)
        peer, why = next(iter(self.remote.failed.items()))
        text = f"rank {self.rank} could not reach rank {peer} on {welcome.names[peer]}: {why}"
        if self.elastic and self.channel is not None:
            self.channel.send(LinkBroken(welcome.generation, peer, text))
            self.wait_for(Started)  # raises: the hub decides which rank is evicted
        self.tell(text)
        raise JoinFailed(text)

    def tell(self, text: str) -> None:
        """Tells the other ranks why this rank gives up."""
        if self.channel is not None:
            self.channel.send(Failed(self.remote.generation, text))

    def clean_up(self) -> None:
        """Closes what only joining needs, or everything after a failure."""
        for listener in self.listeners:
            listener.close()
        if self.own_directory is not None:
            shutil.rmtree(self.own_directory, ignore_errors=True)
        if self.session is not None:
            return
        if self.channel is not None:
            self.channel.close()
        for builder in (self.local, self.remote):
            for streams in builder.take().values():
                close_streams(streams)
        self.loop.close()
