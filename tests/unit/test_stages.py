# The stages of `make test`: what runs in the background, and what waits for it.
# Starts short commands; touches scripts/stages.py and scripts/test.py.
"""Commands wait for each other's files, so that each order that is claimed must happen."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import stages  # noqa: E402
from stages import Stage  # noqa: E402


def command(script: str) -> list[str]:
    return [sys.executable, "-S", "-c", "import os, sys, time\n" + script]


def test_a_stage_waits_only_for_the_background_stage_that_it_names(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    needs_the_second = f"while not os.path.exists({str(second)!r}): time.sleep(0.01)"  # sleep: between two looks
    found = [
        Stage("makes first", command(f"open({str(first)!r}, 'x')"), background=True),
        Stage("ends after the others", command(needs_the_second), background=True),
        Stage("has first", command(f"sys.exit(not os.path.exists({str(first)!r}))"), after="makes first"),
        Stage("makes second", command(f"open({str(second)!r}, 'x')"), after="a title that no stage has"),
        Stage("comes last", command("pass"), after="ends after the others"),
    ]
    assert stages.run(found) == 0


def test_a_failed_background_stage_fails_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = [Stage("fails", command("sys.exit('no')"), background=True), Stage("runs", command("pass"), after="fails")]
    assert stages.run(found) == 1
    assert "FAILED (1)" in capfd.readouterr().out


def test_the_stages_of_make_test_wait_for_stages_that_run_in_the_background() -> None:
    make_test = runpy.run_path(str(ROOT / "scripts" / "test.py"))  # `test` is also a package of Python
    found = make_test["stages"](["other-torch"])
    background = {stage.title for stage in found if stage.background}
    awaited = {stage.after for stage in found if stage.after}
    newest = {make_test["NEWEST_TORCH"]} if make_test["NEWEST_IS_APART"] else set()
    assert awaited == {"build with address,undefined", "build the fuzzers", "compile the wheel"} | newest
    assert awaited <= background
