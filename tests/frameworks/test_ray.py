# Executors on Ray: a real local cluster, real actors.
# Touches ray_cluster.py, whose process runs the cases of ray_cases.py.
"""The calls of Horovod's executors, placement, failures and their error messages."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray_cluster import ROOT, Cluster, cluster_fixture
from waiting import in_time

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


cluster = cluster_fixture({"num_cpus": 4, "num_gpus": 4})


def test_every_call_of_the_contract(cluster: Cluster) -> None:
    found = cluster.ask("contract")
    assert [one["rank"] for one in found["run"]] == [0, 1]
    assert all(one["size"] == 2 and one["sum"] == 3.0 and one["cross"] == [0, 1] for one in found["run"])
    assert [one["local"] for one in found["run"]] == [[0, 2], [1, 2]]
    assert [one["torch"] for one in found["run"]] == [["0", "2", "0"], ["1", "2", "1"]]
    # Each sees the GPUs of both, so that local_rank() chooses.
    gpus = {one["gpus"] for one in found["run"]}
    assert len(gpus) == 1 and len(gpus.pop().split(",")) == 2
    assert {one["extra"] for one in found["run"]} == {"7"}
    assert found["again"] == [11, 12] and found["remote"] == [8, 8]
    assert found["execute"] == [[12, 12], [14, 14]] and found["single"] == 14
    assert found["submit"] == ["x", 1] and found["workers"] == 2
    assert found["logged"] == [0, 1] and found["heard"] == [{"step": step, "rank": 0} for step in range(3)]
    assert found["free"] == 4


def test_a_function_that_raises_and_an_actor_that_dies(cluster: Cluster) -> None:
    found = cluster.ask("failing")
    assert found["error"].count("ValueError: on purpose") == 1 and found["error"].count("Traceback") <= 1
    assert "in raises" in found["error"] and "never" not in found["error"]
    in_time(found["seconds"], 10.0, "an error of a rank")
    assert found["same"] and found["after"] == [3.0, 3.0]
    rank, text = found["died"]
    assert rank == 0 and "its actor has died" in text
    in_time(found["death_seconds"], 15.0, "the death of an actor")


def test_too_many_workers_are_an_error_with_numbers(cluster: Cluster) -> None:
    many, hosts, gpus, elastic, free = cluster.ask("too_many")
    assert "no free resources for 50 workers within 1 s" in many
    assert "50 CPU are needed, the cluster has 4, 4 are free" in many
    assert "9 nodes with 1 CPU are needed, there are 1" in hosts
    assert "64 GPU are needed, the cluster has 4" in gpus and "no node has 1 CPU and 64 GPU" in gpus
    assert "of the 50 ranks" in elastic and "50 CPU are needed, the cluster has 4" in elastic
    assert free == "4.0"


def test_workers_in_the_callers_placement_group(cluster: Cluster) -> None:
    found = cluster.ask("current_group")
    assert found["sums"] == [3.0, 3.0] and found["free"] == 1
    assert "has 3 bundles with 1 CPU, but 9 are needed" in found["error"]


def test_arguments_that_contradict_each_other() -> None:
    code = """
from farandole.ray import RayExecutor
from horovod.ray.elastic import RayHostDiscovery, TestDiscovery
from horovod.ray.runner import Coordinator, MiniSettings, StaticAdapter, StaticParams
from horovod.ray.strategy import ColocatedStrategy, PGStrategy
from horovod.ray import BaseHorovodWorker, ElasticRayExecutor
for arguments in (
    dict(max_workers=2), dict(num_workers=2, min_workers=1), dict(), dict(num_workers=1, num_hosts=1),
    dict(num_workers=0), dict(min_workers=3, max_workers=2), dict(num_workers=(1, 2), max_workers=2),
    dict(num_workers=1, gpus_per_worker=1), dict(num_workers=1, use_gpu=True, gpus_per_worker=0), dict(min_workers=0),
):
    try:
        RayExecutor(RayExecutor.create_settings(), **arguments)
    except ValueError as error:
        assert len(str(error)) > 20, error
    else:
        raise SystemExit(f"{arguments} was accepted")
executor = RayExecutor(num_workers=1)
try:
    executor.run(print)
except RuntimeError as error:
    assert "call start() first" in str(error)
executor.shutdown()
settings = ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=4, placement_group_timeout_s=7)
assert settings.start_timeout.remaining() > 20 and settings.elastic
ElasticRayExecutor(settings, cpus_per_slot=2, env_vars={"A": 1})
import sys
assert "ray.train" not in sys.modules and "pandas" not in sys.modules  # only for those who use the trainer
print("all refused")
"""
    assert fresh(code).stdout == "all refused\n"


def test_the_coordinator_knows_hosts_and_nodes() -> None:
    code = """
from horovod.ray.runner import Coordinator, MiniSettings
coordinator = Coordinator(MiniSettings())
for rank, (host, node) in enumerate([("host", "a"), ("host", "b"), ("other", "c"), ("host", "a")]):
    coordinator.register(host, node, rank)
assert coordinator.hostnames == {"host", "other"} and coordinator.world_size == 4
print(coordinator.node_id_string, coordinator.finalize_registration()[3])
"""
    numbers = {"LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    assert fresh(code).stdout == f"a:2,b:1,c:1 { {'HOROVOD_' + name: value for name, value in numbers.items()} }\n"


def fresh(code: str, *options: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT / "src")]))}
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_an_old_ray_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ray-2.9.3.dist-info").mkdir()
    (tmp_path / "ray-2.9.3.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.9.3\n")
    output = fresh("import farandole.ray", path=str(tmp_path)).stderr
    assert output.endswith(
        "ImportError: farandole.ray needs Ray 2.60 or newer, and this is 2.9.3: pip install 'farandole[ray]'\n"
    )


def test_no_ray(tmp_path: Path) -> None:
    import numpy

    for entry in Path(numpy.__file__).parents[1].iterdir():
        if not entry.name.startswith("ray"):
            (tmp_path / entry.name).symlink_to(entry)
    for name in ("farandole", "horovod"):
        output = fresh(f"import {name}.ray", "-S", path=str(tmp_path)).stderr
        assert output.endswith("needs Ray 2.60 or newer, and it is not installed: pip install 'farandole[ray]'\n"), (
            output
        )


def test_the_names_of_rays_own_module(cluster: Cluster) -> None:
    assert cluster.ask("names") == ["farandole.ray.train"] * 3


def test_the_module_ray_train_horovod_alone() -> None:
    """There is no other import before it, neither of farandole nor of Ray."""
    code = """
from ray.train.horovod import HorovodTrainer
from ray.train import ScalingConfig
trainer = HorovodTrainer(print, scaling_config=ScalingConfig(num_workers=2))
print(HorovodTrainer.__module__, type(trainer.backend_config).__module__)
"""
    done = fresh(code)
    assert done.stdout == "farandole.ray.train farandole.ray.train\n", done.stdout + done.stderr


def test_the_first_script_of_the_guide(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text((ROOT / "docs" / "ray.md").read_text().split("```python\n")[1].partition("```")[0])
    assert cluster.run(str(script)).endswith("[(0, 2), (1, 2)]\n")
