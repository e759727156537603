# Rows 28 and 33: strangers at every listening socket, while real ranks join and at the hub alone.
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
    with start_ranks("wait", 4, hosts=["a", "a", "b", "b"]) as job, contextlib.ExitStack() as held:
        directory = job.directory

        def ears() -> list[str]:
            found = listening([*job.pids, os.getpid()])
            assert all(one.startswith("tcp:127.0.0.1:") for one in found), f"not on loopback alone: {found}"
            return found + [f"unix:{directory}/{name}" for name in os.listdir(directory)]

        until(lambda: "ready" in job.stdout(3))
        # Three ranks wait, each with a unix socket and a TCP port; and there is the hub.
        until(lambda: len(ears()) == 3 + 3 + 1)
        for address in ears():
            for data in attacks(bomb).values():
                say(address, data)
            for _ in range(20):
                loris = held.enter_context(connect(address))
                loris.sendall(b"F")
        job.kill(3, signal.SIGUSR1)
        assert job.wait(60) == 0, [job.stdout(rank) + job.stderr(rank) for rank in range(4)]
        found = [json.loads(job.stdout(rank).splitlines()[-1]) for rank in range(4)]
        assert all(one["hosts"] == [0, 0, 1, 1] for one in found), "nobody was driven away from shared memory"
        assert job.refused >= len(attacks(bomb)), "each was counted"
        assert not any(job.stderr(rank) for rank in range(4)), "nobody was logged"
    assert not os.path.exists(bomb)


def test_row_28_a_crowd_at_the_hub_does_not_keep_ranks_out() -> None:
    with local_job(2) as place, contextlib.ExitStack() as held:
        for _ in range(2 * listener.MAX_UNAUTHENTICATED):
            held.enter_context(connect(place.hub.address)).sendall(b"F")
        with engines(place.join_all()) as stubs:
            greet(stubs)
        until(lambda: place.hub.refused >= listener.MAX_UNAUTHENTICATED)


def test_row_28_a_flood_of_connections_while_ranks_join() -> None:
    with local_job(3, "tcp:127.0.0.1") as place:
        for turn in range(5):
            for _ in range(200):
                say(place.hub.address, b"")
            with engines(place.join_all(["a", "b", "b"])) as stubs:
                assert stubs[0].links.keys() == {1, 2}, turn
                greet(stubs)


def test_row_28_a_slow_stranger_has_two_seconds() -> None:
    with local_job(1) as place, connect(place.hub.address) as sock:
        began = time.monotonic()
        sock.sendall(b"F")
        assert sock.recv(1) == b"", "closed without a word"
        took = time.monotonic() - began
        assert took > HANDSHAKE_SECONDS - 0.1
        in_time(took, HANDSHAKE_SECONDS + 3, "the end of a stranger that says no more")
        assert place.hub.refused == 1


def test_row_28_no_more_than_96_bytes_are_read_and_nothing_is_kept() -> None:
    with local_job(1) as place:
        say(place.hub.address, bytes(100))  # whatever is loaded once is loaded now
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(300):
            with connect(place.hub.address) as sock:
                with contextlib.suppress(OSError):
                    sock.sendall(bytes(64 << 10))
                    # Refused after 92 bytes; with the rest unread, the kernel may say so as a reset.
                    answer = b""
                    while part := sock.recv(4096):
                        answer += part
                    assert len(answer) == GREETING_BYTES + PROOF_BYTES
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        until(lambda: place.hub.refused == 301)
        assert grown <= 1024, f"{grown} KiB"


def test_row_33_bombs_are_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = attacks(str(tmp_path / "bomb"))["pickle"]
    reached: list[str] = []
    for name in ("loads", "load", "Unpickler"):
        monkeypatch.setattr(f"pickle.{name}", lambda *_: reached.append("unpickled"))
    with local_job(1) as place:
        say(place.hub.address, bomb)
        until(lambda: place.hub.refused == 1)
        for number in range(20):  # and not even after a proof
            with contextlib.suppress(MessageError):
                decode(number, bomb)
        with engines(place.join_all()):
            pass
    assert not reached and not os.path.exists(tmp_path / "bomb")


def test_row_29_every_refusal_takes_the_same_bytes(tmp_path: Path) -> None:
    """Whatever 92 bytes a stranger sends, it sees 92 bytes and the end."""
    with local_job(2) as place:
        seen = set()
        for name, data in attacks(str(tmp_path / "bomb")).items():
            if len(data) < GREETING_BYTES + PROOF_BYTES:
                continue
            with connect(place.hub.address) as sock:
                sock.sendall(data[: GREETING_BYTES + PROOF_BYTES])
                answer = b""
                while part := sock.recv(4096):
                    answer += part
                seen.add(len(answer))
                assert len(answer) == GREETING_BYTES + PROOF_BYTES, name
        assert seen == {GREETING_BYTES + PROOF_BYTES}


def test_a_garbage_frame_after_the_proof_ends_that_rank_alone() -> None:
    with local_job(2) as place:
        sessions = place.join_all()
        with engines(sessions) as stubs:
            channel = sessions[0]._channel
            assert channel is not None and isinstance(channel.sock, socket.socket)
            os.write(channel.sock.fileno(), bytes(100))
            stubs[1].wait_for(lambda: bool(stubs[1].revoked))
            assert stubs[1].revoked[0][1] == 0 and "damaged" in stubs[1].revoked[0][2]
            stubs[0].wait_for(lambda: bool(stubs[0].revoked))
        with engines(place.join_all()) as stubs:  # the hub is well
            greet(stubs)


def test_loopback_alone_is_listened_on() -> None:
    with local_job(1, "tcp:127.0.0.1") as place:
        port = int(place.hub.address.rpartition(":")[2])
        with socket.socket() as sock:
            sock.settimeout(2)
            with pytest.raises(OSError):
                sock.connect(("127.0.0.2", port))
