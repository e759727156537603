# Keras on its backends, and tf_keras: training, callbacks, files; scripts as Horovod's users have them.
# Touches keras_cases.py, the scripts beside it and the launcher.
"""One job per backend; the scripts run under horovodrun, as they are."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from battery.run import judge
from tensorflow_jobs import CACHE, ENVIRONMENT, needs_tensorflow, results

pytestmark = [pytest.mark.ranks, pytest.mark.slow, needs_tensorflow]
HERE = Path(__file__).parent
LAUNCH = "import sys; from farandole.launch.cli import horovodrun; sys.exit(horovodrun())"
BACKENDS = {
    "tensorflow": {"KERAS_BACKEND": "tensorflow"},
    "torch": {"KERAS_BACKEND": "torch"},
    "tf_keras": {"KERAS_BACKEND": "tensorflow", "TF_USE_LEGACY_KERAS": "1"},
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", BACKENDS)
def test_cases(backend: str) -> None:
    if importlib.util.find_spec("torch" if backend == "torch" else "tf_keras") is None:
        pytest.skip(f"what {backend} needs is not installed")
    found = results("keras_cases.py", 2, **BACKENDS[backend])
    assert len(found) == 8
    for name in found:
        judge(found, name, 2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "legacy"),
    [("horovod_tf2_script.py", "0"), ("horovod_tf_keras_script.py", "1"), ("horovod_keras_script.py", "0")],
)
def test_scripts_for_horovod(script: str, legacy: str, tmp_path: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **ENVIRONMENT, "TF_USE_LEGACY_KERAS": legacy, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", LAUNCH, "-np", "2", sys.executable, str(HERE / script)]
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, timeout=280)
        written = sorted(os.listdir(place))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (accuracy,) = re.findall(r"accuracy ([\d.]+)", done.stdout)
    assert float(accuracy) > 0.8 and written, done.stdout[-2000:]
