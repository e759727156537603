# Rows 28, 29 and 33 of docs/faults.md: unauthenticated connections to every listening socket of a job.
# Touches sockets and processes.
from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import time
from pathlib import Path

import pytest
from attacks import attacks, connect, say
from local_ranks import engines, greet, listening, local_job, start_ranks
from waiting import in_time, until

from farandole.rendezvous import listener
from farandole.rendezvous.handshake import GREETING_BYTES, HANDSHAKE_SECONDS, PROOF_BYTES
from farandole.rendezvous.messages import MessageError, decode

pytestmark = [pytest.mark.security, pytest.mark.ranks]


def test_row_28_garbage_on_every_listening_socket_while_ranks_join(tmp_path: Path) -> None:
    bomb = str(tmp_path / "bomb")
    with start_ranks("wait", 4, hosts=["a", "a", "b", "b"]) as job, contextlib.ExitStack() as stack:
        directory = job.directory

        def addresses() -> list[str]:
            tcp = listening([*job.pids, os.getpid()])
            assert all(address.startswith("tcp:127.0.0.1:") for address in tcp), f"not on loopback alone: {tcp}"
            return tcp + [f"unix:{directory}/{name}" for name in os.listdir(directory)]

        until(lambda: "ready" in job.stdout(3))
        # Three ranks wait for the fourth. Each listens on a unix socket and on a TCP port; the hub listens too.
        until(lambda: len(addresses()) == 3 + 3 + 1)
        for address in addresses():
            for data in attacks(bomb).values():
                say(address, data)
            for _ in range(20):
                silent = stack.enter_context(connect(address))
                silent.sendall(b"F")
        job.kill(3, signal.SIGUSR1)
        assert job.wait(60) == 0, [job.stdout(rank) + job.stderr(rank) for rank in range(4)]
        reports = [json.loads(job.stdout(rank).splitlines()[-1]) for rank in range(4)]
        assert all(report["hosts"] == [0, 0, 1, 1] for report in reports), "no rank was forced away from shared memory"
        assert job.refused >= len(attacks(bomb)), "each was counted"
        assert not any(job.stderr(rank) for rank in range(4)), "no attack was logged"
    assert not os.path.exists(bomb)


def test_row_28_ranks_join_while_the_hub_has_too_many_unauthenticated_connections() -> None:
    with local_job(2) as job, contextlib.ExitStack() as stack:
        for _ in range(2 * listener.MAX_UNAUTHENTICATED):
            stack.enter_context(connect(job.hub.address)).sendall(b"F")
        with engines(job.join_all()) as stubs:
            greet(stubs)
        until(lambda: job.hub.refused >= listener.MAX_UNAUTHENTICATED)


def test_row_28_many_short_connections_while_ranks_join() -> None:
    with local_job(3, "tcp:127.0.0.1") as job:
        for turn in range(5):
            for _ in range(200):
                say(job.hub.address, b"")
            with engines(job.join_all(["a", "b", "b"])) as stubs:
                assert stubs[0].links.keys() == {1, 2}, turn
                greet(stubs)


def test_row_28_a_silent_connection_is_closed_after_two_seconds() -> None:
    with local_job(1) as job, connect(job.hub.address) as sock:
        began = time.monotonic()
        sock.sendall(b"F")
        assert sock.recv(1) == b"", "closed without a word"
        took = time.monotonic() - began
        assert took > HANDSHAKE_SECONDS - 0.1
        in_time(took, HANDSHAKE_SECONDS + 3, "the end of a silent unauthenticated connection")
        assert job.hub.refused == 1


def test_row_28_a_wrong_greeting_is_refused_after_92_bytes_and_nothing_is_kept() -> None:
    with local_job(1) as job:
        say(job.hub.address, bytes(100))  # loads everything that is loaded only once
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(300):
            with connect(job.hub.address) as sock:
                with contextlib.suppress(OSError):
                    sock.sendall(bytes(64 << 10))
                    # The hub reads 92 bytes and closes. The rest is unread, so the kernel may reset the connection.
                    answer = b""
                    while part := sock.recv(4096):
                        answer += part
                    assert len(answer) == GREETING_BYTES + PROOF_BYTES
        growth_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        until(lambda: job.hub.refused == 301)
        assert growth_kib <= 1024, f"{growth_kib} KiB"


def test_row_33_received_pickles_are_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = attacks(str(tmp_path / "bomb"))["pickle"]
    loaded: list[str] = []
    for name in ("loads", "load", "Unpickler"):
        monkeypatch.setattr(f"pickle.{name}", lambda *_: loaded.append("unpickled"))
    with local_job(1) as job:
        say(job.hub.address, bomb)
        until(lambda: job.hub.refused == 1)
        for number in range(20):  # as for a message that comes after the proof
            with contextlib.suppress(MessageError):
                decode(number, bomb)
        with engines(job.join_all()):
            pass
    assert not loaded and not os.path.exists(tmp_path / "bomb")


def test_row_29_every_refusal_sends_the_same_number_of_bytes(tmp_path: Path) -> None:
    """The hub answers any 92 wrong bytes with 92 bytes, and then closes the connection."""
    with local_job(2) as job:
        lengths = set()
        for name, data in attacks(str(tmp_path / "bomb")).items():
            if len(data) < GREETING_BYTES + PROOF_BYTES:
                continue
            with connect(job.hub.address) as sock:
                sock.sendall(data[: GREETING_BYTES + PROOF_BYTES])
                answer = b""
                while part := sock.recv(4096):
                    answer += part
                lengths.add(len(answer))
                assert len(answer) == GREETING_BYTES + PROOF_BYTES, name
        assert lengths == {GREETING_BYTES + PROOF_BYTES}


def test_a_damaged_frame_after_the_proof_ends_the_generation_but_not_the_hub() -> None:
    with local_job(2) as job:
        sessions = job.join_all()
        with engines(sessions) as stubs:
            channel = sessions[0]._channel
            assert channel is not None and isinstance(channel.sock, socket.socket)
            os.write(channel.sock.fileno(), bytes(100))
            stubs[1].wait_for(lambda: bool(stubs[1].revoked))
            assert stubs[1].revoked[0][1] == 0 and "damaged" in stubs[1].revoked[0][2]
            stubs[0].wait_for(lambda: bool(stubs[0].revoked))
        with engines(job.join_all()) as stubs:  # the hub still works
            greet(stubs)


def test_the_hub_listens_on_its_own_address_only() -> None:
    with local_job(1, "tcp:127.0.0.1") as job:
        port = int(job.hub.address.rpartition(":")[2])
        with socket.socket() as sock:
            sock.settimeout(2)
            with pytest.raises(OSError):
                sock.connect(("127.0.0.2", port))
