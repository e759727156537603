# Jobs from Python: results by rank, state that stays, errors with their traceback, workers that die.
# Touches processes.
from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import in_time, until

import farandole
from farandole.base.errors import RankFailed
from farandole.launch import calls, output, ssh
from farandole.launch.job import Job
from farandole.launch.plan import Plan
from farandole.launch.slots import rank_numbers
from farandole.rendezvous import agent_messages

pytestmark = pytest.mark.ranks


def total(x: float) -> tuple[int, int, float]:
    import numpy as np

    farandole.init()
    return farandole.rank(), farandole.size(), float(farandole.allreduce(np.full(1, x), op=farandole.Sum)[0])


def count() -> int:
    import builtins

    builtins.seen = getattr(builtins, "seen", 0) + 1  # type: ignore[attr-defined]
    return int(builtins.seen)  # type: ignore[attr-defined]


def test_run_gives_results_in_rank_order_and_shows_output(capfd: pytest.CaptureFixture[str]) -> None:
    def work(x: float) -> tuple[int, int, float]:
        print("working")
        return total(x)

    assert farandole.run(work, (2.0,), np=2) == [(0, 2, 4.0), (1, 2, 4.0)]
    assert "[1]<stdout>:working\n" in capfd.readouterr().out


class Mine(BaseException):
    """A class of a script."""


def fail_with(kind: str) -> None:
    farandole.init()
    if farandole.rank() == farandole.size() - 1:
        if kind == "exit":
            sys.exit(3)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise {"value": ValueError, "key": KeyError, "own": Mine}[kind]("of the rank")
    farandole.barrier()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("kind", "cause", "message"),
    [
        ("value", ValueError, "ValueError: of the rank"),
        ("key", KeyError, "KeyError: 'of the rank'"),
        ("own", Mine, "Mine: of the rank"),
        ("exit", RankFailed, "SystemExit: 3"),
        ("kill", RankFailed, "killed by SIGKILL"),
    ],
)
def test_run_fails_as_horovods_does(size: int, kind: str, cause: type[BaseException], message: str) -> None:
    with pytest.raises(
        RuntimeError, match="Horovod detected that one or more processes exited with non-zero"
    ) as caught:
        farandole.run(fail_with, (kind,), num_proc=size, verbose=False)
    error = caught.value
    assert isinstance(error, RankFailed) and error.rank == size - 1 and message in str(error)
    assert type(error.__cause__) is cause
    if kind not in ("kill", "exit"):
        assert "in fail_with" in str(error.__cause__.__cause__)


