# How a rank joins its job: tells the hub where it listens, makes its links, proves shared memory, returns a Session.
# Touches sockets through links, door and channel.
"""`join(config)`: from an environment with a rank and a hub to connected, proven descriptors for the engine."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import time
from typing import TypeVar

from farandole.config import Config
from farandole.errors import HorovodInternalError, Removed
from farandole.rendezvous import interfaces, sockets
from farandole.rendezvous.channel import Channel
from farandole.rendezvous.flow import Flow, Loop, pause
from farandole.rendezvous.handshake import NOBODY, Greeting, Proven, Refused, Role, VersionMismatch, call
from farandole.rendezvous.links import Doors, Weaver, initial_links
from farandole.rendezvous.messages import (
    Again,
    Agreed,
    Broken,
    Failed,
    Hello,
    Linked,
    Message,
    Proved,
    Sorry,
    Started,
    Welcome,
)
from farandole.rendezvous.messages import Removed as RemovedMessage
from farandole.rendezvous.secret import Secret
from farandole.rendezvous.session import Links, Session, close_streams
from farandole.version import package_version

HUB_SECONDS = 5.0  # the hub listens before any rank is started, so it answers at once; a crowd may delay it
LOCAL_SECONDS = 20.0  # then a host is taken to share no memory
SLACK_SECONDS = 60.0  # the hub keeps the times; a rank gives up by itself this much later
BLAME_SECONDS = 0.5  # the hub knows better than we do why a peer cannot be reached
RETRY_SECONDS = 0.05
REOPEN_SECONDS = 1.0
MOST_ADDRESSES = 16  # of one host that others try
QUICK_LINK_SECONDS = 5.0  # an elastic job rather goes on without a peer that cannot be reached
KNOCK_SECONDS = 1.0  # an elastic rank knocks at the hub anew after this time: a broken network may heal
MOST_FAILURES = 5  # of this rank's own, one after the other, before it gives up in an elastic job

log = logging.getLogger("farandole.rendezvous")
M = TypeVar("M", Welcome, Agreed, Started)


class JoinFailed(HorovodInternalError):
    """The ranks did not come together; the message names those who are to blame."""

    final = True  # to try once more would not help


class _TryAgain(Exception):
    """This attempt of an elastic job has failed, and the next one may do better."""


def join(config: Config, secret: Secret | None = None, package: str = "", commit: int = 0, wire: str = "") -> Session:
    """Joins the next round of the job that `config` describes; blocks until every link of every rank stands.

    Without a hub it is a world of one. `secret` is for tests that have ranks as threads. In an elastic job `commit`
    says how far this rank's state has come; Removed when there is no place for it any more. `wire` names what the
    engine speaks: all ranks must have the same.
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
        sockets.be_quick()
    else:
        sockets.be_patient(config.gloo_timeout_seconds)
    deadline = time.monotonic() + config.elastic_timeout
    failures = 0
    while True:
        joining = _Joining(config, config.rendezvous, secret, package or package_version(), commit, wire)
        try:
            return joining.run()
        except _TryAgain as error:
            log.debug("worker %d comes anew: %s", config.worker, error)
        except (OSError, EOFError, Refused, VersionMismatch) as error:
            who = f"worker {config.worker}" if elastic else f"rank {config.rank}"
            text = f"{who} could not join its job: {sockets.explain(error)}"
            joining.tell(text)
            failures += joining.channel is not None
            known = isinstance(error, Refused | VersionMismatch) or failures >= MOST_FAILURES
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
        self.rank = config.worker if self.elastic else config.rank  # until the hub gives an elastic rank its place
        self.rendezvous = rendezvous
        self.secret = secret
        self.package = package
        self.wire = wire
        self.loop = Loop()
        self.local = Weaver(self.loop, secret, config.rank, config.size, sockets.LOCAL)
        self.remote = Weaver(self.loop, secret, config.rank, config.size, sockets.TCP)
        self.remote.streams = 1 if config.engine == "python" else config.tcp_streams
        self.doors: list[Doors] = []
        self.inbox: list[Message] = []
        self.ended: str | None = None
        self.channel: Channel | None = None
        self.session: Session | None = None
        self.own_directory: str | None = None
        self.deadline = time.monotonic() + config.start_timeout + SLACK_SECONDS

    def run(self) -> Session:
        patience = KNOCK_SECONDS if self.elastic else max(HUB_SECONDS, self.config.start_timeout)
        sock, proven = self.loop.finish(self.call_hub(), time.monotonic() + patience)
        self.channel = Channel(self.loop, sock, proven, self.heard, self.hung_up)
        listen_at = self.listen_at(sock)
        self.listen(listen_at)
        self.channel.send(self.hello())
        if self.elastic:
            self.deadline = float("inf")  # a newcomer may wait until somebody goes
        welcome = self.expect(Welcome)
        if self.elastic:
            self.deadline = time.monotonic() + SLACK_SECONDS
            self.rank = welcome.place[0]
            for weaver in (self.local, self.remote):
                weaver.become(*welcome.place[:2])
        self.local.generation = self.remote.generation = welcome.generation
        self.remote.streams = welcome.streams
        for door in self.doors:
            door.open()
        hosts = self.link_locally(welcome)
        links = self.link_remotely(welcome, hosts)
        self.channel.send(Linked(welcome.generation))
        self.expect(Started)
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
            welcome.place,
        )
        self.session = session
        for message in self.inbox:  # somebody may already wish for a link, or be gone
            session.heard(message)
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
                # A hub whose ranks were all there opens its doors again when one of them leaves.
                if time.monotonic() > began + REOPEN_SECONDS:
                    raise
                yield from pause(RETRY_SECONDS)
                continue
            try:
                me = Greeting(Role.WORKER, self.rank, NOBODY)
                return sock, (yield from call(sock, self.secret, me, Role.HUB))
            except (EOFError, ConnectionError):
                sock.close()
                yield from pause(RETRY_SECONDS)  # turned away unheard by a crowded door
            except BaseException:
                sock.close()
                raise

    def listen_at(self, sock: socket.socket) -> str:
        """Where others may reach this rank: first where it reached the hub, then wherever else this host is."""
        if sockets.is_local(self.rendezvous):
            return "tcp:127.0.0.1"
        mine = str(sock.getsockname()[0]).partition("%")[0]
        names = tuple(name for name in (self.config.network_interfaces or "").split(",") if name)
        addresses = dict.fromkeys([mine, *interfaces.candidates(names)])
        return ",".join(f"tcp:{address}" for address in list(addresses)[:MOST_ADDRESSES])

    def listen(self, listen_at: str) -> None:
        place = sockets.split(self.rendezvous)
        if self.config.private_directory is not None and os.path.isdir(self.config.private_directory):
            directory = self.config.private_directory
        elif isinstance(place, str):
            directory = os.path.dirname(place)
        else:
            directory = self.own_directory = sockets.private_directory()
        name = f"{directory}/{self.rank}-{secrets.token_hex(4)}"
        self.doors.append(self.local.door(f"unix:{name}"))
        self.doors.append(self.remote.door(listen_at))

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
            local=self.doors[0].address,
            remote=self.doors[1].address,
            worker=config.worker,
            commit=self.commit,
            wire=self.wire,
        )

    def heard(self, message: Message) -> None:
        if self.session is not None:
            self.session.heard(message)
        else:
            self.inbox.append(message)

    def hung_up(self, reason: str) -> None:
        if self.session is not None:
            self.session.ended(reason)
        else:
            self.ended = reason

    def take(self, kind: type[M]) -> M | None:
        """The next message of this kind if it is here; raises when the round is over."""
        for message in self.inbox:
            if isinstance(message, Sorry):
                raise JoinFailed(message.text)
            if isinstance(message, Again):
                raise _TryAgain(message.text)
            if isinstance(message, RemovedMessage):
                raise Removed(message.text)
        for place, message in enumerate(self.inbox):
            if isinstance(message, kind):
                del self.inbox[place]
                return message
        for weaver in (self.local, self.remote):
            if weaver.starved is not None:
                raise weaver.starved
        if self.ended is not None and self.elastic:
            raise _TryAgain(f"the connection to the launcher was lost: {self.ended}")
        if self.ended is not None:
            raise JoinFailed(f"rank {self.rank} lost the connection to the launcher while it joined: {self.ended}")
        if time.monotonic() > self.deadline:
            raise JoinFailed(f"rank {self.rank} heard nothing from the launcher in time")
        return None

    def expect(self, kind: type[M]) -> M:
        while (message := self.take(kind)) is None:
            self.loop.turn(self.deadline)
        return message

    def link_locally(self, welcome: Welcome) -> tuple[int, ...]:
        """Tries shared memory with the ranks of the same host; the hosts that everybody agrees on."""
        assert self.channel is not None
        deadline = time.monotonic() + LOCAL_SECONDS
        peers, _ = initial_links(self.rank, welcome.hosts)
        self.local.want(peers)
        for peer in sorted(peers):
            if peer > self.rank:
                self.local.call(peer, welcome.locals[peer], deadline)
        reported = False
        while (agreed := self.take(Agreed)) is None:
            if not reported and (self.local.settled() or time.monotonic() >= deadline):
                reported = True
                self.channel.send(self.proved(welcome))
                continue
            self.loop.turn(self.deadline if reported else deadline)
        if agreed.reason and self.rank == 0:
            log.warning("some ranks of one host do not share memory and will use TCP: %s", agreed.reason)
        return agreed.hosts

    def proved(self, welcome: Welcome) -> Proved:
        unshared = sorted(self.local.wanted - set(self.local.made))
        reason = ""
        if unshared:
            why = self.local.failed.get(unshared[0], f"no answer within {LOCAL_SECONDS:g} s")
            reason = f"rank {self.rank} and rank {unshared[0]} on {welcome.names[self.rank]}: {why}"
        return Proved(welcome.generation, tuple(unshared), reason)

    def link_remotely(self, welcome: Welcome, hosts: tuple[int, ...]) -> Links:
        """Makes the TCP links; all links of this rank, ready for the engine."""
        near, far = initial_links(self.rank, hosts)
        self.remote.want(far)
        patience = time.monotonic() + QUICK_LINK_SECONDS if self.elastic else self.deadline
        for peer in sorted(far):
            if peer > self.rank:
                self.remote.call(peer, welcome.remotes[peer], patience)
        while not self.remote.settled():
            if self.remote.failed:
                break
            self.take(Started)  # raises when the round is over
            self.loop.turn(self.deadline)
        if self.remote.failed:
            self.blame(welcome)
        links: Links = {}
        for kind, weaver in ((sockets.LOCAL, self.local), (sockets.TCP, self.remote)):
            wanted = near if kind == sockets.LOCAL else far
            for peer, streams in weaver.take().items():
                if peer in wanted:
                    links[peer] = ([sock.detach() for sock in streams], kind)
                else:
                    close_streams(streams)
        return links

    def blame(self, welcome: Welcome) -> None:
        """A peer cannot be reached. If it died, the hub will say so; else everybody hears it from us."""
        moment = time.monotonic() + BLAME_SECONDS
        while time.monotonic() < moment:
            self.take(Started)
            self.loop.turn(moment)
        peer, why = next(iter(self.remote.failed.items()))
        text = f"rank {self.rank} could not reach rank {peer} on {welcome.names[peer]}: {why}"
        if self.elastic and self.channel is not None:
            self.channel.send(Broken(welcome.generation, peer, text))
            self.expect(Started)  # raises: the hub decides who has to go
        self.tell(text)
        raise JoinFailed(text)

    def tell(self, text: str) -> None:
        """The others hear why this rank gives up."""
        if self.channel is not None:
            self.channel.send(Failed(self.remote.generation, text))

    def clean_up(self) -> None:
        """Closes what only joining needs; everything when it failed."""
        for door in self.doors:
            door.close()
        if self.own_directory is not None:
            shutil.rmtree(self.own_directory, ignore_errors=True)
        if self.session is not None:
            return
        if self.channel is not None:
            self.channel.close()
        for weaver in (self.local, self.remote):
            for streams in weaver.take().values():
                close_streams(streams)
        self.loop.close()
