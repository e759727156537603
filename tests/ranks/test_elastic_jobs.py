# Elastic jobs on one host: kills, stops, growth, removal, agents and launchers that die, drains. Real processes.
# Touches the launcher as users type it.
"""The name of each test has its rows of docs/faults.md. Nearly all measurements keep the limit, all keep the bound."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from elastic import LONG, SOURCE, ElasticJob, alive, children_of, discover, kill, parent_of
from waiting import in_time, until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(180)]
DETECT_S, RECOVER_S, REPLACE_S = 0.1, 1.0, 3.0
LATEST = 10.0  # times the limit, where a busy machine took its time


def mostly(values: list[float], limit: float) -> None:
    """Most measurements keep the limit, and none is far above it; only `make chaos` has enough of them for a p99."""
    in_time(sorted(values)[len(values) // 2], limit, f"the median of {sorted(values)}")
    in_time(max(values), LATEST * limit, f"the last of {sorted(values)}")


def after_a_loss(
    job: ElasticJob, moment: float, before: dict[int, dict[str, Any]], lost: set[int]
) -> tuple[list[float], list[float]]:
    """How long survivors took to detect the loss, and to be in a world without the lost ranks."""
    survivors = {event["pid"] for event in before.values()} - lost
    generation = next(iter(before.values()))["generation"]
    job.world(len(survivors), generation) if len(job.members()) != len(before) else None
    knew, went_on = [], []
    for pid in survivors:
        knew += [next(e["t"] for e in job.of(pid, "lost") if e["t"] > moment) - moment]
        went_on += [next(e["t"] for e in job.of(pid, "world") if e["t"] > moment) - moment]
    return knew, went_on


def test_rows_1_and_3_kill_9_of_any_rank(tmp_path: Path) -> None:
    """Survivors detect the loss at once, continue in their processes, and the world is full again by itself."""
    detect, recover, replace = [], [], []
    with ElasticJob(["-np", "3", "--min-np", "1"], tmp_path, {"JOB_CHILDREN": "1"}) as job:
        full = job.world(3)
        for rank in (1, 2, 0, 0, 1, 2):
            victim = full[rank]["pid"]
            others = {event["pid"] for event in full.values()} - {victim}
            step = max(event["step"] for event in full.values())
            generation = full[0]["generation"]
            moment = kill(victim)
            small = job.world(2, generation)
            assert {event["pid"] for event in small.values()} == others  # the same processes
            assert all(event["step"] >= step for event in small.values())
            knew, went_on = after_a_loss(job, moment, full, {victim})
            detect += knew
            recover += went_on
            full = job.world(3, small[0]["generation"])
            [new] = [event for event in full.values() if event["pid"] not in others]
            replace.append(max(event["t"] for event in full.values()) - moment - job.import_seconds(new["pid"]))
            assert alive(new["pid"]) and not alive(victim)
        print(f"detect {max(detect):.3f} s, recover {max(recover):.3f} s, full {max(replace):.2f} s beside imports")
        mostly(detect, DETECT_S)
        mostly(recover, RECOVER_S)
        mostly(replace, REPLACE_S)
        blamed = {event["blames"] for event in job.events if event["event"] == "lost"}
        assert blamed == {0, 1, 2}
        job.finish()


def test_row_2_several_at_once_and_again_during_recovery(tmp_path: Path) -> None:
    with ElasticJob(["-np", "4", "--min-np", "1"], tmp_path) as job:
        full = job.world(4)
        for rank in (1, 2, 3):
            kill(full[rank]["pid"])
        moment = time.monotonic()
        small = job.world(1, full[0]["generation"])
        assert small[0]["pid"] == full[0]["pid"]
        in_time(small[0]["t"] - moment, 2.0, "a world of one after three deaths at once")
        full = job.world(4, small[0]["generation"])
        kill(full[0]["pid"])  # and the next one as soon as a survivor has detected it
        job.wait(lambda: any(e["generation"] >= 0 for e in job.of(full[1]["pid"], "world")))
        job.wait(lambda: job.of(full[1]["pid"], "lost")[-1:] and job.of(full[1]["pid"], "lost")[-1]["t"] > 0)
        moment = kill(full[2]["pid"])
        again = job.world(4, full[0]["generation"])
        assert {full[1]["pid"], full[3]["pid"]} <= {event["pid"] for event in again.values()}
        job.finish()


def test_row_5_a_stopped_rank_is_evicted_fenced_and_rejoins(tmp_path: Path) -> None:
    """Also if it has something to save: that its connection was closed does not mean that the launcher has died."""
    (tmp_path / "saves").mkdir()
    with ElasticJob(["-np", "3", "--min-np", "1"], tmp_path, {"JOB_SAVES": str(tmp_path / "saves")}) as job:
        full = job.world(3)
        victim = full[1]["pid"]
        moment = kill(victim, signal.SIGSTOP)
        small = job.world(2, full[0]["generation"])
        evicted = min(e["t"] for pid in (full[0]["pid"], full[2]["pid"]) for e in job.of(pid, "lost")) - moment
        print(f"evicted after {evicted:.2f} s")
        assert evicted >= 4.5
        in_time(evicted, 5.5, "the eviction of a stopped rank")
        assert job.lines_with("no sign of life for 2") and job.lines_with("evicted")
        ahead = small[0]["step"]
        os.kill(victim, signal.SIGCONT)
        full = job.world(3, small[0]["generation"])
        [back] = [event for event in full.values() if event["pid"] == victim]
        assert back["step"] >= ahead and back["hash"] == full[0]["hash"]  # it took theirs, they nothing of it
        job.finish()
    assert not list((tmp_path / "saves").iterdir())


def test_rows_7_and_37_a_rank_that_only_seems_dead_is_not_evicted(tmp_path: Path) -> None:
    """The GIL held for longer than eviction takes; all frozen at once; a debugger attached to one."""
    held = 70 if LONG else 7
    arguments = ["-np", "2", "--min-np", "1", *([] if LONG else ["--stall-note-seconds", "2"])]
    with ElasticJob(arguments, tmp_path, {"JOB_GIL": str(held)}) as job:
        full = job.world(2)
        job.orders.write_text(f"gil {full[1]['pid']}")
        job.wait(lambda: job.of(full[1]["pid"], "gil"), 20)
        moment = time.monotonic()
        job.wait(lambda: any("rank 1" in line and "step" in line for line in job.lines), held)
        # Reported while it lasts, 5 s after the others began to wait.
        in_time(time.monotonic() - moment, 5.0 + 2.0, "the report about a rank that holds its GIL")
        job.wait(lambda: job.of(full[1]["pid"], "no gil"), held + 13)
        assert any("rank 1" in line and "step" in line for line in job.lines), job.tail()  # named, not evicted
        for event in full.values():
            kill(event["pid"], signal.SIGSTOP)
        time.sleep(8)  # sleep: all are frozen for longer than eviction takes
        for event in full.values():
            kill(event["pid"], signal.SIGCONT)
        code = f"""
