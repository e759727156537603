# Each private name of a framework, taken away: what was announced happens, and nothing else.
# Touches the frameworks in processes of their own.
"""The names stand in src/farandole/private, one file per framework, each with what happens without it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest

from farandole.private import lightning_names, spark_names, tensorflow_names

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


def run(framework: str) -> subprocess.CompletedProcess[str]:
    """The cases of a framework, in a process of their own."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    # What the entry point does in torch's import would find the names before they are taken away.
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    command = [sys.executable, str(HERE / "private_names_job.py"), framework]
    with tempfile.TemporaryDirectory() as place:  # torch's compiler makes a directory when it is imported
        environment["TMPDIR"] = place
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize("framework", ["torch", "jax", "ray"])
def test_without_each_name_of(framework: str) -> None:
    done = run(framework)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found
    for path, (announced, result) in found.items():
        assert "code" not in result, f"without {path} the process ended with {result['code']}: {done.stderr[-4000:]}"
        expected = "ImportError: farandole.jax does not know JAX" if framework == "jax" else ""
        assert result["raised"].startswith(expected) and bool(result["raised"]) == bool(expected), (path, result)
        quiet = "there is no such recorder" in announced  # releases before it have none
        assert quiet or [announced in line for line in result["warned"]] == [True], (path, result)


def test_what_objects_of_lightning_lack() -> None:
    done = run("lightning")
    assert done.returncode == 0, done.stderr[-4000:]
    assert lightning_names.loaders(types.SimpleNamespace()) == []
    lightning_names.go_on_with(object(), 3)
    assert not lightning_names.does_nothing(print)


@pytest.mark.parametrize("missing", ["_AcceleratorConnector", "_choose_and_init_cluster_environment"])
def test_a_lightning_whose_connector_is_another(missing: str) -> None:
    class Connector:
        pass

    name = "lightning.pytorch.trainer.connectors.accelerator_connector"
    module = types.ModuleType(name)
    if missing != "_AcceleratorConnector":
        module.__dict__["_AcceleratorConnector"] = Connector
    with pytest.warns(UserWarning, match=f"{missing} is missing, .*under srun needs --ntasks-per-node"):
        lightning_names.answer_environment(module, lambda strategy: None)
    assert vars(Connector).keys() == vars(type("Connector", (), {})).keys()


def test_what_spark_and_tensorflow_lack() -> None:
    with pytest.warns(UserWarning, match="it gets a new one"):
        spark_names.take_uid(object(), "uid")
    with pytest.warns(UserWarning, match="it ends with its process"):
        tensorflow_names.stop_server(object())
    assert spark_names.task_slots(object()) is None
    assert spark_names.local_path(object(), "s3://bucket/key") == "bucket/key"
    assert tensorflow_names.accumulated(object()) == []
    assert tensorflow_names.reduction_axes(object()) is None
    with pytest.raises(RuntimeError, match=re.escape("give them to apply()")):
        tensorflow_names.trainable(object().__getattribute__)


# --- nowhere else ----------------------------------------------------------------------------------------------------

# Objects of frameworks by the names that our code gives them.
THEIRS = r"torch|dist|c10d|jax|tf|ray|internal_kv|SparkContext|trainer|fit_loop|loop|storage|optimizer\.param_groups"
PRIVATE = re.compile(rf"(?:\b(?:{THEIRS})\._[a-z]\w*|\bimport _[a-z]\w+|\._(?:src|internal)\b)")


def test_private_names_are_used_in_one_place() -> None:
    rooms = ("torch", "lightning", "ray", "spark", "jax", "tensorflow", "keras")
    files = [path for room in rooms for path in (SOURCE / "farandole" / room).rglob("*.py")]
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in [*files, SOURCE / "farandole" / "autoload.py"]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert found == []


def test_what_the_import_of_torch_runs_is_short() -> None:
    assert len((SOURCE / "farandole" / "autoload.py").read_text().splitlines()) <= 60
