# A rank's life through the public API, in real processes: init and shutdown, forks, signals, the timeline.
# Touches farandole.launch and the package as users see it.
"""What users do with a process that is a rank, and what must still work afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jobs
import pytest
from waiting import in_time
from world import ENGINES

HOSTS = {"shm": ["one", "one"], "tcp": ["one", "two"]}
ENGINE = {"native": {}, "python": {"FARANDOLE_ENGINE": "python"}}


def alone(body: str) -> dict[str, object]:
    """A world of one, without a launcher."""
    code = "import os; os.environ.setdefault('FARANDOLE_RANK', '0')\n" + jobs.PRELUDE + body
    env = {**os.environ, "PYTHONPATH": jobs.SOURCE}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_before_init_after_shutdown_and_two_inits(engine: str) -> None:
    body = """
def refused(call):
    try:
        call()
    except ValueError as error:
        return "initialized" in str(error)
    return False
calls = [hvd.rank, hvd.size, hvd.local_rank, hvd.barrier, hvd.join, lambda: hvd.allreduce(np.ones(3)),
         lambda: hvd.broadcast(np.ones(3), 0), hvd.stop_timeline]
before = [refused(call) for call in calls]
hvd.shutdown()  # without init: nothing
hvd.init()
hvd.init()  # again: nothing
ones = hvd.allreduce(np.ones(3), op=hvd.Sum).tolist()
late = hvd.allreduce_async(np.ones(3))
hvd.shutdown()
hvd.shutdown()
after = [refused(call) for call in calls] + [refused(lambda: hvd.synchronize(late))]
report(before=all(before), after=all(after), ones=ones, initialized=hvd.is_initialized())
"""
    env = ENGINE[engine]
    os.environ.update(env)
    try:
        assert alone(body) == {"before": True, "after": True, "ones": [1.0] * 3, "initialized": False}
    finally:
        for name in env:
            del os.environ[name]


@pytest.mark.parametrize("links", HOSTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_operation_of_the_public_api(engine: str, links: str) -> None:
    body = """
hvd.init(process_sets=[[0], [1]])
size = hvd.size()
x = np.arange(6, dtype=np.float32).reshape(3, 2) + rank
checks = {
    "sum": np.array_equal(hvd.allreduce(x, op=hvd.Sum), sum(np.arange(6).reshape(3, 2) + r for r in range(size))),
    "average": np.allclose(hvd.allreduce(x), np.arange(6).reshape(3, 2) + 0.5),
    "gather": hvd.allgather(np.full((rank + 1, 2), rank)).tolist() == [[0, 0], [1, 1], [1, 1]],
    "broadcast": hvd.broadcast(x, 1).tolist() == (np.arange(6).reshape(3, 2) + 1).tolist(),
    "alltoall": hvd.alltoall(np.array([rank * 10, rank * 10 + 1])).tolist() == [rank, 10 + rank],
    "scatter": hvd.reducescatter(np.arange(3.0), op=hvd.Sum).tolist() == ([0.0, 2.0] if rank == 0 else [4.0]),
    "object": hvd.broadcast_object({"from": rank}, 1) == {"from": 1},
    "grouped": [a.tolist() for a in hvd.grouped_allreduce([np.ones(2), np.ones(3)], op=hvd.Sum)] == [[2, 2], [2, 2, 2]],
}
if rank == 0:
    hvd.send(np.arange(4), 1, tag=7)
else:
    checks["receive"] = hvd.recv(np.zeros(4, np.int64), 0, tag=7).tolist() == [0, 1, 2, 3]
hvd.barrier()
checks["join"] = hvd.join() in (0, 1)
hvd.shutdown()
report(failed=[name for name, good in checks.items() if not good])
"""
    assert jobs.run(body, 2, HOSTS[links], env=ENGINE[engine]) == [{"failed": []}] * 2


needs_native = pytest.mark.skipif("native" not in ENGINES, reason="the native library is not built")
native_links = pytest.mark.parametrize("links", [pytest.param(name, marks=needs_native) for name in HOSTS])


@native_links
def test_two_hundred_worlds_in_one_process(links: str) -> None:
    body = """
