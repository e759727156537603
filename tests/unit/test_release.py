"""The documents of a release: notes from the changelog, reasons not to publish, the bill of materials, checksums.
Writes into temporary folders; runs the script on a small git repository that may not be published."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import notes  # noqa: E402

CHANGELOG = """# Changelog

What changed.

## 1.3.0 (unreleased)

- To come.

## 1.2.0 (2030-01-31)

New things.

- One, with `## 9.9.9` in the middle of a line.
- Two.

## 1.1.0 (2029-12-24)
"""
VERSION = (ROOT / "VERSION").read_text().strip()


def test_notes_are_the_section_of_the_version() -> None:
    assert notes.notes(CHANGELOG, "1.2.0") == (
        "New things.\n\n- One, with `## 9.9.9` in the middle of a line.\n- Two.\n"
    )


@pytest.mark.parametrize(("version", "reason"), [("9.9.9", "no section `## 9.9.9`"), ("1.1.0", "says nothing")])
def test_a_version_without_notes_is_an_error(version: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        notes.notes(CHANGELOG, version)


def test_a_tree_that_may_be_published_has_no_refusals() -> None:
    assert notes.refusals("1.2.0", "", ["latest", "v1.2.0"], CHANGELOG) == []


REFUSED = [
    ("1.2.0", " M core/a.cc\n?? b", ["v1.2.0"], "2 files differ from the last commit, such as core/a.cc"),
    ("1.2.0", "", [], "not tagged v1.2.0 (it has no tag)"),
    ("1.2.0", "", ["v1.1.0"], "not tagged v1.2.0 (its tags are v1.1.0)"),
    ("1.2", "", ["v1.2"], "expected a version such as 1.2.3"),
    ("1.3.0", "", ["v1.3.0"], "`## 1.3.0 (unreleased)`; expected the date"),
    ("1.4.0", "", ["v1.4.0"], "no section `## 1.4.0`"),
    ("1.1.0", "", ["v1.1.0"], "says nothing under `## 1.1.0`"),
]


@pytest.mark.parametrize(("version", "status", "tags", "reason"), REFUSED, ids=[row[3][:40] for row in REFUSED])
def test_what_may_not_be_published_has_its_reason(version: str, status: str, tags: list[str], reason: str) -> None:
    assert any(reason in found for found in notes.refusals(version, status, tags, CHANGELOG))


def test_all_reasons_are_reported_together() -> None:
    assert len(notes.refusals("1.2", "?? a", [], "# Changelog\n")) == 4


def test_the_changelog_of_this_tree_has_the_notes_of_this_version() -> None:
    assert notes.notes((ROOT / "CHANGELOG.md").read_text(), VERSION)


def test_checksums_are_what_sha256sum_reads(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"a")
    (tmp_path / "sums").write_text(notes.sums({"a.whl": hashlib.sha256(b"a").hexdigest()}))
    command = ["sha256sum", "--check", "--strict", "sums"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout == "a.whl: OK\n"
    (tmp_path / "a.whl").write_bytes(b"b")
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 1


REQUIRES = ["numpy<3,>=1.23", "PyYAML", 'torch>=2.1; extra == "torch"', 'torch>=2.1; extra == "demo"', "x==1.9.1"]


def test_the_bill_of_materials_has_every_dependency() -> None:
    bill = notes.bill("1.2.0", "2030-01-31T00:00:00+00:00", REQUIRES, "21.1.0", {"a.whl": "0" * 64})
    parts = {part["bom-ref"]: part for part in bill["components"]}
    assert set(parts) == {"numpy", "pyyaml", "torch for torch", "torch for demo", "x", *notes.LINKED}
    assert (parts["numpy"]["versionRange"], parts["numpy"]["scope"]) == ("vers:pypi/>=1.23|<3", "required")
    assert (parts["torch for demo"]["scope"], parts["pyyaml"]["versionRange"]) == ("optional", "vers:pypi/*")
    assert parts["x"]["versionRange"] == "vers:pypi/1.9.1"
    assert parts["libc++"]["version"] == "21.1.0"
    assert set(bill["dependencies"][0]["dependsOn"]) == set(parts)
    (file,) = bill["metadata"]["component"]["components"]
    assert file["hashes"] == [{"alg": "SHA-256", "content": "0" * 64}]


def test_a_tree_that_may_not_be_published_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    """A copy of the scripts in a separate repository without a tag; one file is changed, one is unknown to git."""
    pytest.importorskip("elftools", reason="needs the list `wheel` of scripts/requirements")
    (tmp_path / "scripts").mkdir()
    for path in (ROOT / "VERSION", ROOT / "CHANGELOG.md", *(ROOT / "scripts").glob("*.py")):
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    (tmp_path / ".gitignore").write_text("__pycache__/\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / ".gitignore").write_text("__pycache__/\n# changed\n")
    (tmp_path / "stray").write_text("")
    command = [sys.executable, str(tmp_path / "scripts" / "release.py"), "--publish"]
    environment = {**os.environ, "TWINE_PASSWORD": "", "TWINE_REPOSITORY_URL": "http://127.0.0.1:9"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    lines = run.stderr.splitlines()
    assert all(line.startswith("release: refused: ") for line in lines), run.stderr
    assert any("2 files differ from the last commit, such as .gitignore:" in line for line in lines), lines
    assert any(f"not tagged v{VERSION}" in line for line in lines)
    assert not (tmp_path / "dist").exists() and not (tmp_path / "build").exists()
