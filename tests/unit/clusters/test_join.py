# Joining a job of another launcher: ranks as threads, real files and sockets, and every error.
# Touches files, unix sockets and TCP on this host.
"""clusters/{join,stores,private,endpoint}.py, rendezvous/{rank_hub,reach}.py."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from local_ranks import STREAMS, StubEngine, greet, listening
from waiting import until

from farandole.base.config import Config
from farandole.clusters import ClusterError, ClusterRank, with_numbers
from farandole.clusters.endpoint import MAX_BYTES, Endpoint, Owner, decode
from farandole.clusters.join import ClusterJoinError, ClusterSession, given_secret, join_cluster, read_secret
from farandole.clusters.private import PrivateDirectory, at_home, on_this_host
from farandole.clusters.stores import FileStore
from farandole.rendezvous import interfaces, sockets
from farandole.rendezvous.mesh import JoinFailed
from farandole.rendezvous.secret import Secret

NOBODY = 65534
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
PLACE = ("slurm", "a test")


def found(rank: int, size: int = 2, hosts: Sequence[str] = (), key: str = "job 1") -> ClusterRank:
    """A rank of a job on one host, or on these hosts."""
    if not hosts:
        return ClusterRank(*PLACE, rank, size, rank, size, "here", key)
    before = hosts[:rank].count(hosts[rank])
    return ClusterRank(*PLACE, rank, len(hosts), before, hosts.count(hosts[rank]), hosts[rank], key)


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "home"
    path.mkdir()
    runtime = tmp_path / "r"
    runtime.mkdir(mode=0o700)
    return {"HOME": str(path), "XDG_RUNTIME_DIR": str(runtime)}


def attend(environ: dict[str, str], one: ClusterRank, **more: Any) -> ClusterSession:
    config = Config(start_timeout=more.pop("start_timeout", 20.0), tcp_streams=STREAMS, **more)
    return join_cluster(with_numbers(config, one), one, environ, "")


@contextlib.contextmanager
def all_meet(environ: dict[str, str], ranks: Sequence[ClusterRank], **more: Any) -> Iterator[list[ClusterSession]]:
    """All ranks, each on a thread; served by stub engines that greet each other."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        sessions = [future.result() for future in [pool.submit(attend, environ, one, **more) for one in ranks]]
    stubs = [StubEngine(one.rank) for one in ranks]
    try:
        for local_job, stub in zip(sessions, stubs, strict=True):
            local_job.session.hand_over(stub)
            local_job.session.serve(stub, local_job.hub_lost)
        greet(stubs)
        yield sessions
    finally:
        for local_job in reversed(sessions):
            local_job.session.close()
            local_job.close()
        for stub in stubs:
            assert not stub.revoked
            stub.close()


def files(environ: dict[str, str]) -> list[str]:
    return [str(path) for folder in environ.values() for path in Path(folder).rglob("*")]


def test_ranks_of_one_host_join_repeatedly_through_the_runtime_directory(home: dict[str, str]) -> None:
    for _ in range(3):
        with all_meet(home, [found(rank, 3) for rank in range(3)]) as sessions:
            assert files(home) == [], "neither the secret nor a socket is left once all are in"
            assert [local_job.config.cross_size for local_job in sessions] == [1, 1, 1]
    assert files(home) == []


def test_ranks_of_several_hosts_join_through_the_home_directory(home: dict[str, str]) -> None:
    before = listening([os.getpid()])
    hosts = ["a", "a", "b"]
    with all_meet(home, [found(rank, hosts=hosts) for rank in range(3)], links="tcp") as sessions:
        assert files(home) == []
        until(lambda: listening([os.getpid()]) == before)  # no socket listens after init
        places = [(one.config.local_rank, one.config.cross_rank, one.config.cross_size) for one in sessions]
        assert places == [(0, 0, 2), (1, 0, 1), (0, 1, 2)]


def test_an_unknown_local_size_is_learnt(home: dict[str, str]) -> None:
    ranks = [dataclasses.replace(found(rank), local_size=None) for rank in range(2)]
    with all_meet(home, ranks) as sessions:
        assert [local_job.config.local_size for local_job in sessions] == [2, 2]