def alive(task):
    # A joined thread may be listed for a moment; the kernel has marked it as exiting (PF_EXITING) before the join.
    try:
        words = open(f"/proc/self/task/{task}/stat").read().rpartition(")")[2].split()
    except OSError:
        return False
    return not int(words[6]) & 4
def belongings():
    counts = []
    for _ in range(20):
        counts.append(sum(map(alive, os.listdir("/proc/self/task"))))
        time.sleep(0.01)  # sleep: a thread that Python has joined may not have ended yet
    threads = min(counts)
    resident = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
    return len(os.listdir("/proc/self/fd")), threads, resident
for life in range(200):
    hvd.init()
    assert hvd.allreduce(np.full(1000, float(life)), op=hvd.Sum)[0] == 2 * life
    hvd.shutdown()
    if life == 40:
        early = belongings()
late = belongings()
report(descriptors=late[0] - early[0], threads=late[1] - early[1], resident=late[2] - early[2])
"""
    for found in jobs.run(body, 2, HOSTS[links], timeout=100.0):
        assert (found["descriptors"], found["threads"]) == (0, 0)
        assert found["resident"] < 4 << 20, "160 lives may not cost 4 MiB"


@native_links
def test_a_rank_that_leaves_late_does_not_disturb_the_next_init(links: str) -> None:
    """Rank 0 is in its next init already while rank 1 still holds its old engine."""
    body = """
for life in range(5):
    hvd.init()
    hvd.barrier()
    if rank == 1:
        late = hvd.allreduce_async(np.ones(3), name="late")
        try:
            hvd.synchronize(late, timeout=20.0)
        except ShutDown:
            pass
        else:
            raise AssertionError("rank 0 has left, but its part arrived")
    hvd.shutdown()
hvd.init()
report(sum=float(hvd.allreduce(np.ones(3), op=hvd.Sum)[0]))
hvd.shutdown()
"""
    assert jobs.run(body, 2, HOSTS[links]) == [{"sum": 2.0}] * 2


@native_links
def test_the_last_operation_completes_although_a_peer_shuts_down_early(links: str) -> None:
    """Ranks shut down as soon as their last operation is done: every rank must get its result."""
    body = """
for life in range(30):
    hvd.init()
    hvd.allreduce(np.ones(20_000), op=hvd.Sum, name="last")
    hvd.shutdown()
report(good=True)
"""
    assert jobs.run(body, 3, [*HOSTS[links], "one"], timeout=60.0) == [{"good": True}] * 3


@native_links
def test_forked_children_are_harmless(links: str) -> None:
    body = """
import multiprocessing
hvd.init()
def use():
    try:
        hvd.allreduce(np.ones(3), name="x")
    except (HorovodInternalError, ValueError):
        os._exit(7)
    os._exit(8)
def leave():
    hvd.shutdown()
    os._exit(9)
def end_normally():
    sys.exit(10)  # runs atexit handlers, and the engine's destructor
codes = []
for work in (use, leave, end_normally):
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(10) if work is end_normally else os._exit(11)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert hvd.allreduce(np.ones(100_000), op=hvd.Sum, name="x")[0] == 2
with multiprocessing.get_context("fork").Pool(2) as pool:
    squares = pool.map(abs, range(-3, 3))
    total = hvd.allreduce(np.ones(100_000), op=hvd.Sum, name="x")[0]
def streams():
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith(("socket:", "/memfd:")) for link in links if os.path.islink(link))
mine = streams()
child = os.fork()
if child == 0:
    os._exit(streams())
held = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) < mine
hvd.shutdown()
report(codes=codes, squares=squares, total=float(total), held=held)  # fewer streams than the parent has
"""
    expected = {"codes": [7, 9, 10], "squares": [3, 2, 1, 0, 1, 2], "total": 2.0, "held": True}
    assert jobs.run(body, 2, HOSTS[links]) == [expected] * 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1], ids=lambda number: signal.Signals(number).name)
def test_signal_handlers_run_in_a_stalled_wait(engine: str, number: int) -> None:
    """Rank 0 waits for what rank 1 never submits; the handler runs at once, and the job can be left."""
    body = """
