# The table of tested releases: how versions are compared, and that it says what this environment has.
# Touches the list of installed packages.
from __future__ import annotations

from importlib import metadata

import pytest

from farandole import tested


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
def test_a_newer_series_is_news(monkeypatch: pytest.MonkeyPatch, version: str, newer: bool) -> None:
    monkeypatch.setitem(tested.TESTED, "torch", "2.15")
    text = f"torch {version} is newer than 2.15, the newest release that farandole was tested with"
    assert tested.line("torch", version) == (text if newer else "")


@pytest.mark.parametrize("name", tested.TESTED)
def test_the_table_says_what_is_tested_here(name: str) -> None:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    now = ".".join(map(str, tested.series(version)))
    assert not tested.line(name, version), f'{name} {version} is tested here: write "{name}": "{now}" into tested.py'
