# What tuning at init keeps between jobs: a file that is exact, private, and checked before use.
# Touches tuning.cache, in a directory of the test.
"""Round trips, and every error in the file."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from farandole.base.config import Config, cache_directory, names_of_set
from farandole.world.tuning import cache
from farandole.world.tuning.search import Values

SHAPE = {"version": "1", "ranks": [2, 2], "processor": "a b x 4"}
VALUES = Values(1 << 20, 20_000, 50, 65536, 2)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "deep" / "cache")


def file_in(folder: str) -> Path:
    [file] = Path(folder).iterdir()
    return file


def test_loading_gives_what_was_stored(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    assert cache.load(folder, SHAPE) is None  # and nothing is made or said
    assert not os.path.exists(folder) and not caplog.records
    cache.store(folder, SHAPE, VALUES)
    assert cache.load(folder, SHAPE) == VALUES
    assert cache.load(folder, {**SHAPE, "ranks": [4]}) is None
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert stat.S_IMODE(file_in(folder).stat().st_mode) == 0o600
    cache.store(folder, SHAPE, Values(0, 0, 0, 64, 1))
    assert cache.load(folder, SHAPE) == Values(0, 0, 0, 64, 1)
    assert len(os.listdir(folder)) == 1 and not caplog.records


BROKEN: dict[str, Any] = {
    "empty": "",
    "cut": '{"shape": ',
    "no json": "\x00\xff",
    "nested": "[" * 4000,
    "too large": json.dumps({"x": "y" * 5000}),
    "a list": "[]",
    "another shape": {"shape": {}, "values": {}},
    "no values": {"shape": SHAPE},
    "text": {"streams": "2"},
    "a bool": {"streams": True},
    "a fraction": {"spin_us": 0.5},
    "negative": {"flush_us": -1},
    "no stream": {"streams": 0},
    "many streams": {"streams": 65},
    "odd chunk": {"chunk_bytes": 100},
    "huge": {"fusion_threshold": 1 << 60},
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_ignored_with_one_line(case: str, folder: str, caplog: pytest.LogCaptureFixture) -> None:
    cache.store(folder, SHAPE, VALUES)
    file = file_in(folder)
    broken = BROKEN[case]
    if isinstance(broken, dict):
        if "shape" not in broken:
            whole = json.loads(file.read_text())
            whole["values"].update(broken)
            broken = whole
        broken = json.dumps(broken)
    file.write_text(broken, encoding="latin-1")
    with caplog.at_level(logging.WARNING, "farandole"):
        assert cache.load(folder, SHAPE) is None
    assert len(caplog.records) == 1 and str(file) in caplog.text
    cache.store(folder, SHAPE, VALUES)  # and the next measurement mends it
    assert cache.load(folder, SHAPE) == VALUES


def test_links_and_what_others_can_write_are_not_followed(folder: str, tmp_path: Path) -> None:
    cache.store(folder, SHAPE, VALUES)
    file = file_in(folder)
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert cache.load(folder, SHAPE) is None
    cache.store(folder, SHAPE, VALUES)  # replaces the link, not what it points to
    assert not file.is_symlink() and cache.load(folder, SHAPE) == VALUES
    file.chmod(0o666)
    assert cache.load(folder, SHAPE) is None
    file.chmod(0o600)
    os.chmod(folder, 0o777)
    assert cache.load(folder, SHAPE) is None
    os.chmod(folder, 0o700)
    file.unlink()
    os.mkfifo(file)  # opening it must not wait for a writer
    assert cache.load(folder, SHAPE) is None
    linked = tmp_path / "linked"
    linked.symlink_to(folder)
    assert cache.load(str(linked), SHAPE) is None


def test_a_cache_that_cannot_be_written_logs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache.store(str(tmp_path / "file" / "cache"), SHAPE, VALUES)
    assert len(caplog.records) == 1 and "could not be stored" in caplog.text


def test_source_and_path_of_a_library() -> None:
    assert cache_directory(Config(cache_directory="/x"), {"XDG_CACHE_HOME": "/y"}) == "/x"
    assert cache_directory(Config(), {"XDG_CACHE_HOME": "/y"}) == "/y/farandole"
    assert cache_directory(Config(), {"XDG_CACHE_HOME": "y"}).endswith("/.cache/farandole")
    assert names_of_set({"HOROVOD_CYCLE_TIME": "1", "FARANDOLE_SPIN_US": " ", "PATH": "/"}) == ["cycle_time"]
