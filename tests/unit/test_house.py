"""The script that checks the rules of the repository: this tree keeps them, and each kind of violation is found.
Writes small trees into a temporary folder; starts one Python to look at what an import loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import house  # noqa: E402
import rules  # noqa: E402

CORE = "// A file.\n// Touches nothing.\n"
PYTHON = '"""A file.\nTouches nothing."""\n'


def test_every_exception_has_a_reason() -> None:
    assert all(len(reason) > 20 for files in rules.EXCEPTIONS.values() for reason in files.values())


VIOLATIONS = [
    ("core/wire/frame.cc", CORE + '#include "link/rings.h"\n', "core-arrow"),
    ("core/kernel/sum.cc", CORE + '#include "os/clock.h"\n', "core-arrow"),
    ("core/negotiate/plan.cc", CORE + '#include "os/clock.h"\n', "core-arrow"),
    ("core/cellar/wine.cc", CORE, "core-arrow"),
    ("core/engine/engine.cc", CORE + "#include <sys/socket.h>\n", "system-call"),
    ("core/negotiate/plan.cc", CORE + "#include <unistd.h>\n", "system-call"),
    ("core/os/stream.cc", CORE + "int f() { return ::socket(1, 2, 3); }\n", "core-call"),
    ("core/os/settings.cc", CORE + 'auto f() { return std::getenv("X"); }\n', "core-call"),
    ("core/engine/log.cc", CORE + 'void f() { std::cerr << "x"; }\n', "core-call"),
    ("src/farandole/base/errors.py", PYTHON + "from farandole.world.runtime import rank\n", "python-arrow"),
    ("src/farandole/base/errors.py", PYTHON + "from farandole.world import runtime\n", "python-arrow"),
    ("src/farandole/base/errors.py", PYTHON + "from ..world import runtime\n", "python-arrow"),
    ("src/farandole/rendezvous/mesh.py", PYTHON + "from ..launch import local\n", "python-arrow"),
    ("src/farandole/cellar.py", PYTHON, "python-arrow"),
    ("src/farandole/base/errors.py", PYTHON + "module_of('farandole.world.runtime')\n", "python-arrow"),
    ("src/farandole/base/errors.py", PYTHON + "module_of('..world.runtime', __package__)\n", "python-arrow"),
    ("src/farandole/base/errors.py", PYTHON + "import importlib\nimportlib.import_module('json')\n", "import-by-name"),
    ("src/farandole/base/errors.py", PYTHON + "__import__('json')\n", "import-by-name"),
    ("src/farandole/operations/ops.py", PYTHON + "import torch\n", "framework"),
    ("src/farandole/operations/ops.py", PYTHON + "def f():\n    import torch\n", "framework"),
    ("src/farandole/tools/bench.py", PYTHON + "import torch\n", "framework"),
    ("src/farandole/world/runtime.py", PYTHON + "import socket\n", "socket"),
    ("src/farandole/rendezvous/hub.py", PYTHON + "import subprocess\n", "process"),
    ("src/farandole/launch/local.py", PYTHON + "import os\nos.fork()\n", "process"),
    ("src/farandole/operations/ops.py", PYTHON + "import os\nx = os.environ['A']\n", "environment"),
    ("src/farandole/rendezvous/messages.py", PYTHON + "import pickle\n", "pickle"),
    ("src/farandole/operations/ops.py", PYTHON + "import ctypes\n", "ctypes"),
    ("src/farandole/operations/ops.py", "import os\n", "header"),
    ("src/farandole/operations/ops.py", '"""One line."""\nimport os\n', "header"),
    ("core/base/x.h", "#pragma once\n", "header"),
    ("src/farandole/operations/ops.py", PYTHON + "x = 1\n" * 700, "long-file"),
    ("src/farandole/operations/ops.py", PYTHON + "def f():\n" + "    x = 1\n" * 81, "long-function"),
    ("core/base/x.cc", CORE + "int f(int x) {\n" + "  x++;\n" * 81 + "}\n", "long-function"),
    ("tests/test_x.py", PYTHON + "time.sle" + "ep(1)\n", "sleep"),
    ("tests/test_x.py", PYTHON + "CODE = 'import time; time.sle" + "ep(1)'  # naps\n", "sleep"),
    ("tests/core/x_test.cc", CORE + "void f() { std::this_thread::sle" + "ep_for(x); }\n", "sleep"),
    ("docs/index.md", "see " + "/wo" + "rk/x\n", "word"),
    ("scripts/setup.sh", "pip install --index" + "-url x\n", "word"),
]


@pytest.mark.parametrize(("path", "text", "rule"), VIOLATIONS, ids=[f"{p}-{r}" for p, _, r in VIOLATIONS])
def test_a_broken_rule_is_found(tmp_path: Path, path: str, text: str, rule: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(text)
    assert rule in {finding.rule for finding in house.check(tmp_path)}


def test_files_that_import_each_other_are_found(tmp_path: Path) -> None:
    texts = {
        "base/one.py": "from . import two\n",
        "base/two.py": "def f():\n    from .three import g\n",
        "base/three.py": "from .one import h\n",
    }
    for path, text in texts.items():
        file = tmp_path / "src" / "farandole" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(PYTHON + text)
    assert {finding.rule for finding in house.check(tmp_path)} == {"circle"}
    (tmp_path / "src/farandole/base/three.py").write_text(PYTHON)
    assert house.check(tmp_path) == []


def test_test_files_with_one_name_are_found(tmp_path: Path) -> None:
    for folder in ("unit", "ranks"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / "test_life.py").write_text("# A test.\n# Touches nothing.\n")
    assert [(one.rule, one.path) for one in house.check(tmp_path)] == [("same-name", "tests/unit/test_life.py")]


FINE = [
    ("core/link/rings.cc", CORE + '#include "os/memory.h"\n#include <vector>\n// calls socket() never\n'),
    ("core/os/stream.cc", CORE + "#include <sys/socket.h>\nint f(int a) { return recv(a, nullptr, 0, 0); }\n"),
    ("core/engine/e.cc", CORE + "namespace farandole {\n" + "int f() { return 1; }\n" * 100 + "}\n"),
    ("src/farandole/rendezvous/mesh.py", PYTHON + "import socket\nfrom ..base.errors import PeerLost\n"),
    (
        "src/farandole/operations/ops.py",
        PYTHON + "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
    ),
    ("src/farandole/tools/bench.py", PYTHON + "def f():\n    import torch\n"),
    ("src/farandole/launch/spawn.py", PYTHON + "import subprocess\n"),
    ("tests/test_x.py", PYTHON + "time.sle" + "ep(1)  # sleep: the fault lasts a second\n"),
    ("tests/core/x_test.cc", CORE + "void f() { usle" + "ep(5); }  // sleep: between two checks\n"),
    ("src/farandole/launch/spawn.py", PYTHON + "def f(time):\n    time.sle" + "ep(1)\n"),
    ("src/farandole/tools/__init__.py", ""),
]


@pytest.mark.parametrize(("path", "text"), FINE, ids=[path for path, _ in FINE])
def test_allowed_code_breaks_no_rule(tmp_path: Path, path: str, text: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(text)
    assert [str(finding) for finding in house.check(tmp_path)] == []


def test_a_tree_without_git_is_checked_but_not_what_was_built_in_it(tmp_path: Path) -> None:
    for name in ("src/farandole/a.py", ".venv/lib/b.py", "build/c.py", "src/farandole/build/d.py", "__pycache__/e.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [file.relative_to(tmp_path).as_posix() for file in house.files(tmp_path)]
    assert found == ["src/farandole/a.py", "src/farandole/build/d.py"]


def test_importing_the_package_imports_no_framework() -> None:
    code = "import sys, farandole; print(' '.join(sorted({name.split('.')[0] for name in sys.modules})))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(run.stdout.split()) & rules.FRAMEWORKS
