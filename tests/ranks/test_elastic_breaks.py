# Elastic jobs in which something other than a rank fails: hosts that do not exist, states of scripts, parts of files.
# Touches the launcher as users type it.
"""What the job reports at its end, what it leaves behind, and what new ranks know."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from elastic import ElasticJob, alive, children_of, discover, kill

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(180)]


def test_a_rank_that_failed_long_ago_is_not_the_root_cause(tmp_path: Path) -> None:
    """A rank is killed and replaced; later another one raises, and that ends the job."""
    with ElasticJob(["-np", "2", "--min-np", "2", "--reset-limit", "1"], tmp_path) as job:
        full = job.world(2)
        kill(full[1]["pid"])
        again = job.world(2, full[0]["generation"])
        failing = again[1]
        job.orders.write_text(f"raise {failing['pid']}")
        assert job.process.wait(60) == 1, job.tail()
        job.wait(lambda: job.lines_with("failed first"), 5)
        [root_cause] = job.lines_with("failed first")
        assert f"rank {failing['rank']} (process {failing['pid']} " in root_cause and "exit code 1" in root_cause


def test_hosts_that_cannot_be_reached_leave_nothing_behind(tmp_path: Path) -> None:
    """Each attempt is an ssh with its pipes; a host may be away for days."""
    _, script = discover(tmp_path, "localhost:1\nno-such-host.invalid:1\n")
    with ElasticJob(["-np", "1", "--min-np", "1", "--host-discovery-script", str(script)], tmp_path) as job:
        job.world(1)

        pid = job.process.pid

        def held() -> tuple[int, int]:
            """Descriptors and children of the launcher."""
            return len(list(Path(f"/proc/{pid}/fd").iterdir())), len(children_of(pid))

        def between_attempts() -> tuple[int, int] | None:
            """What it holds while no ssh runs."""
            found = held()
            names = [Path(f"/proc/{child}/comm").read_text().strip() for child in children_of(pid) if alive(child)]
            return None if "ssh" in names or held() != found else found

        def after(attempts: int) -> None:
            job.wait(lambda: len(job.lines_with("no-such-host.invalid is out")) >= attempts, 60)

        after(1)
        first = job.wait(between_attempts)
        after(3)
        job.wait(lambda: between_attempts() == first, 60, f"no more than {first}")
        job.finish()


def test_a_command_that_no_host_has(tmp_path: Path) -> None:
    """The discovery script decides where ranks run: the launcher does not check for the command on its own host."""
    _, script = discover(tmp_path, "localhost:1\n")
    arguments = ["run", "-np", "1", "--min-np", "1", "--host-discovery-script", str(script), "no-such-command"]
    with ElasticJob([], tmp_path, command=arguments) as job:
        assert job.process.wait(60) == 127
        job.wait(lambda: job.lines_with("cannot run the command"), 5)


def until_two(listed: str) -> int:
    import numpy as np

    import farandole as hvd
    from farandole.base.errors import HorovodInternalError, HostsUpdatedInterrupt
    from farandole.world.runtime import runtime

    hvd.init()
    Path(listed + ".new").write_text("localhost:1\n127.0.0.1:1\n")
    Path(listed + ".new").rename(listed)  # so that no reader finds it empty
    while True:
        try:
            stamp = float(runtime.notifications.pending()[0])
            found = hvd.allreduce(np.array([stamp]), op=hvd.Max, name="until")
            if hvd.size() == 2:
                break
            time.sleep(0.01)  # sleep: stands for the computation of a step
            if found[0]:
                raise HostsUpdatedInterrupt
        except (HorovodInternalError, HostsUpdatedInterrupt):
            runtime.reset(1)
    size = hvd.size()
    hvd.shutdown()
    return size


def test_host_names_are_looked_up_in_a_separate_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that does not answer would cost all ranks their lease."""
    import farandole
    from farandole.rendezvous import interfaces

    asked: list[tuple[str, str]] = []
    really = interfaces.is_this_host

    def noted(name: str) -> bool:
        asked.append((name, threading.current_thread().name))
        return really(name)

    monkeypatch.setattr(interfaces, "is_this_host", noted)
    listed, script = discover(tmp_path, "localhost:1\n")
    found = farandole.run(
        until_two, (str(listed),), num_proc=1, min_num_proc=1, max_num_proc=2, host_discovery_script=str(script)
    )
    assert found == [2] and ("127.0.0.1", "farandole-discovery") in asked
    assert "farandole-job" not in {thread for _, thread in asked}


