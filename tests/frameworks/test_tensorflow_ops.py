# The battery on TensorFlow: eager, in functions and in sessions, with compiled operations and with callbacks.
# Touches the battery, its binding to TensorFlow and farandole.tensorflow.
"""The whole table of the contract, errors included; a job for each way through graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from battery.run import judge
from tensorflow_jobs import ENVIRONMENT, needs_tensorflow, results

pytestmark = [pytest.mark.ranks, pytest.mark.slow, needs_tensorflow]
HERE = Path(__file__).parent
# The way through graphs, the forms, the number of ranks.
FORMS = [("compiled", "eager function session", 3), ("callback", "function session", 2)]


@pytest.mark.timeout(450)
@pytest.mark.parametrize(("way", "forms", "ranks"), FORMS, ids=lambda part: str(part))
def test_the_battery(way: str, forms: str, ranks: int) -> None:
    found = results("tensorflow_binding.py", ranks, *forms.split(), FARANDOLE_TENSORFLOW_OPS=way)
    assert len(found) > 40 * len(forms.split())
    for name in found:
        judge(found, name, ranks)


def test_farandole_alone_imports_no_framework() -> None:
    program = "import sys, farandole; sys.exit(any(n.split('.')[0] in ('tensorflow', 'keras') for n in sys.modules))"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30, env=ENVIRONMENT)


@pytest.mark.parametrize("module", ["tensorflow", "keras"])
def test_what_is_missing_is_named(module: str, tmp_path: Path) -> None:
    hide = f"import sys; sys.modules['{module}'] = None; sys.meta_path.insert(0, None) if False else None"
    program = f"import sys, importlib.util\nfind = importlib.util.find_spec\n{hide}\n"
    program += f"importlib.util.find_spec = lambda name, *a: None if name == '{module}' else find(name, *a)\n"
    program += f"import farandole.{module}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env={**os.environ, **ENVIRONMENT}
    )
    assert done.returncode == 1 and "ImportError" in done.stderr, done.stderr
    assert f"pip install {module}" in done.stderr
