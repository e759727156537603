# The battery on TensorFlow: eager, in functions and in sessions, with compiled operations and with callbacks.
# Touches the battery, its binding to TensorFlow and farandole.tensorflow.
"""The whole table of cases, including errors; one job with compiled operations and one with callbacks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from battery.run import judge_all
from tensorflow_jobs import TENSORFLOW, needs_tensorflow, results

pytestmark = [pytest.mark.ranks, pytest.mark.slow, needs_tensorflow]
HERE = Path(__file__).parent
# Eager tensors, functions and sessions, with compiled operations and with callbacks.
FORMS = ["eager", "function/compiled", "function/callback", "session/compiled", "session/callback"]
WITH_TWO_RANKS = pytest.param(2, FORMS[:3], id="2", marks=pytest.mark.nightly)


@pytest.mark.timeout(450)
@pytest.mark.parametrize(("ranks", "forms"), [WITH_TWO_RANKS, (2, FORMS[4:]), (3, FORMS[:4])])
def test_the_battery(ranks: int, forms: list[str]) -> None:
    judge_all(results("tensorflow_binding.py", ranks, *forms, **TENSORFLOW), ranks, forms, 40)


def test_farandole_alone_imports_no_framework() -> None:
    program = "import sys, farandole; sys.exit(any(n.split('.')[0] in ('tensorflow', 'keras') for n in sys.modules))"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30, env=TENSORFLOW)


def failed_import(program: str, *places: Path) -> str:
    """What a program says that ends with an ImportError; `places` come before all that is installed."""
    environment = {**os.environ, **TENSORFLOW}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, places), TENSORFLOW["PYTHONPATH"]])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1 and "ImportError" in done.stderr, done.stderr
    return done.stderr


@pytest.mark.parametrize("module", ["tensorflow", "keras"])
def test_what_is_missing_is_named(module: str) -> None:
    said = failed_import(f"import sys\nsys.modules['{module}'] = None\nimport farandole.{module}")
    assert f"not installed: pip install {module}" in said, said


@pytest.mark.parametrize("module", ["tensorflow", "keras"])
@pytest.mark.parametrize("by_pip", [True, False])
def test_what_is_too_old_is_named(module: str, by_pip: bool, tmp_path: Path) -> None:
    package, record = tmp_path / module, tmp_path / f"{module}-2.15.0.dist-info"
    for folder in (package, record) if by_pip else (package,):
        folder.mkdir()
    (package / "__init__.py").write_text("__version__ = '2.15.0'\n")
    if by_pip:
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 2.15.0\n")
        program = f"import farandole.{module}"  # names what it needs before anything is used
    else:  # the metadata names a newer release, but the imported module decides
        program = f"import farandole.{module} as hvd; hvd.init()"
    said = failed_import(program, tmp_path)
    assert f"or newer; this is 2.15.0: pip install --upgrade {module}" in said, said


@pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed")
def test_an_old_keras_may_lie_beside_tf_keras(tmp_path: Path) -> None:
    (tmp_path / "keras-2.15.0.dist-info").mkdir()
    (tmp_path / "keras-2.15.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: keras\nVersion: 2.15.0\n"
    )
    environment = {**os.environ, **TENSORFLOW, "TF_USE_LEGACY_KERAS": "1"}
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{TENSORFLOW['PYTHONPATH']}"
    program = "import farandole.tensorflow.keras as hvd; hvd.callbacks.MetricAverageCallback()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=environment)