import ctypes, os, sys, time
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.argtypes = [ctypes.c_long] * 4
if ptrace(16, {full[0]["pid"]}, 0, 0): sys.exit(f"cannot attach: {{ctypes.get_errno()}}")
os.waitpid({full[0]["pid"]}, 0x40000000)
time.sleep(7)  # sleep: the debugger holds it for longer than eviction takes
ptrace(17, {full[0]["pid"]}, 0, 0)
"""
        attached = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
        assert attached.returncode == 0, attached.stderr
        assert job.generation == full[0]["generation"] and not job.lines_with("evicted"), job.tail()
        assert not [event for event in job.events if event["event"] == "lost"]
        job.finish()


def test_row_8_a_rank_that_raises_is_tried_again_and_one_that_always_does_ends_the_job(tmp_path: Path) -> None:
    with ElasticJob(["-np", "2", "--min-np", "1"], tmp_path) as job:
        full = job.world(2)
        job.orders.write_text(f"raise {full[1]['pid']}")
        job.world(1, full[0]["generation"])
        full = job.world(2, full[0]["generation"] + 1)
        job.finish()
    bad = "import farandole\nfarandole.init()\nraise ValueError('always')"
    with ElasticJob(["-np", "2", "--min-np", "1"], tmp_path, program=bad) as job:
        assert job.process.wait(60) == 1
        assert any("ValueError: always" in line for line in job.lines), job.tail()
        assert job.lines_with("failed first")


def test_row_24_hosts_come_and_go_by_discovery(tmp_path: Path) -> None:
    """2 -> 4 -> 1 -> 3, then two changes within a second."""
    listed, script = discover(tmp_path, "localhost:2\n")
    arguments = ["-np", "2", "--min-np", "1", "--host-discovery-script", str(script)]

    def change(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(listed)  # no reader may find it empty

    with ElasticJob(arguments, tmp_path) as job:
        found = job.world(2)
        for text, size in (("localhost:2\n127.0.0.1:2", 4), ("127.0.0.1:1", 1), ("127.0.0.1:1\nlocalhost:2", 3)):
            before = {event["pid"] for event in found.values()}
            moment = time.monotonic()
            change(text)
            found = job.world(size, found[0]["generation"])
            ups = [e["t"] for e in job.events if e["event"] == "up" and e["pid"] not in before and e["t"] > moment]
            if ups:  # the last new rank was ready a moment before it joined
                in_time(max(e["t"] for e in found.values()) - max(ups), REPLACE_S, "taking in a newcomer that is up")
            assert {e["pid"] for e in found.values()} & before  # one process brought the state
            assert found[0]["pid"] in before
        change("127.0.0.1:1\nlocalhost:1")
        time.sleep(0.4)  # sleep: two changes within the second after which discovery looks
        change("127.0.0.1:2\nlocalhost:2")
        found = job.world(4, found[0]["generation"])
        # By host; inside a host a local rank is the slot's number, whichever of the two ranks has been there longer.
        places = [found[rank]["local"] for rank in range(4)]
        assert [index[2] for index in places] == [0, 0, 1, 1]
        assert sorted(places) == [[0, 2, 0, 2], [0, 2, 1, 2], [1, 2, 0, 2], [1, 2, 1, 2]]
        script.write_text("#!/bin/sh\necho oops >&2; exit 3\n")
        job.wait(lambda: job.lines_with("exit code 3"), 10)
        job.finish()


def test_rows_4_and_22_an_agent_dies_with_its_ranks_and_comes_back(tmp_path: Path) -> None:
    arguments = ["-np", "4", "--min-np", "1", "-H", "localhost:2,127.0.0.1:2"]
    with ElasticJob(arguments, tmp_path, {"JOB_CHILDREN": "1"}) as job:
        full = job.world(4)
        first, second = parent_of(full[0]["pid"]), parent_of(full[3]["pid"])
        assert first != second and parent_of(full[2]["pid"]) == second
        doomed = [full[2]["pid"], full[3]["pid"]]
        below = [child for pid in doomed for child in children_of(pid)]
        moment = kill(second)
        small = job.world(2, full[0]["generation"])
        assert {e["pid"] for e in small.values()} == {full[0]["pid"], full[1]["pid"]}
        in_time(max(e["t"] for e in small.values()) - moment, 2.0, "continuing without a host whose agent was killed")
        job.wait(lambda: not any(map(alive, [*doomed, *below])), what="the end of all that was below the agent")
        in_time(time.monotonic() - moment, 4.0, "the end of all that was below the agent")
        full = job.world(4, small[0]["generation"])
        assert len(job.lines_with("its agent was lost")) == 1  # one message for the host
        job.finish()


@pytest.mark.parametrize("saves", [False, True])
def test_row_21_the_launcher_dies(tmp_path: Path, saves: bool) -> None:
    """Without a save callback all processes end at once; with it, all ranks save first, at one step, each once.

    That step may come later than their lease lasts while the launcher lives.
    """
    folder = tmp_path / "saves"
    folder.mkdir()
    more = {
        "JOB_CHILDREN": "1",
        **({"JOB_SAVES": str(folder), "JOB_GIL": "6"} if saves else {}),
    }
    with ElasticJob(["-np", "3", "--min-np", "1"], tmp_path, more) as job:
        full = job.world(3)
        pids = [event["pid"] for event in full.values()]
        agent = parent_of(pids[0])
        below = [*pids, agent, parent_of(agent), *(child for pid in pids for child in children_of(pid))]
        if saves:
            job.orders.write_text(f"gil {pids[1]}")
            job.wait(lambda: job.of(pids[1], "gil"), 10)
        moment = time.monotonic()
        job.process.kill()
        until(lambda: not any(map(alive, below)), 60.0, lambda: [pid for pid in below if alive(pid)])
        in_time(time.monotonic() - moment, 16.0 if saves else 2.0, "the end of all ranks without their launcher")
    names = sorted(path.name for path in folder.iterdir())
    if saves:
        assert sorted(int(name.partition("-")[0]) for name in names) == sorted(pids)
        assert len({name.partition("-")[2] for name in names}) == 1  # one step
    else:
        assert not names


def test_row_21_a_job_that_survives_its_launcher(tmp_path: Path) -> None:
    """The launcher is killed; the job continues, replaces a rank, and another launcher shows it until its end."""
    home = {"XDG_STATE_HOME": str(tmp_path / "state")}
    with ElasticJob(["-np", "2", "--min-np", "1", "--survive-launcher"], tmp_path, home) as job:
        full = job.world(2)
        job.process.kill()
        job.process.wait()
        assert all(alive(event["pid"]) for event in full.values())
        kill(full[1]["pid"])
        with ElasticJob([], tmp_path, home, command=["attach"]) as again:
            new = again.world(2, full[0]["generation"] + 1)
            assert full[0]["pid"] in {event["pid"] for event in new.values()}
            listed = subprocess.run(
                [sys.executable, "-m", "farandole", "attach", "--list"],
                capture_output=True,
                text=True,
                env={**os.environ, **home, "PYTHONPATH": SOURCE},
            )
            assert listed.stdout.endswith("runs\n")
            again.finish()
        assert not list((tmp_path / "state" / "farandole" / "jobs").iterdir())
        assert not any(alive(event["pid"]) for event in new.values())


def test_row_23_sigterm_to_an_agent_drains_its_host_and_the_others_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "saves"
    folder.mkdir()
    arguments = ["-np", "4", "--min-np", "1", "-H", "localhost:2,127.0.0.1:2", "--drain-timeout", "10"]
    with ElasticJob(arguments, tmp_path, {"JOB_SAVES": str(folder), "JOB_CHILDREN": "1"}) as job:
        full = job.world(4)
        doomed = [full[2]["pid"], full[3]["pid"]]
        agent = parent_of(doomed[0])
        kill(agent, signal.SIGTERM)
        small = job.world(2, full[0]["generation"])
        assert {e["pid"] for e in small.values()} == {full[0]["pid"], full[1]["pid"]}
        names = sorted(path.name for path in folder.iterdir())
        assert sorted(int(name.partition("-")[0]) for name in names) == sorted(e["pid"] for e in full.values())
        assert len({name.partition("-")[2] for name in names}) == 1  # one agreed step, once per rank
        job.wait(lambda: not any(map(alive, doomed)), 10.0)
        assert not job.lines_with("has ended")  # they left at a commit
        other = parent_of(full[0]["pid"])
        kill(other, signal.SIGTERM)  # the last one leaves too: the job ends with success
        assert job.process.wait(60) == 0, job.tail()
        assert len(list(folder.iterdir())) == 6


def test_row_23_sigterm_to_one_rank_and_to_all_of_them(tmp_path: Path) -> None:
    """Every rank saves once, at one step; the rank with the signal exits with 0 and is replaced. Then the whole job."""
    folder = tmp_path / "saves"
    folder.mkdir()
    with ElasticJob(["-np", "3", "--min-np", "1"], tmp_path, {"JOB_SAVES": str(folder), "JOB_CHILDREN": "1"}) as job:
        full = job.world(3)
        kill(full[1]["pid"], signal.SIGTERM)
        again = job.world(3, full[0]["generation"] + 1)
        names = [path.name.split("-") for path in folder.iterdir()]
        assert sorted(int(pid) for pid, _ in names) == sorted(event["pid"] for event in full.values())
        assert len({step for _, step in names}) == 1 and not job.lines_with("has ended")
        assert {full[0]["pid"], full[2]["pid"]} < {event["pid"] for event in again.values()}
        assert not alive(full[1]["pid"])
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(60) == 128 + signal.SIGTERM
        later = [path.name.split("-") for path in folder.iterdir()][:]
        fresh = [name for name in later if name not in names]
        assert sorted(int(pid) for pid, _ in fresh) == sorted(event["pid"] for event in again.values()), job.tail()
        assert len({step for _, step in fresh}) == 1


def test_row_12_ranks_that_hear_no_launcher_stop_at_the_end_of_their_lease(tmp_path: Path) -> None:
    """The launcher is frozen: ranks cannot know whether others continue, so all stop; then they join again."""
    with ElasticJob(["-np", "2", "--min-np", "1"], tmp_path) as job:
        full = job.world(2)
        moment = kill(job.process.pid, signal.SIGSTOP)
        time.sleep(7)  # sleep: the launcher is frozen for longer than a lease
        os.kill(job.process.pid, signal.SIGCONT)
        again = job.world(2, full[0]["generation"])
        assert {event["pid"] for event in again.values()} == {event["pid"] for event in full.values()}
        stopped = [event["t"] - moment for event in job.events if event["event"] == "lost"]
        assert len(stopped) == 2 and min(stopped) >= 3.0, stopped
        in_time(max(stopped), 5.0, "stopping at the end of a lease")
        assert not job.lines_with("evicted") and not job.lines_with("silent")
        job.finish()


def test_row_38_ctrl_c_ends_an_elastic_job(tmp_path: Path) -> None:
    with ElasticJob(["-np", "2", "--min-np", "1", "--grace", "1"], tmp_path) as job:
        full = job.world(2)
        kill(full[1]["pid"], signal.SIGSTOP)  # the other one waits in a collective
        time.sleep(0.5)  # sleep: nothing can be seen of a rank that waits
        moment = time.monotonic()
        job.process.send_signal(signal.SIGINT)
        assert job.process.wait(60) == 130
        in_time(time.monotonic() - moment, 3.0, "the end of an elastic job after Ctrl-C")
        assert not alive(full[0]["pid"]) and not alive(full[1]["pid"])


def count_to(target: int) -> tuple[int, int, int]:
    import numpy as np

    import farandole as hvd
    from farandole.base.errors import HorovodInternalError, HostsUpdatedInterrupt
    from farandole.world.runtime import runtime

    hvd.init()
    done = 0
    while done < target:
        try:
            stamp = float(runtime.notifications.pending()[0])
            found = hvd.allreduce(np.array([float(done), stamp]), op=hvd.Max, name="count")
            done = int(found[0]) + 1
            time.sleep(0.005)  # sleep: stands for the computation of a step
            if done >= 50 and os.environ["FARANDOLE_WORKER"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            if found[1]:
                raise HostsUpdatedInterrupt
        except (HorovodInternalError, HostsUpdatedInterrupt):
            runtime.reset(done)
    seen = hvd.rank(), done, runtime.world.session.generation
    hvd.shutdown()
    return seen


def always_wrong() -> None:
    raise KeyError("mine")


def slow_to_end() -> int:
    import ctypes

    import farandole as hvd

    hvd.init()
    libc = ctypes.CDLL(None)  # large libraries take long to end, when Python and its sockets have ended already
    libc.__cxa_atexit(ctypes.cast(libc.sleep, ctypes.c_void_p), ctypes.c_void_p(4), None)
    return hvd.rank()


def test_run_waits_for_ranks_that_have_answered() -> None:
    import farandole

    assert farandole.run(slow_to_end, num_proc=2, min_num_proc=2) == [0, 1]


def test_run_with_ranks_that_come_and_go() -> None:
    import farandole

    found = farandole.run(count_to, (300,), num_proc=3, min_num_proc=2)
    assert [seen[:2] for seen in found] == [(0, 300), (1, 300)] and found[0][2] >= 2  # one has died
    with pytest.raises(RuntimeError, match="Horovod detected that one or more processes exited") as caught:
        farandole.run(always_wrong, num_proc=2, min_num_proc=1, verbose=False)
    assert isinstance(caught.value.__cause__, KeyError) and caught.value.__cause__.args == ("mine",)


def test_limits_end_the_job_with_a_reason(tmp_path: Path) -> None:
    with ElasticJob(["-np", "2", "--min-np", "1", "--reset-limit", "0"], tmp_path) as job:
        full = job.world(2)
        kill(full[1]["pid"])
        assert job.process.wait(60) != 0 and job.lines_with("--reset-limit 0"), job.tail()
    fails = "import os, sys\nos.environ['FARANDOLE_WORKER'] == '0' or sys.exit(3)\n"
    from elastic import PROGRAM

    arguments = ["-np", "2", "--min-np", "2", "--elastic-timeout", "2"]
    with ElasticJob(arguments, tmp_path, program=fails + PROGRAM) as job:
        assert job.process.wait(60) == 3 and job.lines_with("-np"), job.tail()


SAYS_WHY = """
import os, signal, sys, time
import farandole, numpy
farandole.init()
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which ends it at once
farandole.allreduce(numpy.ones(4), name="all are here")
if farandole.rank() == 1:
    os._exit(7)
