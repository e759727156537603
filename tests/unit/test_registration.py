# The names of our strategies in Lightning's registries, with unusual import systems.
# Touches small test packages with Lightning's names, in separate processes.
"""Our import hook never makes an import of Lightning fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REGISTRY = """
class Registry(dict):
    def register(self, name, make, description):
        self[name] = make
StrategyRegistry = Registry()
"""
BEFORE = """
import importlib.machinery, sys
from farandole.lightning import registration
NAME = "pytorch_lightning.strategies"

class Sealed(importlib.machinery.SourceFileLoader):
    def __setattr__(self, name, value):
        if name == "exec_module":
            raise AttributeError("nobody may change this loader")
        super().__setattr__(name, value)

class Finder:
    asked = 0
    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        Finder.asked += 1
        return self.special(path)
"""
AFTER = """
registration.watch()
[index] = [index for index, finder in enumerate(sys.meta_path) if isinstance(finder, registration.ImportHook)]
sys.meta_path.insert(index + 1, Finder())
import pytorch_lightning.strategies as found
print(Finder.asked, list(found.StrategyRegistry))
"""
SEALED = """
def special(self, path):
    spec = importlib.machinery.PathFinder.find_spec(NAME, path)
    spec.loader = Sealed(spec.loader.name, spec.loader.path)
    return spec
Finder.special = special
"""
RAISING = """
def special(self, path):
    if Finder.asked == 1:
        raise RuntimeError("an error of a finder")
Finder.special = special
"""
BROKEN = """
def special(self, path):
    raise ImportError("a finder that fails")
Finder.special = special
"""
OLD = """
class Finder:
    asked = 0
    def find_module(self, name, path=None):  # the old method, which Python 3.11 still calls
        return None
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "pytorch_lightning" / "strategies").mkdir(parents=True)
    (folder / "pytorch_lightning" / "__init__.py").touch()
    (folder / "pytorch_lightning" / "strategies" / "__init__.py").write_text(REGISTRY)
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT / 'src'}"}
    command = [sys.executable, "-c", BEFORE + code + AFTER]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("code", "printed", "warned"),
    [
        ("Finder.special = lambda self, path: None", "1 ['farandole', 'horovod']", ""),
        (OLD, "0 ['farandole', 'horovod']", ""),
        (SEALED, "1 []", "is not available in pytorch_lightning.strategies: nobody may change this loader"),
        (RAISING, "2 []", ""),
    ],
    ids=["usual", "an old finder", "a sealed loader", "a finder that fails once"],
)
def test_the_import_of_lightning_works(tmp_path: Path, code: str, printed: str, warned: str) -> None:
    done = run(code, tmp_path)
    assert done.returncode == 0 and done.stdout.strip() == printed, done.stdout + done.stderr
    assert (warned in done.stderr) if warned else not done.stderr, done.stderr


def test_the_error_of_another_finder_is_its_own(tmp_path: Path) -> None:
    done = run(BROKEN, tmp_path)
    assert done.returncode == 1 and done.stderr.endswith("ImportError: a finder that fails\n"), done.stderr
    assert "registration.py" not in done.stderr
