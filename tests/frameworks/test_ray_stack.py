# The whole stack on Ray: integrations as users write them, `farandole fit`, and a model from data to predictions.
# Touches ray_cluster.py, whose process runs ray_patterns.py, and the examples.
"""One cluster with 4 CPUs, and 4 declared GPUs that no test uses."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
from ray_cluster import ROOT, Cluster, cluster_fixture

if importlib.util.find_spec("ray") is None or importlib.util.find_spec("lightning") is None:
    pytest.skip("Ray or Lightning is not installed", allow_module_level=True)

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(600)]


cluster = cluster_fixture({"num_cpus": 6, "num_gpus": 4})


def test_horovod_on_ray_by_its_executor(cluster: Cluster, tmp_path: Path) -> None:
    found = cluster.ask("executor_pattern", storage=str(tmp_path))
    assert len(found) == 4 and all(one == found[0] for one in found)
    (first, last), size = found[0]
    assert size == 4 and last < first


def test_horovod_on_ray_by_ray_train(cluster: Cluster, tmp_path: Path) -> None:
    found = cluster.ask("horovod_trainer_pattern", storage=str(tmp_path))
    assert (found["epoch"], found["size"]) == (1, 2) and found["loss"] < 1


def test_lightning_on_ray(cluster: Cluster, tmp_path: Path) -> None:
    found = cluster.ask("lightning_pattern", storage=str(tmp_path))
    assert (found["epoch"], found["workers"]) == (1, 2.0) and found["train_loss"] < 2


def test_lightning_on_ray_with_horovod(cluster: Cluster, tmp_path: Path) -> None:
    found = cluster.ask("three_layers_pattern", storage=str(tmp_path))
    assert (found["epoch"], found["workers"]) == (1, 2.0) and found["train_loss"] < 2


def test_a_stack_from_a_file(cluster: Cluster, tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "lightning_digits.py", tmp_path)
    text = (ROOT / "examples" / "stack.yaml").read_text().replace("kind: local", "kind: ray")
    text = text.replace("max_epochs: 2", "max_epochs: 1, limit_train_batches: 5, default_root_dir: " + str(tmp_path))
    logs = f"logger: {{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {{save_dir: {tmp_path}/logs}}}}"
    (tmp_path / "stack.yaml").write_text(text.replace("logger: false", logs))
    cluster.run("-m", "farandole", "fit", str(tmp_path / "stack.yaml"))
    [table] = (tmp_path / "logs").rglob("metrics.csv")
    assert "accuracy" in table.read_text().splitlines()[0]


def test_a_stack_that_the_cluster_has_no_room_for(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text("orchestration: {kind: ray, ranks: 50}\napplication: {module: digits.Digits}\n")
    printed, code = cluster.ask("stack_without_room", path=str(path))
    [text] = [line for line in printed.splitlines() if line.startswith(("farandole", "Traceback"))]
    assert code == 1
    assert text.startswith(
        "farandole fit: orchestration: ray: the cluster had no free resources for 50 workers within 1 s"
    )
    assert text.endswith("50 CPU are needed, the cluster has 6, 6 are free")


def test_a_model_from_data_to_predictions(cluster: Cluster, tmp_path: Path) -> None:
    arguments = ["--epochs", "2", "--rates", "0.1", "0.0001", "--storage", str(tmp_path)]
    output = cluster.run(str(ROOT / "examples" / "lifecycle.py"), *arguments)
    [(rate, accuracy)] = re.findall(r"best rate ([\d.]+): accuracy ([\d.]+)%", output)
    assert (rate, float(accuracy) > 60) == ("0.1", True)
    assert "served: that is a 0, and it should be a 0" in output
