# Elastic jobs on Ray, several nodes, Ray Client: a real cluster of several nodes on this machine.
# Touches ray_cluster.py and tests/ranks/elastic_runs.py, whose training and ledger it uses.
"""Actors die, nodes join and leave; survivors keep their processes, and every sample is used once."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from elastic_runs import ElasticRun
from lightning_results import check_and_return_world_sizes
from ray_cluster import HERE, ROOT, Cluster, cluster_fixture
from waiting import in_time

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(600)]


cluster = cluster_fixture(*[{"num_cpus": 1}] * 3, client=True)


class RayRun(ElasticRun):
    """Like a job of `farandole run`, but the ranks are actors."""

    def __init__(self, cluster: Cluster, scratch: Path, way: str, least: int, most: int, mode: str = "loader") -> None:
        self.scratch = scratch
        self.np = most
        self.temporary = tempfile.TemporaryDirectory()
        self.output_file = open(scratch / "output", "wb")  # noqa: SIM115
        command = [sys.executable, str(HERE / "ray_elastic_driver.py"), way, str(least), str(most), mode]
        environment = {**cluster.environment, "SCRATCH": str(scratch)}
        self.process = subprocess.Popen(
            command, env=environment, stdout=self.output_file, stderr=self.output_file, cwd=ROOT
        )


def test_workers_over_several_nodes(cluster: Cluster) -> None:
    places = cluster.ask("colocated", hosts=3, each=1)
    assert [one["rank"] for one in places] == [0, 1, 2] and {one["sum"] for one in places} == {6.0}
    assert [one["cross"] for one in places] == [[0, 3], [1, 3], [2, 3]] and {tuple(one["local"]) for one in places} == {
        (0, 1)
    }


def test_through_ray_client(cluster: Cluster) -> None:
    output = cluster.run(str(HERE / "ray_client_driver.py"), cluster.client)
    assert "through the client: [3.0, 3.0] [7, 7] [0, 1]" in output
    assert "raised: 1 traceback of on purpose" in output
    assert "heard: [0, 1, 2]" in output
    assert "elastic: [3.0, 3.0]" in output


def test_actors_die_and_nodes_come_and_go(cluster: Cluster, tmp_path: Path) -> None:
    with RayRun(cluster, tmp_path, "executor", 1, 4) as run:
        first = run.until(lambda now: now["size"] == 3 and now["step"] > 5)
        began = time.monotonic()
        os.kill(first["pids"][random.Random(8).randrange(3)], signal.SIGKILL)
        after = run.until(lambda now: now["generation"] > first["generation"])
        full = run.until(lambda now: now["size"] == 3 and now["generation"] > first["generation"])
        assert len(set(first["pids"]) & set(full["pids"])) == 2  # survivors keep their processes
        node = cluster.ask("add_node", num_cpus=1)
        grown = run.until(lambda now: now["size"] == 4)
        # The first commit of four may hold no step of four yet; the lost node's other steps are undone.
        run.until(lambda now: now["commits"] > grown["commits"] + 1)
        cluster.ask("remove_node", index=node)
        shrunk = run.until(lambda now: now["size"] == 3 and now["generation"] > grown["generation"])
        assert set(full["pids"]) < set(grown["pids"]) and set(shrunk["pids"]) == set(full["pids"])
        frozen, stopped = shrunk["pids"][2], time.monotonic()
        os.kill(frozen, signal.SIGSTOP)
        without = run.until(lambda now: now["size"] == 2 and now["generation"] > shrunk["generation"])
        again = run.until(lambda now: now["size"] == 3 and now["generation"] > without["generation"])
        assert frozen not in again["pids"] and set(without["pids"]) < set(again["pids"])
        assert run.finish() == 0, run.output()
        found, results = run.counts(), run.results()
    continued_s = after["time"] - began
    print(f"training continued after {continued_s:.2f} s, with all workers after {full['time'] - began:.1f} s; {found}")
    frozen_for = without["time"] - stopped
    print(f"without the frozen one after {frozen_for:.1f} s, with another one after {again['time'] - stopped:.1f} s")
    assert frozen_for > 4
    in_time(frozen_for, 10.0, "continuing without a frozen worker")
    assert (found.lost, found.duplicated, found.padded) == (0, 0, 0)
    assert len(results) == 3 and set(results[0]["sizes"]) == {2, 3, 4}
    assert after["size"] == 2
    in_time(continued_s, 2.0, "continuing after a death")


@pytest.mark.parametrize(
    "ray_restart", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["", "compared with Ray's own"]
)
def test_a_trainer_whose_survivors_go_on(cluster: Cluster, tmp_path: Path, ray_restart: bool) -> None:
    """With a range of workers; and compared with Ray Train, which restarts all workers from the last checkpoint."""
    with RayRun(cluster, tmp_path, "trainer", 1, 3) as run:
        first = run.until(lambda now: now["size"] == 3 and now["step"] > 5)
        began = time.monotonic()
        os.kill(first["pids"][1], signal.SIGKILL)
        after = run.until(lambda now: now["generation"] > first["generation"])
        full = run.until(lambda now: now["size"] == 3 and now["generation"] > first["generation"])
        assert len(set(first["pids"]) & set(full["pids"])) == 2  # survivors keep their processes
        assert run.finish() == 0, run.output()
        found, words = run.counts(), run.output()
    continued_s = after["time"] - began
    print(
        f"HorovodTrainer continued after {continued_s:.2f} s, "
        f"with all workers after {full['time'] - began:.1f} s; {found}"
    )
    assert (found.lost, found.duplicated, found.padded) == (0, 0, 0)
    assert "metrics {'rank': 0, 'size': 3}" in words
    assert after["size"] == 2
    in_time(continued_s, 2.0, "continuing after a death")
    if not ray_restart:
        return
    again = cluster.ask("restarted", storage=str(tmp_path), workers=3)
    print(f"Ray Train's own restart of as many workers continued after {again['seconds']:.2f} s")
    assert again["metrics"]["step"] == 3 and again["metrics"]["first"] in (1, 2)
    in_time(continued_s, again["seconds"], "continuing, compared with the restart of Ray Train itself,")


def test_lightning_in_the_older_executor(cluster: Cluster, tmp_path: Path) -> None:
    """ElasticRayExecutor and `ElasticCallback()` unchanged: rank 0 dies in the second epoch; the new one joins
    at a commit in the last step of an epoch."""
    pytest.importorskip("lightning_utilities", reason="Lightning is not installed")
    job = {"SCRATCH": str(tmp_path), "RANKS": "2", "DEATHS": '{"first": [0, 21]}', "COMMITS": "{}", "EPOCHS": "4"}
    output = cluster.run(str(HERE / "ray_elastic_driver.py"), "older", "1", "2", "lightning", **job)
    assert "older 2 2 [{'through': 0}]" in output
    sizes = check_and_return_world_sizes(tmp_path, ["first"])
    assert sizes[0] == 2 and 1 in sizes and sizes[-1] == 2, sizes
