# The notebook runs; what workers print and raise appears in its cells; interrupting a cell ends the work.
# Touches processes.
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytestmark = pytest.mark.ranks
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("what", ["quickstart", "troubleshooting"])
def test_notebooks(what: str, tmp_path: Path) -> None:
    names = ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR", "TMPDIR")
    own = dict.fromkeys(names, str(tmp_path))
    command = [sys.executable, str(ROOT / "tests" / "notebook_program.py"), what]
    env = {**os.environ, **own, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("src", "tests/ranks"))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
