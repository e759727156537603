# docs/errors.md and the source have the same names, and texts end with them.
# Reads files of the package; starts nothing.
from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from farandole.base import errors, tracebacks
from farandole.launch import cli
from farandole.launch.agent_connection import StartError
from farandole.launch.blame import Ending, judge, topic

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = sorted((ROOT / "src" / "farandole" / "launch").glob("*.py"))
PAGE = (ROOT / "docs" / "errors.md").read_text()


def topics() -> set[str]:
    """Every name that the launcher can put at the end of a text."""
    found: set[str] = set()
    for path in LAUNCH:
        text = path.read_text()
        found |= set(re.findall(r"\[([a-z]+(?:-[a-z]+)*)\]\"\)", text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.keyword) and node.arg == "topic" and isinstance(node.value, ast.Constant):
                found.add(str(node.value.value))
    found |= {"no-output", "agent-lost", "elastic-over", "launcher-broken"}  # held below
    return found | {"rank-failed", "rank-killed", "out-of-memory"}


def test_the_page_has_a_section_for_each_name_and_no_other() -> None:
    launcher, python = PAGE.split("## Errors in Python")
    assert set(re.findall(r"^### (\S+)$", launcher, flags=re.M)) == topics()
    classes = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if kind.__module__ == errors.__name__ and issubclass(kind, BaseException)
    }
    assert set(re.findall(r"^### (\S+)$", python, flags=re.M)) == classes


def test_every_start_error_has_a_topic() -> None:
    calls = [
        (path.name, node.lineno, {word.arg for word in node.keywords})
        for path in LAUNCH
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "StartError"
    ]
    assert len(calls) > 10 and [call for call in calls if "topic" not in call[2]] == []
    assert str(StartError("no way", topic="no-agent")) == "no way [no-agent]"


def test_names_in_other_modules() -> None:
    from farandole.launch import outcome

    assert {outcome.AGENT_LOST, outcome.ELASTIC_OVER, outcome.LAUNCHER_BROKEN} <= topics()
    relay = next(path for path in LAUNCH if path.name == "output_relay.py").read_text()
    assert '"no-output")' in relay


@pytest.mark.parametrize(
    ("ending", "name"),
    [
        (Ending(1, 1), "rank-failed"),
        (Ending(1, 139), "rank-killed"),
        (Ending(1, 137, cause="killed by the kernel: out of memory"), "out-of-memory"),
    ],
)
def test_the_name_of_a_failed_rank(ending: Ending, name: str) -> None:
    verdict = judge([ending])
    assert verdict is not None and topic(verdict) == name


def test_texts_end_with_the_name(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--nonsense"]) == 2 and capfd.readouterr().err.rstrip().endswith("[usage]")
    assert cli.main(["run", "-np", "1", "no-such-program-here"]) == 127
    assert capfd.readouterr().err.rstrip().endswith("[no-program]")
    assert tracebacks.text(errors.PeerLost("gone", rank=1)).endswith("this rank ends too: gone [PeerLost]\n")
    assert tracebacks.text(errors.Mismatch("shapes")).endswith("[Mismatch] is explained in docs/errors.md\n")
    assert "errors.md" not in tracebacks.text(ValueError("x"))


def test_a_traceback_keeps_a_frame_where_all_are_ours() -> None:
    try:
        raise ValueError("x")
    except ValueError as error:
        assert "test_error_names.py" in tracebacks.text(error) and tracebacks.LEFT_OUT not in tracebacks.text(error)
        path, _, line = tracebacks.user_line(error).rpartition(":")
        assert path.endswith("test_error_names.py") and line.isdecimal()