def test_errors_in_the_call_itself_are_raised_unchanged() -> None:
    with pytest.raises(TypeError, match="is not a function"):
        farandole.run(3, num_proc=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        farandole.run(threading.Lock().__enter__, num_proc=1)


@pytest.mark.parametrize(
    ("given", "env", "seconds"),
    [(None, {}, 30.0), (None, {"HOROVOD_START_TIMEOUT": "7"}, 7.0), (5.0, {"HOROVOD_START_TIMEOUT": "7"}, 5.0)],
)
def test_workers_may_take_as_long_as_start_timeout_to_start(
    given: float | None, env: dict[str, str], seconds: float
) -> None:
    assert farandole.Executor(1, env=env, start_timeout=given)._plan.start_timeout == seconds


def test_an_executor_keeps_state_and_serves_single_ranks() -> None:
    with farandole.Executor(2, verbose=False, env={"MINE": "7"}) as executor:
        assert executor.run(count) == [1, 1] == [value - 1 for value in executor.run(count)]
        assert executor.execute_single(count) == 3
        assert executor.submit(count, 1).result(20) == 3
        assert executor.run(os.getenv, ("MINE",)) == ["7", "7"]
        assert executor.run(total, kwargs={"x": 1.5}) == [(0, 2, 3.0), (1, 2, 3.0)]
        futures = executor.run_remote(count)
        assert [future.result(20) for future in futures] == [4, 4]
        size = 20 << 20
        assert len(executor.submit(bytes, 1, size).result(30)) == size, "large results pass"
        assert executor.submit(len, 0, bytes(size)).result(30) == size, "and large arguments"
        with pytest.raises(ValueError, match="rank=2"):
            executor.submit(count, 2)
        many = [executor.submit(count, 0) for _ in range(20)]
        assert [future.result(20) for future in many] == list(range(5, 25)), "in the order they were given"


def test_errors_have_the_workers_traceback_and_the_workers_keep_running() -> None:
    def work() -> None:
        farandole.init()
        if farandole.rank() == 1:
            raise LookupError("nothing there")
        farandole.barrier()  # never comes back by itself

    with farandole.Executor(2, verbose=False) as executor:
        with pytest.raises(LookupError, match="nothing there") as caught:
            executor.run(work)
        assert "rank 1: Traceback" in str(caught.value.__cause__) and "in work" in str(caught.value.__cause__)
        assert executor.run(count) == [1, 1]


def test_results_that_cannot_be_sent_and_errors_that_cannot_be_pickled() -> None:
    def odd() -> None:
        class Odd(Exception):
            def __init__(self) -> None:
                super().__init__("strange")
                self.lock = threading.Lock()

        raise Odd

    with farandole.Executor(1, verbose=False) as executor:
        with pytest.raises(TypeError):
            executor.run(threading.Lock)
        with pytest.raises(RankFailed, match="Odd: strange"):
            executor.run(odd)
        assert executor.run(count) == [1]
    with pytest.raises(TypeError, match="is not a function"):
        with farandole.Executor(1, verbose=False) as executor:
            executor.run(3)  # type: ignore[arg-type]


def fall() -> None:
    if os.environ["RANK"] == "1":
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # sleep: until it is killed


def test_a_worker_that_dies_is_named_and_ends_all() -> None:
    with farandole.Executor(2, verbose=False) as executor:
        with pytest.raises(RankFailed, match=r"rank 1 on localhost: killed by SIGKILL.*\n.*last words") as caught:
            executor.run(fall)
        assert (caught.value.rank, caught.value.code) == (1, 137)
        with pytest.raises(RankFailed):
            executor.run(count)


def test_output_that_is_written_late_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = output.Tails.feed

    def late(self: output.Tails, rank: int, stream: int, data: bytes) -> None:
        until(lambda: executor._job is not None and None not in executor._job.codes)
        feed(self, rank, stream, data)

    monkeypatch.setattr(output.Tails, "feed", late)

    with farandole.Executor(2, verbose=False) as executor:
        with pytest.raises(RankFailed, match="last words"):
            executor.run(fall)


def test_before_start_and_after_shutdown() -> None:
    executor = farandole.Executor(1, verbose=False)
    with pytest.raises(RuntimeError, match="start"):
        executor.run(count)
    executor.start()
    assert executor.start().run(count) == [1]
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RankFailed):
        executor.run(count)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"np": 0}, "at least one"),
        ({"hosts": "a:1", "hostfile": "f"}, "exclude"),
        ({"use_gloo": True, "use_mpi": True}, "exclude"),
        ({"use_mpi": True}, "horovodrun --mpi"),
        ({"np": 2, "min_num_proc": 3}, "--min-np 3"),
        ({"slots": 1}, "min_num_proc"),
        ({"min_num_proc": 1, "hosts": "a:1", "host_discovery_script": "s"}, "exclude"),
        ({"hosts": "localhost:1", "np": 2}, "only 1 slot .*write localhost:2,"),
        ({"start_timeout": float("nan")}, "start_timeout=nan"),
    ],
)
def test_bad_arguments(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        farandole.run(count, **more)


INTERRUPTED = """
import time, farandole
def work():
    print("working", flush=True)
    time.sleep(60)  # sleep: until it is interrupted
if __name__ == "__main__":
    with farandole.Executor(2) as executor:
        try:
            executor.run(work)
        except KeyboardInterrupt:
            print("interrupted", executor.run(int), flush=True)
"""
STUCK = """
import os, signal, farandole
if __name__ == "__main__":
    executor = farandole.Executor(2).start()
    pids = executor.run(os.getpid)
    os.kill(pids[1], signal.SIGSTOP)
    executor.submit(len, 1, bytes(60_000_000))
    [executor.submit(len, 0, bytes(1 << 20)).result(10) for _ in range(5)]
    print(*pids, flush=True)
    signal.pause()
"""


def started(folder: Path, text: str) -> subprocess.Popen[str]:
    """A script that runs; its output can be read."""
    script = folder / "script.py"
    script.write_text(text)
    return subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)


