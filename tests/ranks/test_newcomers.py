# A new rank of an elastic job that trains: nobody waits for it before it is ready.
# Touches the launcher as users type it.
"""The new rank's script stops between init() and run() until the test has seen the others train on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from elastic import ElasticJob, kill

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(180)]
STEPS = 50  # that the others make while a new rank waits

PROGRAM = """
import json, os, sys, time
import numpy as np
import farandole as hvd
from farandole.base.errors import HorovodInternalError
from farandole.elastic import ObjectState, run

def say(event, **more):
    line = json.dumps({"event": event, "pid": os.getpid(), "rank": hvd.rank(), "size": hvd.size(),
                       "device": hvd.local_rank(), **more})
    sys.stdout.write("event " + line + "\\n")
    sys.stdout.flush()

def in_a_child(function):
    # What a data loader's process sees.
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, function().encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        found = file.read()
    os.waitpid(child, 0)
    return found

def child_reduces():
    assert hvd.rank() == early
    try:
        hvd.allreduce(np.ones(1), name="child")
    except HorovodInternalError as error:
        return str(error)
    return "no error"

hvd.init()
early = hvd.rank()
state = ObjectState(hvd.broadcast_object, hvd.rank, step=0, weights=np.zeros(8))
if "FARANDOLE_NEWCOMER" in os.environ:
    everybody = hvd.global_process_set
    assert hvd.is_initialized() and everybody.rank() == hvd.rank() and everybody.size() == hvd.size()
    say("early", child=in_a_child(child_reduces))
    while not os.path.exists(os.environ["JOB_GATE"]):
        time.sleep(0.01)  # sleep: what a script does to prepare

@run
def train(state):
    assert str(hvd.rank()) == os.environ["HOROVOD_RANK"] and str(hvd.size()) == os.environ["HOROVOD_SIZE"]
    say("joined", step=state.step)
    while True:
        over = os.path.exists(os.environ["JOB_FINISH"])
        found = hvd.allreduce(np.array([over, state.step, *range(6)], dtype=float), op=hvd.Max, name="step")
        assert found[1] == state.step  # all ranks are at the same step
        state.weights += found
        state.step += 1
        if state.step % 10 == 0 and hvd.rank() == 0:
            say("step", step=state.step)
        if found[0]:
            return
        time.sleep(0.002)  # sleep: what a step computes
        state.commit()

train(state)
say("end", step=state.step, weights=float(state.weights[7]))
"""


class Job(ElasticJob):
    """A job of PROGRAM on three ranks."""

    def __init__(self, folder: Path) -> None:
        self.gate = folder / "gate"
        super().__init__(["-np", "3", "--min-np", "1"], folder, {"JOB_GATE": str(self.gate)}, PROGRAM)

    def named(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.events if one["event"] == event]

    def joined(self, size: int, without: set[int]) -> dict[int, dict[str, Any]]:
        """Waits until as many processes as `size`, none of them in `without`, are in a world of that size."""

        def there() -> dict[int, dict[str, Any]]:
            newest = {one["pid"]: one for one in self.named("joined") if one["pid"] not in without}
            found = {one["rank"]: one for one in newest.values() if one["size"] == size}
            return found if len(found) == len(newest) == size else {}

        found: dict[int, dict[str, Any]] = self.wait(there, 60, f"a world of {size}")
        return found

    def newcomer(self, number: int) -> dict[str, Any]:
        """Waits for the newcomer with this number, from 0 on, to wait at the gate."""
        found: dict[str, Any] = self.wait(lambda: self.named("early")[number:], 60, "a newcomer")[0]
        return found

    def steps(self, count: int) -> None:
        """Waits until the ranks have made so many more steps."""
        target = max((one["step"] for one in self.named("step")), default=0) + count
        self.wait(lambda: any(one["step"] >= target for one in self.named("step")), 60, f"step {target}")


def test_the_others_train_on_until_a_new_rank_is_ready(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        first = job.joined(3, set())
        dead: set[int] = set()
        for number, rank in enumerate((0, 2)):
            dead.add(first[rank]["pid"])
            kill(first[rank]["pid"])
            left = job.joined(2 - number, dead)
            new = job.newcomer(number)
            others = [*left.values(), *job.named("early")[:number]]
            assert new["rank"] > max(one["rank"] for one in [*first.values(), *others]) and new["size"] > new["rank"]
            assert new["device"] not in {one["device"] for one in others}
            assert f"forked from rank {new['rank']} before that rank joined its job" in new["child"]
            job.steps(STEPS)
            assert job.joined(2 - number, dead) == left  # nobody was interrupted
        job.gate.touch()
        whole = job.joined(3, dead)
        assert sorted(one["device"] for one in whole.values()) == [0, 1, 2]
        assert min(one["step"] for one in whole.values()) > 2 * STEPS  # the new ranks have the state of the others
        job.steps(STEPS)
        job.finish_file.touch()
        assert job.process.wait(60) == 0, job.tail()
        ends = job.named("end")
        assert sorted(one["rank"] for one in ends) == [0, 1, 2]
        assert len({(one["step"], one["weights"]) for one in ends}) == 1


def test_a_job_that_ends_does_not_wait_for_a_new_rank(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        first = job.joined(3, set())
        kill(first[1]["pid"])
        job.joined(2, {first[1]["pid"]})
        new = job.newcomer(0)
        job.steps(STEPS)
        job.finish_file.touch()
        assert job.process.wait(60) == 0, job.tail()
        assert not os.path.exists(f"/proc/{new['pid']}")
        assert sorted(one["rank"] for one in job.named("end")) == [0, 1]
