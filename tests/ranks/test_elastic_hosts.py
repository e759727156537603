# Elastic jobs over several hosts: partitions, links that stop without an error, hosts that die. Namespaces and ssh.
# Touches the bed of tests/bed.
"""The launcher runs in the bed's first host. Rows 11 to 13 of the table of faults, and row 4 between hosts."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bed
import pytest
from elastic import LONG, PROGRAM, ElasticJob, split_brains, within
from waiting import in_time

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(240)]
DETECT_S = 0.25


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[bed.Bed, Path]]:
    folder = tmp_path_factory.mktemp("job")
    with bed.hosts(4, ssh=True, visible=[folder]) as found:
        yield found, folder


def run_job(hosts: tuple[bed.Bed, Path], names: str, *arguments: str, program: str = PROGRAM) -> ElasticJob:
    found, above = hosts
    folder = above / str(len(list(above.iterdir())))
    (folder / "ledger").mkdir(parents=True)
    listed = ",".join(f"host{name}:1" for name in names)
    job = ElasticJob(
        ["-np", str(len(names)), "--min-np", "1", "-H", listed, *arguments],
        folder,
        {"JOB_LEDGER": str(folder / "ledger"), "PATH": bed.PATH},
        program,
        start=within(found[0]),
    )
    job.folder = folder  # type: ignore[attr-defined]
    return job


def no_split_brain(job: Any, least: int = 10) -> None:
    twice, steps = split_brains(job.folder / "ledger")
    assert not twice and steps >= least, (twice, steps)


def workers(world: dict[int, dict[str, Any]]) -> set[int]:
    return {event["worker"] for event in world.values()}


def test_row_12_a_partition_has_one_side_that_goes_on_and_heals(hosts: tuple[bed.Bed, Path]) -> None:
    """2|2 and 3|1: the launcher's side continues; the other side stops by itself and joins again as new members."""
    found, _ = hosts
    recover, rejoin = [], []
    with run_job(hosts, "1234") as job:
        full = job.world(4, seconds=60)
        for cut in ([2, 3], [3]) if LONG else ([2, 3],):
            away = {full[rank]["worker"] for rank in cut}
            found.partition([found[index] for index in cut])
            moment = time.monotonic()
            small = job.world(4 - len(cut), full[0]["generation"])
            assert workers(small) == workers(full) - away
            recover.append(max(event["t"] for event in small.values()) - moment)
            time.sleep(max(0.0, moment + 8.0 - time.monotonic()))  # sleep: the fault lasts 8 s
            found.heal()
            moment = time.monotonic()
            full = job.world(4, small[0]["generation"])
            assert workers(full) == workers(small) | away  # the same processes
            rejoin.append(max(event["t"] for event in full.values()) - moment)
            time.sleep(5.5)  # sleep: old connections may take long to come back, one way longer than the other
            assert job.generation == full[0]["generation"], job.tail()
        print(f"recover {recover}, rejoin {rejoin}")
        in_time(max(recover), 6.5, "continuing during a partition")
        in_time(max(rejoin), 4.0, "coming together after a partition")
        job.finish()
        no_split_brain(job)


def test_rows_11_and_13_two_hosts_that_cannot_hear_each_other(hosts: tuple[bed.Bed, Path]) -> None:
    """Both reach the launcher; one of the two is evicted, once, and joins again when the fault is over.

    With the usual times the ranks know after 4 to 5.5 s, try 5 s more to reach each other, and continue then.
    """
    found, _ = hosts
    with run_job(hosts, "123", *([] if LONG else ["--suspect-seconds", "1"])) as job:
        full = job.world(3, seconds=60)
        # A half-open link both ways, then one way, then the other.
        for both, pairs in (
            (True, [(found[1], found[2]), (found[2], found[1])]),
            (False, [(found[1], found[2])]),
            (False, [(found[2], found[1])]),
        )[: 3 if LONG else 2]:
            generation = full[0]["generation"]
            for one, other in pairs:
                one.run(["ip", "route", "add", "blackhole", f"{other.address}/32"])
            moment = time.monotonic()
            try:
                small = job.world(2, generation, seconds=40)
                took = max(event["t"] for event in small.values()) - moment
                print(f"both={both}: {took:.2f} s")
                in_time(took, 5.5 + 5.0 + 2.0, "continuing without one of two that do not hear each other")
                knew = [e["t"] - moment for e in job.events if e["event"] == "lost" and e["t"] > moment]
                in_time(min(knew), 5.5, "noticing that a link is silent")
                assert {full[0]["worker"]} < workers(small)
                time.sleep(3)  # sleep: the membership must not change during this time
                assert job.generation == small[0]["generation"]  # no repeated changes
            finally:
                for one, other in pairs:
                    one.run(["ip", "route", "del", "blackhole", f"{other.address}/32"])
            full = job.world(3, small[0]["generation"], seconds=40)
        job.finish()
        no_split_brain(job)