def test_ctrl_c_ends_the_work(tmp_path: Path) -> None:
    with started(tmp_path, INTERRUPTED) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert "working" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "interrupted [0, 0]\n"
        assert process.wait(60) == 0


def test_the_parts_of_a_message_are_joined() -> None:
    data = os.urandom(3 * calls.PIECE_BYTES + 1)
    parts = calls.Assembly()
    found = [parts.add(piece) for piece in calls.cut(1, 2, calls.RESULT, data)]
    assert found == [None, None, None, data]
    assert [parts.add(piece) for piece in calls.cut(1, 2, calls.RESULT, b"")] == [b""]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_rank_that_does_not_read_does_not_block_the_others() -> None:
    size = 60_000_000
    with farandole.Executor(2, verbose=False) as executor:
        pid = executor.submit(os.getpid, 1).result(20)
        os.kill(pid, signal.SIGSTOP)
        stuck = executor.submit(len, 1, bytes(size))
        assert [executor.submit(len, 0, bytes(4 << 20)).result(10) for _ in range(5)] == [4 << 20] * 5
        assert not stuck.done()
        os.kill(pid, signal.SIGCONT)
        assert stuck.result(30) == size
        os.kill(pid, signal.SIGSTOP)
        stuck = executor.submit(len, 1, bytes(size))
        assert executor.submit(count, 0).result(10) == 1
        began = time.monotonic()
    assert has_ended(pid)
    in_time(time.monotonic() - began, 5.0, "the end of an executor with a stopped rank")
    with pytest.raises(RankFailed, match="shut down"):
        stuck.result(0)


def test_a_launcher_that_is_killed_while_a_rank_does_not_read_leaves_nothing(tmp_path: Path) -> None:
    with started(tmp_path, STUCK) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        pids += [parent(pids[0]), parent(parent(pids[0]))]
        assert pids[3] != process.pid == parent(pids[3]), "agent and guard"
        process.kill()
        until(lambda: all(has_ended(pid) for pid in pids), timeout=5.0)


