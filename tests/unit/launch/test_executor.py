# Jobs from Python: results by rank, state that stays, errors with their traceback, workers that die.
# Touches processes.
from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import farandole
from farandole.errors import RankFailed
from farandole.launch import calls

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


def test_errors_come_with_the_workers_traceback_and_the_workers_stay() -> None:
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
            def __reduce__(self) -> Any:
                raise RuntimeError

        raise Odd("strange")

    with farandole.Executor(1, verbose=False) as executor:
        with pytest.raises(TypeError):
            executor.run(threading.Lock)
        with pytest.raises(RankFailed, match="Odd: strange"):
            executor.run(odd)
        assert executor.run(count) == [1]
    with pytest.raises(TypeError, match="is no function"):
        with farandole.Executor(1, verbose=False) as executor:
            executor.run(3)  # type: ignore[arg-type]


def test_a_worker_that_dies_is_named_and_ends_all() -> None:
    def fall() -> None:
        if os.environ["RANK"] == "1":
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with farandole.Executor(2, verbose=False) as executor:
        with pytest.raises(RankFailed, match=r"rank 1 on localhost: killed by SIGKILL.*\n.*last words") as caught:
            executor.run(fall)
        assert (caught.value.rank, caught.value.code) == (1, 137)
        with pytest.raises(RankFailed):
            executor.run(count)


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
    ("more", "said"),
    [
        ({"np": 0}, "at least one"),
        ({"hosts": "a:1", "hostfile": "f"}, "exclude"),
        ({"use_gloo": True, "use_mpi": True}, "exclude"),
        ({"use_mpi": True}, "horovodrun --mpi"),
        ({"min_num_proc": 1}, "elastic"),
        ({"hosts": "localhost:1", "np": 2}, "only 1 slots"),
    ],
)
def test_bad_arguments(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        farandole.run(count, **more)


def test_ctrl_c_ends_the_work(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time, farandole\n"
        "def work():\n"
        "    print('working', flush=True)\n"
        "    time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    with farandole.Executor(2) as executor:\n"
        "        try:\n"
        "            executor.run(work)\n"
        "        except KeyboardInterrupt:\n"
        "            print('interrupted', executor.run(int), flush=True)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert "working" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "interrupted [0, 0]\n"
        assert process.wait(10) == 0


def test_pieces_are_put_together() -> None:
    data = os.urandom(3 * calls.PIECE_BYTES + 1)
    parts = calls.Assembly()
    found = [parts.add(piece) for piece in calls.cut(1, 2, calls.RESULT, data)]
    assert found == [None, None, None, data]
    assert [parts.add(piece) for piece in calls.cut(1, 2, calls.RESULT, b"")] == [b""]
