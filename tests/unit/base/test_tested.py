# The table of tested releases: how versions are compared, and that it says what this environment has.
# Touches the list of installed packages.
from __future__ import annotations

import itertools
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from farandole.base import tested

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    "version, newer",
    [
        ("2.15.0", False),
        ("2.15.9+cpu", False),
        ("2.15.0rc2", False),
        ("2.15", False),
        ("2.9.1", False),
        ("1.99", False),
        ("2.16.0a0+git123", True),
        ("2.16rc1", True),
        ("2.100.0", True),
        ("3", True),
        ("3.0.0.dev20260101+cu132", True),
        ("unknown", False),
        ("", False),
        ("git-2.16", False),
    ],
)
def test_a_newer_minor_version_is_reported(monkeypatch: pytest.MonkeyPatch, version: str, newer: bool) -> None:
    monkeypatch.setitem(tested.TESTED, "torch", "2.15")
    text = f"torch {version} is newer than 2.15, the newest release that farandole was tested with"
    assert tested.newer_warning("torch", version) == (text if newer else "")


def test_the_oldest_releases_in_the_docs_are_those_of_the_requirements() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    recorded: dict[str, set[tuple[int, int]]] = {}
    for requirement in itertools.chain.from_iterable(extras.values()):
        found = re.match(r"([a-z_]+)(?:\[.*\])?[>=]=([\d.]+)", requirement)
        if found and found[1] in tested.OLDEST:
            recorded.setdefault(found[1], set()).add(tested.series(found[2]))
    recorded["pytorch_lightning"] = recorded["lightning"]
    assert recorded == {name: {tested.series(version)} for name, version in tested.OLDEST.items()}


@pytest.mark.parametrize("name", tested.TESTED)
def test_the_table_says_what_is_tested_here(name: str) -> None:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    now = ".".join(map(str, tested.series(version)))
    assert not tested.newer_warning(name, version), (
        f'{name} {version} is tested here: write "{name}": "{now}" into tested.py'
    )
