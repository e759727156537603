# The battery (the cases of every framework) on TensorFlow, and what its import needs.
# Touches the battery, its binding to TensorFlow and farandole.tensorflow.
"""Each job of the battery runs all cases, also those that expect errors, in one or more forms."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from battery.run import check_all
from tensorflow_jobs import TENSORFLOW, needs_tensorflow, results

pytestmark = [pytest.mark.ranks, pytest.mark.slow, needs_tensorflow]
HERE = Path(__file__).parent
# Eager tensors, tf.function, and graphs with a session; with compiled operations, or with callbacks into Python.
FORMS = ["eager", "function/compiled", "function/callback", "session/compiled", "session/callback"]
JOBS = [
    pytest.param(2, [*FORMS[:2], FORMS[4]], id="2"),
    pytest.param(2, FORMS[2:4], id="2, other forms", marks=pytest.mark.nightly),
    pytest.param(3, FORMS, id="3", marks=pytest.mark.nightly),
]


@pytest.mark.timeout(450)
@pytest.mark.parametrize(("ranks", "forms"), JOBS)
def test_the_battery(ranks: int, forms: list[str]) -> None:
    check_all(results("tensorflow_binding.py", ranks, *forms, **TENSORFLOW), ranks, forms, 40)


def test_farandole_alone_imports_no_framework() -> None:
    program = "import sys, farandole; sys.exit(any(n.split('.')[0] in ('tensorflow', 'keras') for n in sys.modules))"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30, env=TENSORFLOW)


def import_error_of(program: str, *folders: Path) -> str:
    """The error output of a program that must end with an ImportError. It looks for modules in `folders` first."""
    environment = {**os.environ, **TENSORFLOW}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, folders), TENSORFLOW["PYTHONPATH"]])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1 and "ImportError" in done.stderr, done.stderr
    return done.stderr


@pytest.mark.parametrize("module", ["tensorflow", "keras"])
def test_the_error_names_what_is_missing(module: str) -> None:
    text = import_error_of(f"import sys\nsys.modules['{module}'] = None\nimport farandole.{module}")
    assert f"not installed: pip install 'farandole[{module}]'" in text, text


@pytest.mark.parametrize("module", ["tensorflow", "keras"])
@pytest.mark.parametrize("with_metadata", [True, False])
def test_the_error_names_what_is_too_old(module: str, with_metadata: bool, tmp_path: Path) -> None:
    package, metadata = tmp_path / module, tmp_path / f"{module}-2.15.0.dist-info"
    for folder in (package, metadata) if with_metadata else (package,):
        folder.mkdir()
    (package / "__init__.py").write_text("__version__ = '2.15.0'\n")
    if with_metadata:
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 2.15.0\n")
        program = f"import farandole.{module}"  # the import fails, before anything of the module is used
    else:  # the installed metadata is of a newer release, but the imported module counts
        program = f"import farandole.{module} as hvd; hvd.init()"
    text = import_error_of(program, tmp_path)
    assert f"or newer; this is 2.15.0: pip install --upgrade {module}" in text, text


@pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed")
def test_an_old_keras_does_not_matter_with_tf_keras(tmp_path: Path) -> None:
    (tmp_path / "keras-2.15.0.dist-info").mkdir()
    (tmp_path / "keras-2.15.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: keras\nVersion: 2.15.0\n"
    )
    environment = {**os.environ, **TENSORFLOW, "TF_USE_LEGACY_KERAS": "1"}
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{TENSORFLOW['PYTHONPATH']}"
    program = "import farandole.tensorflow.keras as hvd; hvd.callbacks.MetricAverageCallback()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=environment)
