"""The docs agree with the code: settings are as declared, links lead to files, examples run.
Reads files; runs the example of the README, alone and between two ranks."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import settings  # noqa: E402

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_page_of_settings_is_current() -> None:
    assert settings.PAGE.read_text() == settings.page(), "run: python scripts/settings.py"


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_in_the_documentation_exist(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:core|src|tests|scripts|examples|docs|bench)/[\w./-]+)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_of_the_readme_runs(tmp_path: Path, ranks: int) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(code)
    launcher = [sys.executable, "-m", "farandole", "run", "-np", str(ranks)] if ranks > 1 else []
    command = [*launcher, sys.executable, str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert f"[3. 1.] number of ranks: {ranks}" in run.stdout


# Modules with examples in their docstrings, by room: a room's modules share a process, because frameworks take seconds
# to import.
ROOMS: dict[str, list[str]] = {}
for path in sorted((ROOT / "src" / "farandole").rglob("*.py")):
    if ">>> " in path.read_text():
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        room = {"keras": "tensorflow"}.get(parts[1], parts[1])
        ROOMS.setdefault(room, []).append(".".join(parts).removesuffix(".__init__"))
FRAMEWORKS = ("tensorflow", "jax", "torch", "ray")  # rooms whose examples need the framework of this name
RUN_EXAMPLES = """
import doctest, importlib, sys
for name in sys.argv[1:]:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted and not found.failed, f"{name}: {found}"
"""


@pytest.mark.parametrize("room", ROOMS)
def test_examples_in_docstrings_are_true(room: str) -> None:
    if room in FRAMEWORKS and importlib.util.find_spec(room) is None:
        pytest.skip(f"{room} is not installed")
    python = str(ROOT / "build" / "mxnet" / "bin" / "python") if room == "mxnet" else sys.executable
    if not Path(python).exists():
        pytest.skip("MXNet has an environment of its own, which is not there: run: make test")
    path = f"{ROOT / 'src'}:{ROOT / 'tests' / 'frameworks'}"
    # TensorFlow would import these. Spark needs pandas.
    without = "sklearn matplotlib pandas jax" if room == "tensorflow" else ""
    environment = {**os.environ, "PYTHONPATH": path, "TESTS_WITHOUT": without}
    # In a separate process: frameworks leave files open.
    command = [python, "-c", RUN_EXAMPLES, *ROOMS[room]]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stdout + run.stderr
