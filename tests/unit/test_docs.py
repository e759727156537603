"""The docs agree with the code: the list of settings is complete, linked files exist, examples run.
Reads files; runs the example of the README, alone and between two ranks."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.launch import cli, run
from farandole.launch import options as option

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import claims  # noqa: E402
import migration  # noqa: E402
import settings  # noqa: E402

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_page_of_settings_is_current() -> None:
    assert settings.PAGE.read_text() == settings.page(), "run: python scripts/settings.py"


def test_the_pages_about_horovod_and_claims_are_current() -> None:
    assert migration.PAGE.read_text() == migration.page(), "run: python scripts/migration.py"
    assert claims.PAGE.read_text() == claims.page(), "run: python scripts/claims.py"


def test_every_flag_and_variable_of_horovod_has_a_verdict_with_a_reason() -> None:
    page = migration.PAGE.read_text()
    flags, rest = page.split("## Flags")[1].split("## Variables")
    variables, names = rest.split("## Modules")
    assert flags.count("\n| `-") > 45 and "| absent |" not in flags  # horovodrun's flags are all taken
    rows = [line.split(" | ") for line in (flags + variables).splitlines() if line.startswith("| `")]
    assert [row for row in rows if len(row) != 3 or not row[2].strip(" |")] == []
    unexplained = [line for line in names.splitlines() if re.search(r"^\| (other|absent) \|.*\|  ?\|$", line)]
    assert unexplained == [] and names.count("| same |") > 60


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
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"[3. 1.] number of ranks: {ranks}" in done.stdout


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
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def commands(page: Path) -> list[list[str]]:
    """The commands of ours in the code blocks of a page, without those that leave something out (`...`)."""
    found = []
    for language, block in re.findall(r"```(\w*)\n(.*?)```", page.read_text(), flags=re.DOTALL):
        if language in ("", "bash", "sh", "console"):
            for line in re.sub(r"\\\n", " ", block).splitlines():
                text = re.sub(r"\s(?:#|  +\().*$", "", line.strip().removeprefix("$ "))
                if re.match(r"(farandole|horovodrun) ", text) and not re.search(r"\.\.\.|[|<>{}\[\]]", text):
                    found.append(shlex.split(text))
    return found


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_commands_in_the_documentation_are_understood(page: Path) -> None:
    for words in commands(page):
        name, *rest = words
        if name == "farandole" and rest[0] != "run":
            assert rest[0] in (*cli.COMMANDS, "--version"), words
            continue
        rest = rest[1:] if name == "farandole" else rest
        if "--config-file" in rest:  # the file is not there
            at = rest.index("--config-file")
            rest = [*rest[:at], "-np", "2", *rest[at + 2 :]]  # it may have this number
        options = option.parse(rest, {})  # raises Usage for a flag that does not exist
        if not any(options.values.get(name) for name in ("help", "help_all", "check_build", "version")):
            run.check(options)


WITH_PYTHON = [
    page for page in PAGES if "```python" in page.read_text() and page.name != "api.md"
]  # that has signatures


@pytest.mark.parametrize("page", WITH_PYTHON, ids=[page.name for page in WITH_PYTHON])
def test_python_in_the_documentation_can_be_compiled(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_quickstart_shows_the_diff_that_a_test_applies() -> None:
    pattern = r"```diff\n(.*?)```"
    (ours,) = re.findall(pattern, (ROOT / "docs" / "quickstart.md").read_text(), flags=re.DOTALL)
    assert [ours] == re.findall(pattern, (ROOT / "README.md").read_text(), flags=re.DOTALL)
