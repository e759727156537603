# Every public name of Horovod's Python packages must exist with its arguments, or the docs must list it as absent.
# Starts horovod_names_look.py once per environment; reads the table of docs/horovod-names.md.
"""horovod_names.json lists the names: values, functions with their arguments, classes with their methods' arguments."""

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
DIFFERENCES = json.loads((HERE / "horovod_differences.json").read_text())  # scripts/migration.py reads them
VARIABLES = {"PYTHONPATH": f"{jobs.SOURCE}:{HERE}", "OMP_NUM_THREADS": "1"}
PARTS: dict[str, Sequence[str]] = {
    "common": ("horovod", "horovod.common", "horovod.data", "horovod.runner"),
    "torch": ("horovod.torch",),
    "tensorflow": ("horovod.tensorflow", "horovod.keras", "horovod._keras"),
    "mxnet": ("horovod.mxnet",),
    "ray": ("horovod.ray",),
    "pyspark": ("horovod.spark",),
}
# The parts in one tuple need the same environment; one process checks them.
TOGETHER = (("common", "torch", "ray", "pyspark"), ("tensorflow",), ("mxnet",))


@functools.cache
def table_patterns() -> tuple[str, ...]:
    """The patterns of names in the first column of the table."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    return tuple(pattern for line in lines for pattern in re.findall(r"`([^`]+)`", line.split("|")[1]))


def part_of(name: str) -> str:
    """The key of PARTS to which a name, or a pattern of names, belongs."""
    module = re.sub(r"\*.*", "", name.split()[0])
    owners = [part for part in PARTS if any(f"{module}.".startswith(f"{package}.") for package in PARTS[part])]
    return owners[-1]  # `common` owns all names, because of `horovod`; a later part is more exact


def environment_of(part: str) -> tuple[str, dict[str, str]]:
    if part == "mxnet":
        return str(test_mxnet.PYTHON), test_mxnet.ENVIRONMENT
    return sys.executable, tensorflow_jobs.TENSORFLOW if part == "tensorflow" else VARIABLES


@functools.cache
def differences(parts: tuple[str, ...]) -> dict[str, str]:
    """The names of these parts that are missing or different from Horovod, each with what is wrong."""
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


def reason_to_skip(part: str) -> str:
    """Why a part cannot be checked; empty if it can."""
    if part == "mxnet":
        return test_mxnet.unusable()
    if part != "common" and importlib.util.find_spec(part) is None:
        return f"{part} is not installed"
    return ""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", PARTS)
def test_names_and_arguments_are_those_of_horovod(part: str) -> None:
    if reason := reason_to_skip(part):
        pytest.skip(reason)
    together = next(parts for parts in TOGETHER if part in parts)
    found = differences(tuple(other for other in together if not reason_to_skip(other)))
    wrong = {name: text for name, text in found.items() if part_of(name) == part}
    expected = [pattern for pattern in table_patterns() if part_of(pattern) == part]
    unexplained = {
        name: text for name, text in wrong.items() if not any(fnmatchcase(name, pattern) for pattern in expected)
    }
    assert unexplained == {}, "mend it, or add it to the table of docs/horovod-names.md"
    unused = [pattern for pattern in expected if not any(fnmatchcase(name, pattern) for name in wrong)]
    assert unused == [], "docs/horovod-names.md says that these are not there"
    known = {name: kind for name, kind in DIFFERENCES.items() if part_of(name) == part}
    kinds = {name: text if text == "missing" else "other" for name, text in wrong.items()}
    assert kinds == known, "correct horovod_differences.json, then run: python scripts/migration.py"


def test_the_list_of_names_is_complete_and_every_part_has_names() -> None:
    assert len(NAMES) > 90 and sum(len(facts.get("functions", {})) for facts in NAMES.values()) > 150
    assert {part_of(name) for name in NAMES} == set(PARTS)