def test_row_17_slow_ranks_and_slow_links_are_not_evicted(hosts: tuple[bed.Bed, Path]) -> None:
    """A rank that gets a tenth of its time, and a link of 10 Mbit/s."""
    found, _ = hosts
    with run_job(hosts, "12") as job:
        full = job.world(2, seconds=60)
        found[1].shape("10mbit")
        try:
            pid = full[1]["pid"]
            turn = f"kill -STOP {pid}; sleep 0.45; kill -CONT {pid}; sleep 0.05"  # sleep: so slow is it
            slow = f"for i in $(seq 14); do {turn}; done"
            found[1].run(["sh", "-c", slow])
        finally:
            found[1].unshape()
        assert job.generation == full[0]["generation"] and not job.lines_with("evicted"), job.tail()
        job.finish()
        no_split_brain(job)


def test_row_17_a_slow_link_is_named(hosts: tuple[bed.Bed, Path]) -> None:
    """10 Mbit/s to one of three hosts: its links are named within 10 s, with what they carry; no rank is blamed."""
    found, _ = hosts
    send = "hvd.allreduce(np.ones(50_000, np.float32), op=hvd.Sum, name='large')"
    with run_job(hosts, "123", program=PROGRAM.replace("def pause():\n", f"def pause():\n    {send}\n", 1)) as job:
        full = job.world(3, seconds=60)
        time.sleep(5.0)  # sleep: two reports of a quick network
        assert not job.lines_with("slow") and not job.lines_with("wait for"), job.tail()
        found[1].shape("10mbit")
        began = time.monotonic()
        try:
            line = job.wait(lambda: job.lines_with("the link"), 60.0, "the name of the slow link")[0]
            took = time.monotonic() - began
        finally:
            found[1].unshape()
        print(f"named after {took:.1f} s: {line}")
        in_time(took, 10.0, "naming a slow link")
        assert "on host2" in line and "slow: " in line, line
        rates = re.search(r"slow: (\S+) MB/s.* others carry (\S+) MB/s", line)
        assert rates and 3 * float(rates[1]) <= float(rates[2]) and float(rates[1]) <= 2.5, line
        assert not [one for one in job.lines_with("slow") if "the link" not in one], job.tail()
        assert job.generation == full[0]["generation"]
        job.finish()


def test_rows_1_and_4_ranks_and_hosts_that_die_elsewhere(tmp_path: Path) -> None:
    with bed.hosts(3, ssh=True, visible=[tmp_path]) as found:
        deaths(found, tmp_path)


def deaths(found: bed.Bed, folder: Path) -> None:
    detect = []
    with run_job((found, folder), "123") as job:
        full = job.world(3, seconds=60)
        for rank in (1, 2, 1):
            generation, victim = full[0]["generation"], full[rank]["pid"]
            moment = time.monotonic()
            where = int(full[rank]["host"][-1]) - 1
            found[where].run(["kill", "-9", str(victim)])
            small = job.world(2, generation)
            left = workers(small)
            detect += [e["t"] - moment for e in job.events if e["event"] == "lost" and e["t"] > moment]
            full = job.world(3, small[0]["generation"])
            assert left < workers(full)
        generation = full[0]["generation"]
        moment = time.monotonic()
        found[2].kill()
        small = job.world(2, generation)
        in_time(max(event["t"] for event in small.values()) - moment, 1.5 + 1.0, "continuing without a dead host")
        found[2].start_sshd()
        full = job.world(3, small[0]["generation"], seconds=60)
        print(f"detect {sorted(detect)[-3:]}")
        in_time(sorted(detect)[-2], DETECT_S + 0.3, "detecting a death, besides 0.3 s to send the kill,")
        job.finish()
        no_split_brain(job)
