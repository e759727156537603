# A large suite for torch in one job, and random programs whose results two engines must agree on.
# Starts torch_suite_training.py and soak.py through horovodrun.
"""`PYTHONPATH=src:tests/ranks python tests/strangers/test_suites.py 2 numpy,torch SEED [COUNT]` replays programs."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import test_scripts
from test_scripts import HERE, launched

PATH = f"{HERE}:{HERE.parent / 'ranks'}:{test_scripts.VARIABLES['PYTHONPATH']}"
SEED = 20_000  # programs are numbered from here
# Frameworks together in one process, ranks, and how many programs.
SOAKS = [
    pytest.param("numpy,torch", 2, 36, id="few"),
    pytest.param("numpy,torch", 2, 1000, id="many-2", marks=pytest.mark.nightly),
    pytest.param("numpy,torch", 3, 700, id="many-3", marks=pytest.mark.nightly),
    pytest.param("numpy,torch,tensorflow", 2, 200, id="tensorflow", marks=pytest.mark.nightly),
    pytest.param("numpy,jax", 2, 100, id="jax", marks=pytest.mark.nightly),
]
pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(1500)]


def soak(engine: str, ranks: int, frameworks: str, *words: str) -> tuple[list[dict[str, Any]], str]:
    """What each rank said of each program, in the order of ranks and programs, and the job's last words."""
    without = "sklearn matplotlib pandas" + " jax" * ("jax" not in frameworks)
    environment = {"PYTHONPATH": PATH, "FARANDOLE_ENGINE": engine, "TESTS_WITHOUT": without}
    done = launched(ranks, str(HERE / "soak.py"), frameworks, *words, patience=700, **environment)
    lines = re.findall(r"^\[(\d+)\]<stdout>:(\{.*)$", done.stdout, flags=re.MULTILINE)
    found = [{"rank": int(rank), **json.loads(line)} for rank, line in lines]
    words_of_end = done.stderr[-3000:] if done.returncode else ""
    return sorted(found, key=lambda one: (one["seed"], one["rank"])), words_of_end


@pytest.mark.parametrize(("frameworks", "ranks", "count"), SOAKS)
def test_engines_agree(frameworks: str, ranks: int, count: int) -> None:
    for name in frameworks.split(","):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    ours, words = soak("native", ranks, frameworks, str(SEED), str(count))
    wanted, more = soak("python", ranks, frameworks, str(SEED), str(count))
    assert not words and not more, f"native: {words}\npython: {more}"
    different = sorted({one["seed"] for one, other in zip(ours, wanted, strict=True) if one != other})
    assert different == [], f"replay: python {Path(__file__).name} {ranks} {frameworks} {different[0]}"
    assert len(ours) == ranks * count
    # The programs are worth the time: most calls give results, and some are mistakes.
    calls, errors = sum(one["calls"] for one in ours), sum(one["errors"] for one in ours)
    assert calls > 5 * len(ours) and 0.02 < errors / calls < 0.25


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3])
def test_large_suite(ranks: int) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    done = launched(ranks, str(HERE / "torch_suite_training.py"), patience=700)
    assert done.returncode == 0, done.stderr[-4000:]
    told = re.findall(r"cases: (\d+), wrong: (\d+)", done.stdout)
    assert len(told) == ranks and all(int(cases) > 150 and wrong == "0" for cases, wrong in told), told


def replay(ranks: str, frameworks: str, seed: str, count: str = "1") -> None:
    """Prints what the ranks call, and what comes of it on both engines."""
    for engine in ("native", "python"):
        found, words = soak(engine, int(ranks), frameworks, seed, count, "--say")
        print(engine, *(json.dumps(one) for one in found), words, sep="\n")


if __name__ == "__main__":
    replay(*sys.argv[1:])
