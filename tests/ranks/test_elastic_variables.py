# The environment variables of an elastic job, such as the rank, at the start of each process and after each change.
# Touches the launcher as users type it.
"""Scripts use HOROVOD_RANK in the names of their files and choose a device by the local rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from elastic import ElasticJob, kill

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(180)]

PROGRAM = """
import json, os, sys, time
names = "RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE HOSTNAME".split()
def read_environment():
    ours, theirs = [[os.environ[f"{kind}_{name}"] for name in names] for kind in ("FARANDOLE", "HOROVOD")]
    assert ours == theirs
    torch = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    assert torch == ours[:4], (torch, ours)
    return [int(one) for one in ours[:6]] + ours[6:]
start = read_environment()
log_file = f"{os.environ['JOB_FILES']}/{start[0]}"  # as a script names its log by the variable
with open(log_file, "x") as file:
    file.write(str(os.getpid()))
import numpy as np
import farandole as hvd
from farandole.elastic import ObjectState, run
def report(event, **more):
    sys.stdout.write("event " + json.dumps({"event": event, "pid": os.getpid(), "start": start, **more}) + "\\n")
    sys.stdout.flush()
seen = None
@run
def train(state):
    global seen
    while True:
        done = hvd.allreduce(np.array([float(os.path.exists(os.environ["JOB_FINISH"]))]), op=hvd.Max,
        name="step")
        numbers = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
        assert read_environment()[:6] == numbers, (read_environment(), numbers)
        if seen != numbers:
            seen = numbers
            report("world", rank=hvd.rank(), size=hvd.size(), numbers=numbers, even=hvd.is_homogeneous())
        if done[0]:
            return
        time.sleep(0.01)  # sleep: stands for the computation of a step
        state.commit()
report("start")
hvd.init()
train(ObjectState(hvd.broadcast_object, hvd.rank))
"""


class Job(ElasticJob):
    """A job of PROGRAM. Each process keeps a file named by its first rank, and removes it when it ends."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.files = folder / "files"
        self.files.mkdir()
        super().__init__(arguments, folder, {"JOB_FILES": str(self.files)}, PROGRAM)

    def wait_for_world(self, size: int) -> dict[int, dict[str, Any]]:
        """Waits until every living process is in a world of this size. Returns the events by rank."""

        def members() -> dict[int, dict[str, Any]]:
            latest = {one["pid"]: one for one in self.events if one["event"] == "world"}
            found = {one["rank"]: one for pid, one in latest.items() if one["size"] == size and pid in self.living()}
            return found if len(found) == size else {}

        found: dict[int, dict[str, Any]] = self.wait(members, 60, f"a world of {size}")
        return found

    def living(self) -> set[int]:
        return {int(path.read_text() or 0) for path in self.files.iterdir()}

    def kill(self, event: dict[str, Any]) -> None:
        (self.files / str(event["start"][0])).unlink()
        kill(event["pid"])


def test_each_process_starts_with_its_own_ranks(tmp_path: Path) -> None:
    with Job(["-np", "2", "--min-np", "1", "--max-np", "4", "-H", "localhost:4"], tmp_path) as job:
        found = job.wait_for_world(4)
        starts = [found[rank]["start"] for rank in range(4)]
        assert starts == [[rank, 4, rank, 4, 0, 1, "localhost"] for rank in range(4)]
        assert [found[rank]["numbers"] for rank in range(4)] == [[rank, 4, rank, 4, 0, 1] for rank in range(4)]
        job.finish_file.touch()
        assert job.process.wait(60) == 0, job.tail()


def test_devices_and_files_do_not_collide_after_two_kills(tmp_path: Path) -> None:
    with Job(["-np", "4", "--min-np", "1", "--max-np", "4", "-H", "localhost:4"], tmp_path) as job:
        before = job.wait_for_world(4)
        by_slot = {event["numbers"][2]: event for event in before.values()}
        job.kill(by_slot[0])
        job.kill(by_slot[2])
        after = job.wait_for_world(4)
        pids = {event["numbers"][2]: event["pid"] for event in after.values()}
        assert sorted(pids) == [0, 1, 2, 3] and all(event["even"] for event in after.values())
        assert pids[1] == by_slot[1]["pid"] and pids[3] == by_slot[3]["pid"]  # the survivors keep their devices
        assert pids[0] != by_slot[0]["pid"] and pids[2] != by_slot[2]["pid"]
        assert all(
            event["start"][2] == event["numbers"][2] for event in after.values()
        )  # the local rank at the start, by which they chose a device
        # Each process could create its file: no new process started with the first rank of a living one.
        assert len({event["start"][0] for event in after.values()}) == 4
        job.finish_file.touch()
        assert job.process.wait(60) == 0, job.tail()


def test_over_two_hosts_the_numbers_are_those_of_the_whole_job(tmp_path: Path) -> None:
    with Job(["-np", "3", "--min-np", "1", "-H", "localhost:2,127.0.0.1:1"], tmp_path) as job:
        found = job.wait_for_world(3)
        assert [found[rank]["start"] for rank in range(3)] == [
            [0, 3, 0, 2, 0, 2, "localhost"],
            [1, 3, 1, 2, 0, 1, "localhost"],
            [2, 3, 0, 1, 1, 2, "127.0.0.1"],
        ]
        assert [event["start"][:6] for event in found.values()] == [event["numbers"] for event in found.values()]
        job.kill(found[0])
        again = job.wait_for_world(3)
        assert {event["numbers"][0] for event in again.values()} == {0, 1, 2}
        assert json.dumps(sorted(event["numbers"][2] for event in again.values())) == "[0, 0, 1]"
        job.finish_file.touch()
        assert job.process.wait(60) == 0, job.tail()
