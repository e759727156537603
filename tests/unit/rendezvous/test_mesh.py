# Ranks join, as threads of this process with stub engines: links of the right kind, on demand, errors with names.
# Touches real sockets.
from __future__ import annotations

import functools
import os
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from local_ranks import STREAMS, LocalJob, StubEngine, engines, greet, local_job
from waiting import until

from farandole.base import errors
from farandole.base.config import Config
from farandole.rendezvous import links, mesh, sockets
from farandole.rendezvous.handshake import Greeting
from farandole.rendezvous.links import initial_links
from farandole.rendezvous.mesh import JoinFailed
from farandole.rendezvous.messages import Hello
from farandole.rendezvous.secret import Secret
from farandole.rendezvous.session import Session

HOSTS = {"one": [0, 0, 0, 0], "two": [0, 0, 1, 1], "mixed": [0, 1, 0, 1], "apart": [0, 1, 2, 3], "uneven": [0, 1, 1, 1]}


@pytest.mark.parametrize("shape", HOSTS)
def test_links_are_local_inside_a_host_and_tcp_between_hosts(shape: str) -> None:
    hosts = HOSTS[shape]
    with local_job(4) as job:
        sessions = job.join_all([f"host{number}" for number in hosts])
        with engines(sessions) as stubs:
            for session, stub in zip(sessions, stubs, strict=True):
                assert session.hosts == hosts and session.generation == 1 and session.size == 4
                for peer in range(4):
                    if peer != session.rank:
                        same = hosts[peer] == hosts[session.rank]
                        assert stub.links[peer][1] == (sockets.LOCAL if same else sockets.TCP)
                        for fd in stub.links[peer][0]:
                            assert not os.get_blocking(fd) and not os.get_inheritable(fd)
            greet(stubs)
            # The hub's thread closes its socket after the last rank has its answer.
            until(lambda: os.listdir(job.directory) == [], what="no listening socket after init")
        assert not any(stub.revoked for stub in stubs)


def test_a_world_of_one_rank_needs_no_launcher() -> None:
    session = mesh.join(Config())
    assert (session.rank, session.size, session.hosts, session.links) == (0, 1, [0], {})
    session.serve(StubEngine())
    session.close()
    with pytest.raises(ValueError, match="farandole run"):
        mesh.join(Config(rank=1, size=2))
    with pytest.raises(ValueError, match="FARANDOLE_SECRET_FD"):
        mesh.join(Config(rendezvous="unix:/nowhere"))


def test_a_job_of_one_with_a_hub() -> None:
    with local_job(1) as job:
        with engines(job.join_all()) as stubs:
            assert stubs[0].links == {}


def test_a_hub_over_tcp() -> None:
    with local_job(3, "tcp:127.0.0.1") as job:
        with engines(job.join_all(["a", "a", "b"])) as stubs:
            assert {peer: kind for peer, (_, kind) in stubs[0].links.items()} == {1: sockets.LOCAL, 2: sockets.TCP}
            greet(stubs)


def test_tcp_when_it_is_asked_for() -> None:
    with local_job(3) as job:
        sessions = job.join_all(links="tcp")
        with engines(sessions) as stubs:
            assert sessions[1].hosts == [0, 1, 2]
            assert all(kind == sockets.TCP for stub in stubs for _, kind in stub.links.values())
            greet(stubs)


