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


EXAMPLES = sorted(path for path in (ROOT / "src" / "farandole").rglob("*.py") if ">>> " in path.read_text())


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_examples_in_docstrings_are_true(path: Path) -> None:
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    for room, framework in {"tensorflow": "tensorflow", "keras": "tensorflow", "jax": "jax"}.items():
        if room in parts and importlib.util.find_spec(framework) is None:
            pytest.skip(f"{framework} is not installed")
    python = str(ROOT / "build" / "mxnet" / "bin" / "python") if "mxnet" in parts else sys.executable
    if not Path(python).exists():
        pytest.skip("MXNet has an environment of its own, which is not there: run: make test")
    module = ".".join(parts).removesuffix(".__init__")
    code = f"import doctest, {module} as module; found = doctest.testmod(module); "
    code += "raise SystemExit(found.failed or not found.attempted)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    # In a separate process: frameworks leave files open.
    run = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stdout + run.stderr