def secret_file(tmp_path: Path, data: bytes = b"s" * 32, mode: int = 0o600) -> str:
    path = tmp_path / "secret"
    path.write_bytes(data)
    path.chmod(mode)
    return str(path)


def test_a_known_address_and_a_secret_file_need_no_directory(home: dict[str, str], tmp_path: Path) -> None:
    held, port = sockets.hold_port()
    more = {"meet_at": f"tcp:127.0.0.1:{port}", "secret_file": secret_file(tmp_path)}
    with held:
        for _ in range(2):  # the second round finds the port free again
            with all_meet(home, [found(rank, hosts=["a", "b"]) for rank in range(2)], **more):
                assert files(home) == []


def test_an_inherited_secret_comes_before_a_file(home: dict[str, str], tmp_path: Path) -> None:
    fd = Secret.create().to_descriptor()
    try:
        more = {"secret_fd": fd, "secret_file": str(tmp_path / "nothing")}
        with all_meet(home, [found(rank) for rank in range(2)], **more):
            assert files(home) == []
    finally:
        os.close(fd)


def test_directories_of_the_user(home: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "scratch"
    path.mkdir(mode=0o755)
    with all_meet(home, [found(rank, hosts=["a", "b"]) for rank in range(2)], meet_at=f"dir:{path}"):
        assert files(home) == [] and list(path.iterdir()) == []


def test_ranks_of_two_jobs_stay_separate(home: dict[str, str], tmp_path: Path) -> None:
    ours = [found(rank) for rank in range(2)]
    theirs = [found(rank, key="job 2") for rank in range(2)]
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(attend, home, theirs[1])
        with all_meet(home, ours):
            assert not early.done()
            first = attend(home, theirs[0])
            for local_job in (early.result(), first):
                local_job.session.close()
                local_job.close()
    one = Config(secret_file=secret_file(tmp_path))
    assert given_secret(one, ours[0]) != given_secret(one, theirs[0]), "one file, two jobs"
    assert given_secret(one, ours[0]) == given_secret(one, ours[1])


def test_a_lone_rank_0_names_the_missing_ranks_and_leaves_no_files(home: dict[str, str]) -> None:
    with pytest.raises(JoinFailed, match=r"1 of 3 ranks called init within 0.3 s; missing: ranks 1, 2"):
        attend(home, found(0, 3), start_timeout=0.3)
    assert files(home) == []
    with pytest.raises(ClusterJoinError, match=r"no rank of another host has reached tcp:.*\.farandole"):
        if len(interfaces.candidates()) < 2:
            raise ClusterJoinError(
                "no rank of another host has reached tcp:x .farandole: this host has only one address"
            )
        attend(home, found(0, hosts=["a", "b"]), start_timeout=0.3)
    assert files(home) == []


def test_without_rank_0_the_error_names_the_searched_places(home: dict[str, str]) -> None:
    with pytest.raises(
        ClusterJoinError, match=r"rank 1 has not found rank 0 within 0.3 s: nothing was in .*/r/farandole/"
    ):
        attend(home, found(1), start_timeout=0.3)
    with pytest.raises(ClusterJoinError, match=r"nothing was in .*/home/\.farandole/.*FARANDOLE_START_TIMEOUT"):
        attend(home, found(1, hosts=["a", "b"]), start_timeout=0.3)
    assert files(home) == []


def test_a_rank_that_came_too_early_finds_the_next_round(home: dict[str, str]) -> None:
    """Rank 0 gives up; the other is still looking when it tries again."""
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(JoinFailed):
            attend(home, found(0), start_timeout=0.1)
        late = pool.submit(attend, home, found(1))
        first = attend(home, found(0))
        for local_job in (late.result(), first):
            local_job.session.close()
            local_job.close()


def endpoint(address: str, owner: Owner, key: str = "job 1", written: float | None = None) -> Endpoint:
    written = time.time() if written is None else written
    return Endpoint(key, (address,), True, "here", Secret.create().key.hex(), owner, written)


def dead() -> Owner:
    return dataclasses.replace(Owner.me(), pid=2**22 + 1)


def test_files_of_a_killed_job_are_removed_and_links_are_never_followed(home: dict[str, str], tmp_path: Path) -> None:
    directory = PrivateDirectory(on_this_host(home))
    sockets_of_the_dead = tmp_path / "farandole-dead"
    sockets_of_the_dead.mkdir()
    (sockets_of_the_dead / "hub").touch()
    same, other = found(1), found(1, key="an older job")
    for one in (same, other):
        left = endpoint(f"unix:{sockets_of_the_dead}/hub", dead(), one.key)
        directory.write(one.name, left.encode())
    assert FileStore(directory, same).read() is None, "its owner is dead"
    with all_meet(home, [found(rank) for rank in range(2)]):
        assert files(home) == []
    assert not sockets_of_the_dead.exists()


def test_a_stale_file_from_another_host_is_tried_and_replaced(home: dict[str, str]) -> None:
    elsewhere = Owner("b", "another kernel", 1, 1)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, but nobody listens
        left = endpoint(f"tcp:127.0.0.1:{nobody.getsockname()[1]}", elsewhere)
        directory = PrivateDirectory(on_this_host(home))
        directory.write(found(0).name, left.encode())
        with pytest.raises(ClusterJoinError, match="Connection refused"):
            attend(home, found(1), start_timeout=0.2)
        with all_meet(home, [found(rank) for rank in range(2)]):
            assert files(home) == []
        old = endpoint("tcp:127.0.0.1:1", elsewhere, written=time.time() - 2 * 86400)
        directory.write("0" * 32, old.encode())
        with all_meet(home, [found(rank) for rank in range(2)]):
            assert files(home) == [], "a day is long enough"


def test_a_living_rank_0_with_the_same_key_is_an_error(home: dict[str, str]) -> None:
    directory = PrivateDirectory(on_this_host(home))
    parent = os.getppid()
    started = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19])
    owner = dataclasses.replace(Owner.me(), pid=parent, started=started)
    directory.write(found(0).name, endpoint("unix:/nowhere/hub", owner).encode())
    with pytest.raises(ClusterError, match=f"process {parent} is rank 0 of a job with the same key"):
        attend(home, found(0))
    directory.remove(found(0).name)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda path: path.chmod(0o755), r"cannot be trusted.*mode 0755.*FARANDOLE_MEET_AT"),
        (lambda path: (path.rmdir(), path.symlink_to(path.parent)), r"cannot be trusted"),
        (lambda path: (path.rmdir(), path.write_text("")), r"cannot be trusted"),
        pytest.param(lambda path: os.chown(path, NOBODY, NOBODY), rf"belongs to {NOBODY}", marks=root),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_directory_that_others_could_enter_is_refused(
    home: dict[str, str], spoil: Callable[[Path], object], text: str, rank: int
) -> None:
    folder = Path(at_home(home))
    folder.mkdir(mode=0o700)
    spoil(folder)
    before = threading.active_count()
    with pytest.raises(ClusterError, match=text):
        attend(home, found(rank, hosts=["a", "b"]))
    assert threading.active_count() == before