hvd.init()
class Heard(Exception): pass
def hear(*_): raise Heard
signal.signal(signal.SIGUSR1, hear)
hvd.barrier()
try:
    report(waiting=True)
    hvd.allreduce(np.ones(3), name=f"stalled.{rank}")
except (KeyboardInterrupt, Heard):
    report(heard=time.monotonic())
except ShutDown:
    report(heard=None)
hvd.shutdown()
"""
    with jobs.start(body, 2, env=ENGINE[engine]) as job:
        jobs.look_until(lambda: all(jobs.results(job, rank) for rank in range(2)), job)
        sent = time.monotonic()
        job.kill(0, number)
        assert job.wait(60) == 0, job.stderr(0) + job.stderr(1)
        in_time(jobs.results(job, 0)[-1]["heard"] - sent, 1.0, "hearing a signal in a stalled wait")
        assert jobs.results(job, 1)[-1] == {"heard": None}


@needs_native
def test_too_few_descriptors_is_an_error_and_not_a_crash() -> None:
    body = """
import resource
if rank == 1:
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
try:
    hvd.init()
    hvd.allreduce(np.ones(3))
    hvd.shutdown()
    report(error=None)
except Exception as error:
    report(error=type(error).__name__, text=str(error))
"""

    def one(limit: int) -> bool:
        with jobs.start(f"LIMIT = {limit}\n" + body, 2, env={"FARANDOLE_START_TIMEOUT": "3"}) as job:
            job.wait(60)
            found = [jobs.last_result(job, rank) for rank in range(2)]
            assert None not in found, (limit, job.codes, job.stderr(0), job.stderr(1))
            assert job.codes == [0, 0], (limit, job.codes, job.stderr(0), job.stderr(1))
            return found[1]["error"] is not None

    with ThreadPoolExecutor(4) as pool:
        refused = list(pool.map(one, (6, 9, 12, 15)))
    assert any(refused), "the limits were too generous to test anything"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_timeline_is_valid_json_at_all_times(engine: str, tmp_path: Path) -> None:
    body = f"""
hvd.init()
place = {str(tmp_path / "trace")!r} + str(rank)
def events():
    with open(place) as file:
        return json.load(file)
hvd.start_timeline(place)
for step in range(20):
    hvd.allreduce(np.ones(100), name="gradient")
    hvd.allgather(np.ones(3), name="rows")
    if step % 5 == 0:
        events()
hvd.stop_timeline()
first = events()
hvd.start_timeline(place)  # again, over the old one
hvd.broadcast(np.ones(3), 0, name="weights")
hvd.stop_timeline()
second = events()
hvd.allreduce(np.ones(3))  # untraced
hvd.shutdown()
text = json.dumps(first)
report(kinds=[kind in text for kind in ("ALLREDUCE", "ALLGATHER", "gradient")], again="weights" in json.dumps(second),
       quiet=second == events())
"""
    expected = {"kinds": [True] * 3, "again": True, "quiet": True}
    assert jobs.run(body, 2, env=ENGINE[engine]) == [expected] * 2


@needs_native
def test_the_timeline_of_a_killed_rank_is_valid_json(tmp_path: Path) -> None:
    body = f"""
hvd.init()
hvd.start_timeline({str(tmp_path / "trace")!r} + str(rank))
try:
    while True:
        hvd.allreduce(np.ones(1000), name="gradient")
        if rank == 1: report(alive=True)
except PeerLost as error:
    report(lost=error.rank)
hvd.shutdown()
"""
    with jobs.start(body, 2) as job:
        jobs.look_until(lambda: len(jobs.results(job, 1)) > 200, job)
        job.kill(1)
        job.wait(60)
        assert jobs.results(job, 0)[-1] == {"lost": 1}
    for rank in range(2):
        assert isinstance(json.loads((tmp_path / f"trace{rank}").read_text()), list)