def test_a_discovery_class_of_horovods_finds_the_hosts(tmp_path: Path) -> None:
    import farandole
    from horovod.runner.elastic.discovery import HostDiscovery

    listed = tmp_path / "hosts"
    listed.write_text("localhost:1\n")

    class Mine(HostDiscovery):  # type: ignore[misc]
        def find_available_hosts_and_slots(self) -> dict[str, int]:
            return {name: int(slots) for name, slots in (line.split(":") for line in listed.read_text().split())}

    found = farandole.run(
        until_two, (str(listed),), num_proc=1, min_num_proc=1, max_num_proc=2, host_discovery_script=Mine()
    )
    assert found == [2]


# A state class in the script, as in Horovod's documentation, with its own save, restore and sync.
OWN_STATE = """
import os, sys, time
import numpy as np
import farandole as hvd
from farandole.elastic import State, commits, run
class Mine(State):
    def __init__(self):
        super().__init__(hvd.broadcast_object, hvd.rank)
        self.value = self.kept = 0
    def save(self):
        self.kept = self.value
    def restore(self):
        self.value = self.kept
    def sync(self):
        self.value = hvd.broadcast_object(self.value)
        self.save()
@run
def train(state):
    while True:
        done = hvd.allreduce(np.array([float(os.path.exists(os.environ["JOB_FINISH"]))]), op=hvd.Max,
        name="step")
        state.value += 1
        time.sleep(0.01)  # sleep: stands for the computation of a step
        state.commit()
        place = f"{hvd.rank()} {hvd.size()} {state.value} {commits(state)} {os.getpid()}"
        sys.stdout.write("place " + place + "\\n")
        sys.stdout.flush()
        if done[0]:
            return
hvd.init()
train(Mine())
"""


def test_newcomers_count_commits_like_the_others_whatever_the_state(tmp_path: Path) -> None:
    """The rank that had the state from the beginning dies; the rank that joined later has it too, and continues."""
    with ElasticJob(["-np", "2", "--min-np", "1"], tmp_path, program=OWN_STATE) as job:

        def places(size: int) -> list[list[int]]:
            found = [line.partition("place ")[2].split() for line in list(job.lines) if "place " in line]
            return [
                [int(word) for word in arguments]
                for arguments in found
                if len(arguments) == 5 and arguments[1] == str(size)
            ]

        def at(rank: int, size: int, after: int) -> list[int]:
            found: list[int] = job.wait(
                lambda: next((one for one in places(size) if one[0] == rank and one[2] > after), None), 30
            )
            return found

        first = at(0, 2, 100)
        second = at(1, 2, first[2])
        kill(second[4])
        newcomer = at(1, 2, at(0, 1, second[2])[2])
        assert newcomer[4] != second[4] and newcomer[3] >= newcomer[2]  # the commits of the job, not its own
        kill(first[4])
        alone = at(0, 1, newcomer[2])
        assert alone[4] == newcomer[4] and alone[3] >= alone[2]
        at(0, 2, alone[2])
        job.finish_file.touch()
        assert job.process.wait(60) == 0, job.tail()


PARTS = """
import os, signal, sys, time
import numpy as np
import farandole as hvd
from farandole.elastic import ObjectState, Sharded, checkpoint, run, save_to
checkpoint.LOST_SECONDS = 1.0
encoded = checkpoint._encoded
def dies(snapshot, rank):
    if os.environ["FARANDOLE_WORKER"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return encoded(snapshot, rank)
checkpoint._encoded = dies
@run
def train(state):
    state.commit()
    if not state.tried:
        began = time.monotonic()
        state.tried = True
        state.commit()
        try:
            save_to(state, os.environ["SAVE_TO"], wait=True)
        except TimeoutError as error:
            print("refused", round(time.monotonic() - began, 1), error, flush=True)
    hvd.barrier()
    while hvd.size() < 2:
        time.sleep(0.05)  # sleep: stands for the computation of a step
        state.commit()
    save_to(state, os.environ["SAVE_TO"], wait=True)
hvd.init()
train(ObjectState(hvd.broadcast_object, hvd.rank, tried=False, parts=Sharded({0: 1, 1: 2})))
"""


def test_row_19_the_shard_of_a_lost_rank_does_not_block_the_checkpoint(tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    with ElasticJob(["-np", "2", "--min-np", "1"], tmp_path, {"SAVE_TO": str(saves)}, PARTS) as job:
        assert job.process.wait(60) == 0, job.tail()
        [line] = [line for line in job.lines if "refused" in line]
        assert "a rank was lost while the checkpoint was written" in line
        assert 1.0 <= float(line.split("refused")[1].split()[0]) < 20.0
    assert [path.name for path in saves.iterdir() if path.name.startswith("checkpoint-")]
    assert not list(saves.glob(".writing-*"))
