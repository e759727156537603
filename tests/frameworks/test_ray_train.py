# HorovodTrainer on Ray Train V2, Tune over it, TorchTrainer with our backend: a real local cluster.
# Touches ray_cluster.py, whose process runs the cases of ray_cases.py, and the examples.
"""What trainers report, save and survive."""

from __future__ import annotations

import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ray_cluster import ROOT, Cluster, cluster_fixture
from waiting import in_time

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(600)]


cluster = cluster_fixture({"num_cpus": 4, "num_gpus": 4})


def test_reports_checkpoints_and_shards_of_data(cluster: Cluster, tmp_path: Path) -> None:
    found = cluster.ask("trained", storage=str(tmp_path))
    # The last report, though only the first came with a checkpoint.
    assert found["metrics"] == {"epoch": 1, "total": 780, "count": 40, "x": 5}
    assert found["error"] is None and found["saved"] == "weights" and found["returned"] == "done"
    assert found["path"] == str(tmp_path / "lesson")


def test_a_train_function_that_raises(cluster: Cluster, tmp_path: Path) -> None:
    found = cluster.ask("raising", storage=str(tmp_path))
    assert found["text"].count("ValueError: on purpose") == 1 and found["ranks"] == [1]


def test_torch_trainer_with_our_backend(cluster: Cluster, tmp_path: Path) -> None:
    for one in cluster.ask("torch_trainer", storage=str(tmp_path)):
        assert one == {"backend": "farandole", "sum": 3.0, "gradient": [2.0, 2.0]}


def test_the_example_with_torch(cluster: Cluster) -> None:
    output = cluster.run(str(ROOT / "examples" / "ray_torch.py"), "--epochs", "2")
    (accuracy,) = re.findall(r"accuracy ([\d.]+)% on 2 workers", output)
    assert float(accuracy) > 50


def test_the_example_with_tune(cluster: Cluster) -> None:
    output = cluster.run(str(ROOT / "examples" / "ray_tune.py"), "--trials", "2", "--epochs", "3")
    (rate, accuracy) = re.findall(r"best rate ([\d.]+): accuracy ([\d.]+)%", output)[0]
    assert float(accuracy) > 50 and float(rate) > 0.001
    assert int(re.findall(r"(\d) of 2 trials were stopped early", output)[0]) == 1


def test_lightning_in_ray_train(cluster: Cluster, tmp_path: Path) -> None:
    output = cluster.run(str(ROOT / "examples" / "three_layers.py"), "--epochs", "5", "--storage", str(tmp_path))
    (loss, path) = re.findall(r"loss ([\d.]+) after 5 epochs, checkpoint .*path=([^)]+)", output)[0]
    assert float(loss) < 1.0 and (Path(path) / "checkpoint.ckpt").is_file()


def test_more_workers_than_the_cluster_has(cluster: Cluster, tmp_path: Path) -> None:
    found = cluster.ask("trainers_too_large", storage=str(tmp_path))
    many, elastic, split, custom = found["messages"]
    assert "free resources for 4 of 50 workers with 1 CPU within 1.5 s (placement_group_timeout_s)" in many
    assert "50 CPU are needed, the cluster has 4, 4 are free" in many
    assert "free resources for 4 of 7 workers" in elastic and "7 CPU are needed" in elastic
    assert "free resources for 1 of 2 workers with 3 CPU" in split
    assert "1 late are needed, the cluster has 0" in custom and "no node has 1 CPU and 1 late" in custom
    assert min(found["seconds"]) >= 1.5 and found["free"] == 4
    in_time(max(found["seconds"]), 15.0, "giving up on workers that do not come")


def test_a_node_that_comes_while_a_trainer_waits(cluster: Cluster, tmp_path: Path) -> None:
    code = f"""
from ray.train import RunConfig, ScalingConfig
from ray.train.horovod import HorovodConfig, HorovodTrainer

def train():
    import farandole, ray.train
    farandole.init()
    ray.train.report(dict(size=farandole.size()))

scaling = ScalingConfig(num_workers=2, resources_per_worker=dict(CPU=1, late=1))
run = RunConfig(storage_path={str(tmp_path)!r})
config = HorovodConfig(placement_group_timeout_s=90)
print(HorovodTrainer(train, horovod_config=config, scaling_config=scaling, run_config=run).fit().metrics)
"""
    with ThreadPoolExecutor(1) as pool:
        trained = pool.submit(cluster.run, "-c", code)
        assert cluster.ask("waiting_groups") == 1
        index = cluster.ask("add_node", num_cpus=2, resources={"late": 2})
        reports = trained.result()
    cluster.ask("remove_node", index=index)
    assert "{'size': 2}" in reports