def put_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda path: path.chmod(0o644), "mode 0644"),
        (
            lambda path: (path.rename(path.with_suffix(".x")), path.symlink_to(path.with_suffix(".x"))),
            "cannot be trusted",
        ),
        (put_a_pipe, "must be a file"),
        pytest.param(lambda path: os.chown(path, NOBODY, NOBODY), f"belongs to {NOBODY}", marks=root),
    ],
)
def test_a_file_that_others_could_have_written_is_refused(
    home: dict[str, str], spoil: Callable[[Path], object], text: str
) -> None:
    directory = PrivateDirectory(on_this_host(home))
    directory.write(found(0).name, endpoint("unix:/x/hub", Owner.me()).encode())
    path = Path(directory.path, found(0).name)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    spoil(path)
    with pytest.raises(ClusterError, match=text):
        attend(home, found(1))


def test_a_home_that_cannot_be_written_is_explained(home: dict[str, str]) -> None:
    with pytest.raises(
        ClusterError, match=r"the ranks cannot use the directory /proc/nowhere/\.farandole: No " r"such file"
    ):
        attend({**home, "HOME": "/proc/nowhere"}, found(0, hosts=["a", "b"]))


@pytest.mark.parametrize(
    ("data", "mode", "text"),
    [
        (b"s" * 32, 0o644, "chmod 600.*mode 0644"),
        (b"s" * 32, 0o640, "mode 0640"),
        (b"s" * 31, 0o600, "expected 32 random bytes"),
        (b"", 0o600, "expected 32 random bytes"),
        (b"g" * 64, 0o600, "64 hexadecimal digits"),
        (b"s" * 5000, 0o600, "expected 32"),
    ],
)
def test_a_secret_file_that_is_not_right(tmp_path: Path, data: bytes, mode: int, text: str) -> None:
    with pytest.raises(ClusterError, match=text):
        read_secret(secret_file(tmp_path, data, mode))


