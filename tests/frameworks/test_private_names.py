# Each private name of a framework is removed: only the documented consequence happens.
# Touches the frameworks in separate processes.
"""The names are in src/farandole/bindings/private, one file per framework, each with what happens without it."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.bindings.private import lightning_names

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
MXNET = HERE.parents[1] / "build" / "mxnet" / "bin" / "python"
pytestmark = pytest.mark.timeout(300)


def run(framework: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """The cases of a framework, in a separate process."""
    if python == sys.executable and importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    # The entry point, which torch's import runs, would find the names before they are removed.
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    command = [python, "-W", "ignore", str(HERE / "private_names_job.py"), framework]
    with tempfile.TemporaryDirectory() as path:  # torch's compiler makes a directory when it is imported
        environment["TMPDIR"] = path
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("framework", ["torch", "jax", "ray"])
def test_without_each_name_of(framework: str) -> None:
    done = run(framework)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found
    for path, (announced, result) in found.items():
        assert "code" not in result, f"without {path} the process ended with {result['code']}: {done.stderr[-4000:]}"
        expected = "ImportError: farandole.jax does not support JAX" if framework == "jax" else ""
        assert result["raised"].startswith(expected) and bool(result["raised"]) == bool(expected), (path, result)
        quiet = "there is no such recorder" in announced  # releases before it have none
        assert quiet or [announced in line for line in result["warned"]] == [True], (path, result)


@pytest.mark.parametrize("framework", ["lightning", "pyspark", "tensorflow", "mxnet"])
def test_without_any_name_of(framework: str) -> None:
    """Names that do not depend on each other are removed in one process; the job has the expected consequences."""
    if framework == "mxnet" and not MXNET.exists():
        pytest.skip("MXNet has an environment of its own, build/mxnet")
    done = run(framework, str(MXNET) if framework == "mxnet" else sys.executable)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("missing", ["_AcceleratorConnector", "_choose_and_init_cluster_environment"])
def test_a_lightning_with_another_connector(missing: str) -> None:
    class Connector:
        pass

    name = "lightning.pytorch.trainer.connectors.accelerator_connector"
    module = types.ModuleType(name)
    if missing != "_AcceleratorConnector":
        module.__dict__["_AcceleratorConnector"] = Connector
    with pytest.warns(UserWarning, match=f"{missing} is missing, .*under srun needs --ntasks-per-node"):
        lightning_names.answer_environment(module, lambda strategy: None)
    assert vars(Connector).keys() == vars(type("Connector", (), {})).keys()


# --- in no other file ------------------------------------------------------------------------------------------------

ROOMS = ("torch", "lightning", "ray", "spark", "jax", "tensorflow", "keras", "mxnet", "tools")
# Attributes that classes of one room use from classes of another room.
ABOVE = {"lightning": "torch", "tensorflow": "keras", "spark": "lightning"}
# In src/farandole, with the reason.
ALLOWED = {
    "autoload.py: _rendezvous_handlers": "the import of torch loads no second file; private/torch_names.py tells of it",
    "jax/training.py: _replace": "of named tuples, which Python documents",
    "spark/data_loaders/pytorch_data_loaders.py: _asdict": "of named tuples, which Python documents",
    "spark/common/params.py: _set": "of Params, for the authors of stages",
    "spark/common/params.py: _setDefault": "of Params, for the authors of stages",
    "spark/common/persistence.py: _set": "of Params, for the authors of stages",
}
# Attributes that the functions which create distributed optimizers add to them; functions that Python documents.
GIVEN = {"torch": {"_gradients", "_param_names"}, "tools": {"_current_frames", "_exit", "_getframe"}}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def defined(tree: ast.Module) -> Iterator[str]:
    """Names that this module defines. A name that is only declared (`_name: Any`) belongs to another module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is None:
            node.target.ctx = ast.Load()
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.ImportFrom) and (node.level or str(node.module).startswith("farandole")):
            yield from (one.asname or one.name for one in node.names)
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg


def used(tree: ast.Module) -> Iterator[str]:
    """Private names that this module uses."""
    for node in ast.walk(tree):
        words: list[str] = []
        if isinstance(node, ast.Attribute):
            words = [node.attr]
        elif isinstance(node, ast.Import):
            words = [word for one in node.names for word in one.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and not str(node.module).startswith("farandole"):
            words = [*str(node.module).split("."), *(one.name for one in node.names)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            named = node.args[1]
            if node.func.id in ("getattr", "setattr", "hasattr", "delattr") and isinstance(named, ast.Constant):
                words = [str(named.value)]
        elif isinstance(node, ast.Constant) and node.value == "_rendezvous_handlers":
            words = [node.value]
        yield from filter(is_private, words)


def undeclared_private_names(sources: dict[str, str]) -> list[str]:
    """Private names in these files (by their paths) that none of our own classes and modules of the room defines."""
    trees = {path: ast.parse(text) for path, text in sources.items() if not path.startswith("bindings/private/")}
    ours: dict[str, set[str]] = {}
    for path, tree in trees.items():
        ours.setdefault(path.partition("/")[0], set()).update(defined(tree))
    common = {name for room, names in ours.items() if room not in ROOMS for name in names}
    found = set()
    for path, tree in trees.items():
        room = path.partition("/")[0]
        if room in ROOMS or path == "autoload.py":
            known = common | GIVEN.get(room, set()) | ours[room] | ours.get(ABOVE.get(room, ""), set())
            found |= {f"{path}: {name}" for name in used(tree) if name not in known}
    return sorted(found)


def test_private_names_are_used_in_one_place() -> None:
    package = SOURCE / "farandole"
    sources = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")}
    assert undeclared_private_names(sources) == sorted(ALLOWED)


def test_missing_private_names_are_reported() -> None:
    text = """
class Ours:
    _declared: int
    def __init__(self, trainer):
        self._own = trainer._theirs + self._declared + self._own
        torch._foreach_copy_()
        hasattr(trainer, "_asked")
from torch._inner import _imported
"""
    names = ("_asked", "_declared", "_foreach_copy_", "_imported", "_inner", "_theirs")
    assert undeclared_private_names({"torch/one.py": text}) == [f"torch/one.py: {name}" for name in names]


def test_what_the_import_of_torch_runs_is_short() -> None:
    assert len((SOURCE / "farandole" / "autoload.py").read_text().splitlines()) <= 60