try:
    while True:
        farandole.allreduce(numpy.ones(4), name="for ever")
except farandole.HorovodInternalError:
    for line in range(20):
        time.sleep(0.01)  # sleep: a long traceback takes its time
        print("line", line, file=sys.stderr, flush=True)
os._exit(3)
"""


def test_survivors_of_a_job_that_ends_have_time_to_report_their_error(tmp_path: Path) -> None:
    arguments = ["-np", "2", "--min-np", "1", "--reset-limit", "0", "--survivor-grace-seconds", "0"]
    with ElasticJob(arguments, tmp_path, program=SAYS_WHY) as job:
        assert job.process.wait(40) == 7, job.tail()
        assert sum("line " in line for line in job.lines) == 20, job.tail()
        assert job.lines_with("failed first"), job.tail()


def test_heartbeats_cost_a_static_job_nothing(tmp_path: Path) -> None:
    """A job that is not elastic has no pulse, no ticks, no memory file for them."""
    code = "import os; print([one for one in os.environ if 'PULSE' in one or one == 'FARANDOLE_WORKER'], flush=True)"
    done = subprocess.run(
        [sys.executable, "-m", "farandole", "run", "-np", "2", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        timeout=60,
    )
    assert done.stdout.count("[]") == 2 and ctypes.sizeof(ctypes.c_void_p) == 8


def test_a_discovered_host_whose_rank_fails_is_left_out_unless_slots_are_asked_for(tmp_path: Path) -> None:
    """As in Horovod, with its cool-down; `--blacklist slot` starts another rank, and the living ones stay."""
    _, script = discover(tmp_path, "localhost:2\n127.0.0.1:1\n")
    arguments = ["-np", "3", "--min-np", "1", "--host-discovery-script", str(script)]
    with ElasticJob([*arguments, "--blacklist-cooldown-range", "3", "4"], tmp_path) as job:
        found = job.world(3)
        generation = found[0]["generation"]
        kill(next(event["pid"] for event in found.values() if event["host"] == "127.0.0.1"))
        smaller = job.world(2, generation)
        assert {event["host"] for event in smaller.values()} == {"localhost"}
        assert job.lines_with("127.0.0.1 is left out for ")
        again = job.world(3, smaller[0]["generation"])  # its time is over
        assert sorted(event["host"] for event in again.values()) == ["127.0.0.1", "localhost", "localhost"]
        kill(next(event["pid"] for event in again.values() if event["host"] == "localhost"))
        alone = job.world(1, again[0]["generation"])  # the other rank of that host has left as well
        assert alone[0]["host"] == "127.0.0.1"
        job.finish()
    (tmp_path / "finish").unlink()
    with ElasticJob([*arguments, "--blacklist", "slot"], tmp_path) as job:
        found = job.world(3)
        victim = next(event for event in found.values() if event["host"] == "127.0.0.1")
        kill(victim["pid"])
        full = job.world(3, found[0]["generation"])
        assert sorted(event["host"] for event in full.values()) == ["127.0.0.1", "localhost", "localhost"]
        job.finish()