def test_secret_files(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"FARANDOLE_SECRET_FILE=.*nothing: No such file"):
        read_secret(str(tmp_path / "nothing"))
    with pytest.raises(ClusterError, match="must be a file"):
        read_secret(str(tmp_path))
    assert read_secret(secret_file(tmp_path, b"ab" * 32 + b"\n")).key == bytes.fromhex("ab" * 32)
    assert read_secret(secret_file(tmp_path)).key == b"s" * 32
    assert b"s" * 32 not in repr(read_secret(secret_file(tmp_path))).encode()


def test_a_rank_with_a_wrong_secret_does_not_join(home: dict[str, str], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"o" * 32)
    other.chmod(0o600)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(attend, home, found(0), start_timeout=1.5, secret_file=secret_file(tmp_path))
        with pytest.raises(ClusterJoinError, match="rank 1 has not found rank 0"):
            attend(home, found(1), start_timeout=0.5, secret_file=str(other))
        with pytest.raises(JoinFailed, match="missing: rank 1"):
            first.result()
    assert files(home) == []


@pytest.mark.parametrize("folder", ["tcp:nowhere", "dir:relative", "ftp:x:1", "tcp:h:99999"])
def test_invalid_values_of_meet_at_are_refused(home: dict[str, str], folder: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        attend(home, found(0), meet_at=folder)


def test_an_address_of_another_host(home: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(
        ClusterJoinError, match=r"FARANDOLE_MEET_AT=tcp:192\.0\.2\.77:5000: 192\.0\.2\.77 is not the host of rank 0"
    ):
        more = {"meet_at": "tcp:192.0.2.77:5000", "secret_file": secret_file(tmp_path)}
        attend(home, found(0), start_timeout=0.1, **more)


def test_the_runtime_directory_is_used_only_if_it_is_ours(home: dict[str, str], tmp_path: Path) -> None:
    assert on_this_host(home) == home["XDG_RUNTIME_DIR"] + "/farandole"
    assert on_this_host({"XDG_RUNTIME_DIR": str(tmp_path / "nothing")}).endswith(f"/farandole-{os.geteuid()}")
    assert on_this_host({}).endswith(f"/farandole-{os.geteuid()}")


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"null", b'{"owner": 1}', b"\xff", b"{" * 5000, b"x" * (MAX_BYTES + 9)],
)
def test_malformed_endpoints_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not the endpoint"):
        decode(data)


def test_an_endpoint_survives_encoding_and_its_repr_hides_the_secret() -> None:
    one = endpoint("unix:/x", Owner.me())
    assert decode(one.encode()) == one and one.secret not in repr(one)
    raw = one.encode().replace(b'"proven"', b'"unknown"')
    with pytest.raises(ValueError, match="missing or additional fields"):
        decode(raw)


def test_a_forked_child_holds_nothing_of_the_hub(home: dict[str, str]) -> None:
    with all_meet(home, [found(rank) for rank in range(2)]) as sessions:
        hub = sessions[0].hub
        assert hub is not None
        numbers = [
            channel.sock.fileno() for channel in hub._channels.values() if isinstance(channel.sock, socket.socket)
        ]
        assert len(numbers) == 2
        child = os.fork()
        if child == 0:
            code = 1
            try:
                closed = all(not os.path.exists(f"/proc/self/fd/{number}") for number in numbers)
                sessions[0].close()  # and it disturbs nobody
                code = 0 if closed else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        sys.stdout.flush()
