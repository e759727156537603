"""`farandole demo --kill` as a user types it: the job shrinks, grows again, and says that nothing is lost.
Starts it in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"


@pytest.mark.ranks
def test_the_demo_kills_a_rank_and_gets_it_back() -> None:
    command = [sys.executable, "-m", "farandole", "demo", "--kill"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"generation \d: (\d) ranks", done.stdout) == ["3", "2", "3"]
    assert "is killed with SIGKILL" in done.stdout
    assert "weights of 3 ranks: equal" in done.stdout and "lost 0, duplicated 0" in done.stdout
