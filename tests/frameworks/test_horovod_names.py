# Every public name of Horovod's Python packages must exist with its arguments, or be in the table of absent names.
# Starts horovod_names_look.py once per framework; reads the table of docs/horovod-names.md.
"""horovod_names.json has the facts: values, functions with their arguments, classes with those of their methods."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import jobs
import pytest
import tensorflow_jobs
import test_mxnet

HERE = Path(__file__).parent
TABLE = HERE.parents[1] / "docs" / "horovod-names.md"
NAMES = json.loads((HERE / "horovod_names.json").read_text())
PLAIN = {"PYTHONPATH": f"{jobs.SOURCE}:{HERE}", "OMP_NUM_THREADS": "1"}
PARTS: dict[str, Sequence[str]] = {
    "common": ("horovod", "horovod.common", "horovod.data", "horovod.runner"),
    "torch": ("horovod.torch",),
    "tensorflow": ("horovod.tensorflow", "horovod.keras", "horovod._keras"),
    "mxnet": ("horovod.mxnet",),
    "ray": ("horovod.ray",),
    "pyspark": ("horovod.spark",),
}
# Parts of the same environment share a process.
TOGETHER = (("common", "torch", "ray", "pyspark"), ("tensorflow",), ("mxnet",))


@functools.cache
def rows() -> tuple[str, ...]:
    """The patterns of the table."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    return tuple(pattern for line in lines for pattern in re.findall(r"`([^`]+)`", line.split("|")[1]))


def part_of(name: str) -> str:
    """The part to which a name, or a pattern of names, belongs."""
    module = re.sub(r"\*.*", "", name.split()[0])
    owners = [part for part in PARTS if any(f"{module}.".startswith(f"{one}.") for one in PARTS[part])]
    return owners[-1]  # everything belongs to `horovod`; the last one is the most exact


def environment_of(part: str) -> tuple[str, dict[str, str]]:
    if part == "mxnet":
        return str(test_mxnet.PYTHON), test_mxnet.ENVIRONMENT
    return sys.executable, tensorflow_jobs.TENSORFLOW if part == "tensorflow" else PLAIN


@functools.cache
def differences(parts: tuple[str, ...]) -> dict[str, str]:
    """What is missing, or different from Horovod."""
    python, variables = environment_of(parts[0])
    modules = [module for part in parts for module in PARTS[part]]
    done = subprocess.run(
        [python, "-W", "ignore", str(HERE / "horovod_names_look.py"), *modules],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def here(part: str) -> str:
    """Why a part cannot be checked; nothing if it can."""
    if part == "mxnet":
        return test_mxnet.missing()
    if part != "common" and importlib.util.find_spec(part) is None:
        return f"{part} is not installed"
    return ""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", PARTS)
def test_names_and_arguments_are_those_of_horovod(part: str) -> None:
    if reason := here(part):
        pytest.skip(reason)
    together = next(parts for parts in TOGETHER if part in parts)
    found = differences(tuple(one for one in together if not here(one)))
    wrong = {name: text for name, text in found.items() if part_of(name) == part}
    told = [row for row in rows() if part_of(row) == part]
    unexplained = {name: text for name, text in wrong.items() if not any(fnmatchcase(name, row) for row in told)}
    assert unexplained == {}, "mend it, or add it to the table of docs/horovod-names.md"
    unused = [row for row in told if not any(fnmatchcase(name, row) for name in wrong)]
    assert unused == [], "docs/horovod-names.md says that these are not there"


def test_all_of_the_facts_are_looked_at() -> None:
    assert len(NAMES) > 90 and sum(len(facts.get("functions", {})) for facts in NAMES.values()) > 150
    assert {part_of(name) for name in NAMES} == set(PARTS)