def test_memory_that_cannot_be_passed_means_tcp(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(nonce: bytes) -> int:
        raise OSError("forbidden in this sandbox")

    monkeypatch.setattr(links, "_memory_file", refuse)
    with local_job(3) as job:
        sessions = job.join_all(["a", "a", "b"])
        with engines(sessions) as stubs:
            assert sessions[0].hosts == [0, 1, 2]
            greet(stubs)
    assert "forbidden in this sandbox" in caplog.text and "TCP" in caplog.text


def test_the_same_host_name_on_two_machines_means_tcp(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = mesh._Joining.hello

    def elsewhere(self: mesh._Joining) -> Hello:
        hello = plain(self)
        object.__setattr__(hello, "local", f"unix:/nonexistent/{self.rank}")  # as if on another file system
        return hello

    monkeypatch.setattr(mesh._Joining, "hello", elsewhere)
    with local_job(4) as job:
        sessions = job.join_all()
        with engines(sessions) as stubs:
            assert sessions[3].hosts == [0, 1, 2, 3]
            greet(stubs)
    assert "No such file" in caplog.text


def test_which_links_are_made_at_init() -> None:
    for hosts in ([0] * 3, [0, 1] * 40, [0, 0, 1, 2, *range(3, 80)], [n // 2 for n in range(200)]):
        found = [initial_links(rank, hosts) for rank in range(len(hosts))]
        for rank, (local, remote) in enumerate(found):
            assert rank not in local | remote
            for peer in local:
                assert hosts[peer] == hosts[rank] and rank in found[peer][0]
            for peer in remote:
                assert hosts[peer] != hosts[rank] and rank in found[peer][1]
    many = [seat // 2 for seat in range(200)]
    _, remote = initial_links(3, many)  # seat 1 of host 1
    distances = (1, 2, 4, 8, 16, 32, 64)
    assert remote == {0} | {1 + 2 * ((1 + way * far) % 100) for far in distances for way in (1, -1)}


@pytest.fixture
def sparse(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LocalJob, list[Session], list[StubEngine]]]:
    """Two hosts of two ranks that are not all linked, as in a large job: 1 and 2 are not."""
    monkeypatch.setattr(links, "FULL_MESH_RANKS", 1)
    with local_job(4) as job:
        sessions = job.join_all(["a", "a", "b", "b"])
        with engines(sessions) as stubs:
            yield job, sessions, stubs


def linked(stub: StubEngine, peer: int) -> bool:
    return peer in stub.links and len(stub.links[peer][0]) == STREAMS


def test_links_are_made_on_demand(sparse: tuple[LocalJob, list[Session], list[StubEngine]]) -> None:
    _, _, stubs = sparse
    assert 2 not in stubs[1].links and 1 not in stubs[2].links
    stubs[2].wanted(1)
    stubs[1].wanted(2)  # both want it, and twice: one link
    stubs[1].wanted(2)
    for rank, peer in ((1, 2), (2, 1)):  # streams come one after the other
        stubs[rank].wait_for(functools.partial(linked, stubs[rank], peer))
    assert stubs[1].links[2][1] == sockets.TCP
    greet(stubs)


def test_a_link_to_a_rank_that_left_is_an_error(sparse: tuple[LocalJob, list[Session], list[StubEngine]]) -> None:
    _, sessions, stubs = sparse
    sessions[2].close()
    stubs[1].wanted(2)
    stubs[1].wait_for(lambda: bool(stubs[1].revoked))
    code, rank, text = stubs[1].revoked[0]
    assert (code, rank) == (errors.PEER_LOST, 2) and "no link to rank 2" in text


def test_a_death_reaches_ranks_that_have_no_link_to_the_dead(
    sparse: tuple[LocalJob, list[Session], list[StubEngine]],
) -> None:
    _, sessions, stubs = sparse
    channel = sessions[2]._channel
    assert channel is not None
    assert isinstance(channel.sock, socket.socket)
    channel.sock.shutdown(socket.SHUT_RDWR)  # as the kernel does for a process that dies
    stubs[1].wait_for(lambda: bool(stubs[1].revoked))
    code, rank, text = stubs[1].revoked[0]
    assert (code, rank) == (errors.PEER_LOST, 2) and "rank 2" in text and str(os.getpid()) in text


def test_the_loss_of_the_hub_revokes_the_generation_or_calls_the_callback() -> None:
    with local_job(2) as job:
        sessions = job.join_all()
        stubs = [StubEngine(0), StubEngine(1)]
        lost = threading.Event()
        for session, stub in zip(sessions, stubs, strict=True):
            session.hand_over(stub)
        sessions[0].serve(stubs[0])
        sessions[1].serve(stubs[1], hub_lost=lambda reason: lost.set())
    stubs[0].wait_for(lambda: bool(stubs[0].revoked))
    assert stubs[0].revoked[0][0] == errors.ABORTED and "launcher" in stubs[0].revoked[0][2]
    assert lost.wait(20) and not stubs[1].revoked
    for session in sessions:
        session.close()
        session.close()
    for stub in stubs:
        stub.close()


def test_ranks_join_a_hundred_times() -> None:
    with local_job(3) as job:
        before = len(os.listdir("/proc/self/fd"))
        for turn in range(100):
            sessions = job.join_all(["a", "a", "b"])
            with engines(sessions) as stubs:
                assert {session.generation for session in sessions} == {turn + 1}
                greet(stubs)
            assert not any(stub.revoked for stub in stubs)
        assert len(os.listdir("/proc/self/fd")) <= before + 1  # the hub may not yet have read the last goodbye


def test_the_next_round_begins_while_ranks_are_still_in_the_old_one() -> None:
    with local_job(2) as job:
        first = job.join_all()
        first[0].close()
        with ThreadPoolExecutor(1) as pool:
            early = pool.submit(job.join, 0)
            first[1].close()
            late = job.join(1)
            with engines([early.result(), late]) as stubs:
                assert late.generation == 2
                greet(stubs)


def test_two_jobs_at_once() -> None:
    with local_job(2) as one, local_job(2) as other:
        with engines(one.join_all()) as stubs, engines(other.join_all()) as others:
            greet(stubs)
            greet(others)


def test_missing_ranks_are_named_after_the_timeout() -> None:
    with local_job(4) as job:
        with ThreadPoolExecutor(2) as pool:
            waiting = job.join_later(pool, [0, 2], start_timeout=0.3)
            for future in waiting:
                with pytest.raises(JoinFailed, match=r"missing: ranks 1, 3\..*FARANDOLE_START_TIMEOUT"):
                    future.result()


def test_wrong_sizes_ranks_and_versions_are_reported_to_all_ranks() -> None:
    with local_job(3) as job, ThreadPoolExecutor(2) as pool:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"package": "9.9"}, "9.9, the launcher 1.2.3"),
            ({"rank": 0}, "two processes say"),
        ]
        for more, message in cases:
            waiting = pool.submit(job.join, 0)
            other = pool.submit(job.join, **{"rank": 1, **more})
            for future in (waiting, other):
                with pytest.raises(JoinFailed, match=message):
                    future.result()


@pytest.mark.security
def test_row_31_another_wire_version_is_named_on_both_sides(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mesh, "Greeting", functools.partial(Greeting, version=2))
    with local_job(2) as job:
        with pytest.raises(
            JoinFailed, match=r"protocol version 2 here, \d+ on the other side: install the same " r"version"
        ):
            job.join(0)
    assert re.search(r"protocol version \d+ here, 2 on the other side: install the same version", caplog.text)


def test_another_job_s_secret_is_refused_at_once() -> None:
    with local_job(2) as job:
        job.secret = Secret.create()
        with pytest.raises(JoinFailed, match="did not prove that it belongs to this job"):
            job.join(0)


def test_a_forked_child_holds_nothing_open() -> None:
    with local_job(1) as job:
        with engines(job.join_all()):
            child = os.fork()
            if child == 0:
                sockets_here = [fd for fd in os.listdir("/proc/self/fd") if _is_hub(fd, job)]
                os._exit(len(sockets_here))
            assert os.waitpid(child, 0)[1] == 0


def _is_hub(fd: str, job: LocalJob) -> bool:
    try:
        with socket.socket(fileno=os.dup(int(fd))) as sock:
            return bool(sock.getpeername() == job.hub.address.removeprefix("unix:"))
    except OSError:
        return False
