# Observing a job: a timeline from any rank and its summary, the warning of the reference engine, and an idle job.
# Touches farandole.launch, the package as users see it, and the command line.
"""What a user sees of a job of real ranks from outside."""

from __future__ import annotations

import json
from pathlib import Path

import jobs
import pytest
import waiting
from world import ENGINES

from farandole.launch import cli

needs_native = pytest.mark.skipif("native" not in ENGINES, reason="the native library is not built")

STEPS = """
hvd.init()
if rank == TRACED:
    hvd.start_timeline(PLACE)
for step in range(10):
    if rank == 1 - TRACED:
        time.sleep(0.005)  # sleep: the rank that the other one waits for
    handles = [hvd.allreduce_async(np.ones(100), name=f"layer.{layer}") for layer in range(6)]
    for handle in handles:
        hvd.synchronize(handle)
if rank == TRACED:
    hvd.stop_timeline()
report(there=os.path.exists(PLACE))
hvd.shutdown()
"""


@needs_native
@pytest.mark.parametrize("traced", [0, 1])
def test_the_timeline_of_any_rank_has_a_summary_of_ten_lines(
    traced: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    jobs.run(f"TRACED, PLACE = {traced}, {str(path)!r}\n" + STEPS, 2)
    events = json.loads(path.read_text())
    names = {event.get("name") for event in events}
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "QUEUE"} <= names, names
    phases = {"B", "E", "M"} | ({"X"} if traced == 0 else set())  # only the coordinator sees the others report
    assert phases <= {event["ph"] for event in events}
    assert cli.main(["trace", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    shares = {line.split()[0]: float(line.split()[3]) for line in lines[1:4]}
    assert list(shares) == ["computing", "waiting", "moving"]
    assert "perfetto" in lines[-1]
    if shares["waiting"] <= 50.0:  # it waits for the other rank, which sleeps; or the machine was too busy for both
        raise waiting.TooSlow(f"most time was not spent waiting: {lines}")


def test_the_specification_announces_itself_once() -> None:
    with jobs.start("hvd.init(); hvd.barrier(); hvd.shutdown()", 2, env={"FARANDOLE_ENGINE": "python"}) as job:
        assert job.wait(60) == 0
        output = [job.stderr(rank).count("the Python reference engine is in use") for rank in range(2)]
    assert output == [1, 0]


@needs_native
def test_an_idle_job_does_not_wake_up() -> None:
    """Below 0.5 % of a processor and 10 context switches a second, over 3 s in which nothing is asked for."""
    body = """
import resource
hvd.init()
for _ in range(5):
    hvd.allreduce(np.ones(1000), name="x")
hvd.barrier()
time.sleep(0.2)  # sleep: what the last step leaves to do is done
def now():
    use = resource.getrusage(resource.RUSAGE_SELF)
    return use.ru_utime + use.ru_stime, use.ru_nvcsw + use.ru_nivcsw
before = now()
time.sleep(3.0)  # sleep: the time that is measured
after = now()
hvd.shutdown()
report(cpu_percent=100 * (after[0] - before[0]) / 3, switches_per_s=(after[1] - before[1]) / 3)
"""
    for found in jobs.run(body, 2):
        assert found["cpu_percent"] < 0.5 and found["switches_per_s"] < 10, found


MARKS = """
hvd.init()
if rank == 0:
    hvd.start_timeline(PLACE, mark_cycles=MARKED)
longest = 0.0
for step in range(8):
    hvd.allreduce(np.ones(100), name=f"once.{step}")  # a new name each time: no step repeats, so there is no plan
    ended = time.monotonic()
    while rank == 0 and f'once.{step}"' not in open(PLACE).read():
        time.sleep(0.002)  # sleep: until the event is in the file
    longest = max(longest, time.monotonic() - ended)
events = []
if rank == 0:
    hvd.stop_timeline()
    events = json.load(open(PLACE))
report(seconds=longest, marks=[event for event in events if event.get("name") == "CYCLE_START"],
       planned=engine().counter("planned_buckets"))
hvd.shutdown()
"""


@needs_native
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("marked", [True, False])
def test_events_are_in_the_file_at_once_and_buckets_are_marked_without_a_plan(
    size: int, marked: bool, tmp_path: Path
) -> None:
    found = jobs.run(f"MARKED, PLACE = {marked}, {str(tmp_path / 'trace.json')!r}\n" + MARKS, size)
    assert found[0]["planned"] == 0 and len(found[0]["marks"]) == (8 if marked else 0), found[0]
    assert all((event["ph"], event["s"]) == ("i", "g") for event in found[0]["marks"])
    waiting.in_time(found[0]["seconds"], 0.1, "an event of the timeline")
