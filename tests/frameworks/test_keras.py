# Keras on its backends, and tf_keras: training, callbacks, files; scripts as Horovod's users have them.
# Touches keras_cases.py, the scripts of this folder and the launcher.
"""One job per backend; the scripts run unchanged under horovodrun."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from battery.run import check_case
from tensorflow_jobs import CACHE, ENVIRONMENT, TENSORFLOW, needs_tensorflow, results

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
HERE = Path(__file__).parent
EXAMPLES, DOCS = HERE.parents[1] / "examples", HERE.parents[1] / "docs"
LAUNCH = "import sys; from farandole.launch.cli import horovodrun; sys.exit(horovodrun())"
BACKENDS = {
    "tensorflow": {"KERAS_BACKEND": "tensorflow"},
    "torch": {"KERAS_BACKEND": "torch", "TORCH_COMPILER": "aot_eager"},
    "torch, all of its compiler": {"KERAS_BACKEND": "torch"},
    "jax": {"KERAS_BACKEND": "jax", "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"},
    "tf_keras": {"KERAS_BACKEND": "tensorflow", "TF_USE_LEGACY_KERAS": "1"},
}


@pytest.mark.timeout(450)
@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=[pytest.mark.nightly] * ("," in name)) for name in BACKENDS]
)
def test_cases(backend: str) -> None:
    used = backend.partition(",")[0]
    needed = ["keras", used] if used in ("torch", "jax") else ["tensorflow", "tf_keras"]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    found = results("keras_cases.py", 2, **(ENVIRONMENT if backend == "jax" else TENSORFLOW), **BACKENDS[backend])
    assert len(found) == 11
    for name in found:
        check_case(found, name, 2)


def launched(script: Path, folder: str, *options: str, legacy: str = "0", **more: str) -> str:
    """What a script printed under horovodrun, in the folder `place`."""
    CACHE.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **TENSORFLOW, "TF_USE_LEGACY_KERAS": legacy, "TMPDIR": folder, **more}
    command = [sys.executable, "-c", LAUNCH, "-np", "2", sys.executable, str(script), *options]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@needs_tensorflow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "legacy"),
    [("horovod_tf2_script.py", "0"), ("horovod_tf_keras_script.py", "1"), ("horovod_keras_script.py", "0")],
)
def test_scripts_for_horovod(script: str, legacy: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        output = launched(HERE / script, folder, legacy=legacy)
        assert any("checkpoint" in name for name in os.listdir(folder))
    (accuracy,) = re.findall(r"\baccuracy ([\d.]+)", output)
    assert float(accuracy) > 0.8, output[-2000:]


@needs_tensorflow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["keras", "tensorflow"])
def test_examples(kind: str) -> None:
    if importlib.util.find_spec("sklearn") is None:  # not imported here: it changes the environment
        pytest.skip("scikit-learn is not installed")
    script = EXAMPLES / f"{kind}_digits.py"
    with tempfile.TemporaryDirectory() as folder:
        output = launched(
            script, folder, "--epochs", "3", "--save", "digits.keras", TESTS_WITHOUT="matplotlib pandas jax"
        )
        assert "digits.keras" in os.listdir(folder)
    (accuracy,) = re.findall(r"\baccuracy ([\d.]+)%", output)  # one rank speaks
    assert float(accuracy) > 60


@needs_tensorflow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", ["keras.md", "tensorflow.md"])
def test_the_code_of_the_pages(page: str) -> None:
    code = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)[0]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(code)
        assert "loss below 0.01: True" in launched(script, folder)
