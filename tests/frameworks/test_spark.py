# Ranks on Spark: a real local application with Spark Connect, and a real standalone cluster of two workers.
# Touches spark_cluster.py, whose process runs the cases of spark_cases.py, and tests/ranks/elastic_runs.py.
"""`run`, executors and `run_elastic`; failures and their error messages."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_runs import ElasticRun
from ray_cluster import HERE
from spark_cluster import Application, missing
from waiting import in_time

if why := missing():
    pytest.skip(why, allow_module_level=True)

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def local() -> Iterator[Application]:
    made = Application("local[3]")
    yield made
    made.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Application]:
    made = Application(workers=2)
    yield made
    made.close()


def test_run_as_the_contract_has_it(local: Application) -> None:
    found = local.ask("contract")  # as many ranks as spark.default.parallelism says, and there are three slots
    assert [one["rank"] for one in found["run"]] == [0, 1]
    assert all(one["size"] == 2 and one["sum"] == 8.0 and one["cross"] == [0, 1] for one in found["run"])
    assert [one["local"] for one in found["run"]] == [[0, 2], [1, 2]]
    assert all(
        one["extra"] == "7" and one["threads"] == "1" and one["gpus"] is None and one["devices"] == []
        for one in found["run"]
    )
    assert all(one["secrets"] == [] and one["inherited"] is None for one in found["run"])
    assert {one["tunables"] for one in found["run"]} == {"glibc.rtld.nns=5:glibc.malloc.hugetlb=1"}
    assert sorted(found["out"].splitlines()) == [f"[{rank}]<stdout>:rank {rank} is here" for rank in (0, 1)]
    assert found["err"].count("]<stderr>:and complains") == 2
    assert found["left"] == []
    print(f"two ranks in {found['seconds']:.1f} s")


def test_workers_keep_running_between_functions(local: Application) -> None:
    found = local.ask("workers_that_stay")
    assert (found["run"], found["again"], found["single"]) == ([1, 1], [3, 3], 6)
    assert (found["submit"], found["remote"]) == (13, [10, 17])
    assert found["error"] == "ZeroDivisionError: integer division or modulo by zero" and found["after"] == [10, 17]
    assert found["busy"].startswith("TimeoutError: 0 of 2 Spark tasks have started within 2 s")
    assert re.fullmatch(r"(\d{4}-\d\d-\d\d [\d:.]{12} \[[01]\]<stdout>:hello\n){2}", found["out"])


def test_functions_that_raise_and_spark_killing_its_workers(local: Application) -> None:
    found = local.ask("failing")
    assert found["error"].count("ValueError: on purpose\n\n") == 1 and "in raises" in found["error"]
    assert "allreduce" not in found["error"]
    in_time(found["seconds"], 60.0, "an error of a rank")
    assert "was lost, and its ranks 0, 1 with it" in found["killed"]
    assert found["left"] == [] and found["works"] == 5


def test_bad_input(local: Application) -> None:
    found = local.ask("bad_input")
    room = "num_proc=9, but Spark has 3 slots (spark.master local[3], 1 CPU for each task)"
    assert room in found["slots"] and room in found["elastic slots"]
    assert "num_workers=0: a job has at least one worker" in found["none"]
    assert "without mpirun" in found["mpi"] and "5 is not a function" in found["function"]
    assert "no interface nothing0" in found["nics"] and "start_timeout" in found["timeout"]
    assert found["least"] == "ValueError: min_num_proc=3: expected a number from 1 to num_proc, which is 2"
    assert found["most"] == "ValueError: max_num_proc=1: expected at least num_proc, which is 2"


def test_without_a_session(local: Application) -> None:
    code = "import farandole.spark as s; s.run(print, num_proc=1)"
    done = subprocess.run([sys.executable, "-c", code], env=local.environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("RuntimeError: there is no Spark session")


def test_through_spark_connect(local: Application) -> None:
    output = local.run(str(HERE / "spark_connect_driver.py"), SPARK_REMOTE=local.remote)
    assert "kind: pyspark.sql.connect.session" in output
    assert "sums: [3.0, 3.0] [0, 1]" in output
    assert "heard: ['[0]<stdout>:rank 0 is here', '[1]<stdout>:rank 1 is here']" in output
    assert "refused: num_proc=9, but Spark has 3 slots" in output


def test_a_cluster_of_two_workers(cluster: Application) -> None:
    found = cluster.ask("contract", count=4)["run"]
    assert [one["rank"] for one in found] == [0, 1, 2, 3] and {one["sum"] for one in found} == {24.0}
    assert len({one["executor"] for one in found}) == 2
    # Both executors are on one machine, and each rank sees the GPUs of all of them there.
    assert [one["local"] for one in found] == [[rank, 4] for rank in range(4)]
    visible = {one["gpus"] for one in found}
    assert [one["devices"] for one in found] == [[str(rank)] for rank in range(4)]
    assert len(visible) == 1 and sorted(visible.pop().split(",")) == ["4", "5", "6", "7"]


class SparkRun(ElasticRun):
    """Like a job of `farandole run`, in a driver that already runs."""

    def __init__(self, cluster: Application, scratch: Path, least: int, most: int) -> None:
        self.scratch = scratch
        self.np = most
        self.process: Any = cluster._process  # which must not end
        self._cluster = cluster
        cluster.begin("elastic", scratch=str(scratch), least=least, most=most)

    def __exit__(self, *_: object) -> None:
        (self.scratch / "finish").touch()

    def __enter__(self) -> SparkRun:
        return self

    def results_of_run(self) -> Any:
        (self.scratch / "finish").touch()
        return self._cluster._answer()


def test_a_killed_executor_is_replaced(cluster: Application, tmp_path: Path) -> None:
    with SparkRun(cluster, tmp_path, 1, 4) as run:
        first = run.until(lambda now: now["size"] == 4 and now["step"] > 5)
        victim = cluster.executors()[0]
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        after = run.until(lambda now: now["generation"] > first["generation"])
        assert after["size"] == 2 and len(set(first["pids"]) & set(after["pids"])) == 2
        continued_s = after["time"] - began
        full = run.until(lambda now: now["size"] == 4 and now["generation"] > first["generation"])
        assert set(after["pids"]) < set(full["pids"])  # survivors keep their processes
        returned = run.results_of_run()
        found, results = run.counts(), run.results()
    print(f"training continued after {continued_s:.2f} s, with all ranks after {full['time'] - began:.1f} s; {found}")
    assert victim not in cluster.executors() and len(cluster.executors()) == 2
    assert (found.lost, found.duplicated) == (0, 0) and {2, 4} <= set(results[0]["sizes"]) <= {2, 3, 4}
    assert len(results) == 4 and len(returned) == 1 and returned[0] in full["pids"]