def test_large_arguments_reach_a_worker_that_starts_slowly(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    program = tmp_path / "python"
    wait, start = f"read -r _ < {shlex.quote(str(gate))}", f"exec {shlex.quote(sys.executable)}"
    program.write_text(f'#!/bin/sh\n[ $RANK = 0 ] || {wait}\n{start} "$@"\n')
    program.chmod(0o755)
    with farandole.Executor(2, verbose=False, executable=str(program)) as executor:
        slow = executor.submit(len, 1, bytes(40 << 20))
        assert executor.submit(len, 0, bytes(40 << 20)).result(30) == 40 << 20
        assert not slow.done()
        gate.write_text("go\n")
        assert slow.result(30) == 40 << 20


def test_a_worker_that_exits_without_a_result() -> None:
    def leave() -> None:
        sys.exit(3)

    with farandole.Executor(2, verbose=False) as executor:
        with pytest.raises(RankFailed, match="rank 1: SystemExit: 3") as caught:
            executor.submit(leave, 1).result(10)
        assert "in leave" in str(caught.value.__cause__)
        assert executor.submit(count, 1).result(10) == 1, "it stays"
        futures = [executor.submit(os._exit, 1, 0), executor.submit(count, 1)]
        for future in futures:
            with pytest.raises(RankFailed, match="rank 1: exit code 0 before it answered"):
                future.result(10)
        with pytest.raises(RankFailed, match="exit code 0"):
            executor.submit(count, 1).result(10)
        assert executor.submit(count, 0).result(10) == 1, "the other one stays too"


def test_a_worker_that_loses_its_channel_is_ended_with_the_reason() -> None:
    def close_all() -> None:
        os.closerange(3, 1024)
        time.sleep(60)  # sleep: until it is killed

    with farandole.Executor(1, verbose=False) as executor:
        with pytest.raises(RankFailed, match="its channel for calls was lost: the connection was closed"):
            executor.submit(close_all, 0).result(20)


def test_errors_of_earlier_calls_are_not_raised_again() -> None:
    def fail() -> None:
        raise LookupError("of an old call")

    with farandole.Executor(1, verbose=False) as executor:
        for _ in range(30):
            assert isinstance(executor.submit(fail, 0).exception(10), LookupError)
        with pytest.raises(RankFailed, match="exit code 3"):
            executor.run(os._exit, (3,))


def test_the_error_of_the_one_that_ended_is_raised_not_those_of_the_interrupted() -> None:
    def work() -> None:
        if os.environ["RANK"] == "1":
            os._exit(0)
        time.sleep(60)  # sleep: until it is interrupted

    with farandole.Executor(2, verbose=False) as executor:
        with pytest.raises(RankFailed, match="rank 1: exit code 0 before it answered"):
            executor.run(work)
        assert executor.submit(count, 0).result(10) == 1


# A rank that says hello as workers do and, with all others, sends one piece as large as a message may be.
PIECE = """
import os, pathlib, sys, time
from farandole.rendezvous import agent_messages, sockets
from farandole.rendezvous.channel import Channel
from farandole.rendezvous.flow import Loop
from farandole.rendezvous.handshake import NOBODY, Greeting, Role, call
from farandole.rendezvous.secret import Secret
rank, loop = int(os.environ["RANK"]), Loop()
sock = sockets.inherited(int(os.environ["FARANDOLE_CALLS_FD"]))
secret = Secret.read(int(os.environ["FARANDOLE_SECRET_FD"]))
proven = loop.finish(call(sock, secret, Greeting(Role.WORKER, rank, NOBODY), Role.HUB), time.monotonic() + 60)
channel = Channel(loop, sock, proven, print, print, codec=agent_messages)
pathlib.Path(sys.argv[1], str(rank)).touch()
while not pathlib.Path(sys.argv[1], "go").exists():
    time.sleep(0.01)  # sleep: looks for the gate
channel.send(agent_messages.Call(rank, 1, 1, 1, bytes(1000 << 10)))
while True:
    loop.turn()
"""


def test_many_results_at_once_are_not_lost(tmp_path: Path) -> None:
    size = 24  # times a piece is more than an agent may have on its way
    received: list[int] = []

    def on_call(piece: agent_messages.Call) -> None:
        if not received:
            time.sleep(1.0)  # sleep: long enough for an agent to take all of it, if it did
        received.append(piece.rank)

    plan = Plan(
        command=[sys.executable, "-c", PIECE, str(tmp_path)],
        numbers=rank_numbers(["localhost"] * size),
        hosts=[""] * size,
        environ={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        directory=os.getcwd(),
        connector=ssh.SshOptions(sys.executable, ""),
        calls=True,
    )
    with Job(plan, output.MemorySink(size), on_call=on_call) as job:
        until(lambda: len(list(tmp_path.iterdir())) == size, timeout=30.0)
        (tmp_path / "go").touch()
        until(lambda: len(received) == size or job.failure is not None, timeout=30.0)
        assert sorted(received) == list(range(size)), job.reason
