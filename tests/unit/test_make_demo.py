"""`make demo`: its medians, turns and table with made-up numbers; and real runs, a short one and an interrupted one.
Starts scripts/demo.py, copied to a path with a space."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import demo  # noqa: E402
import turns  # noqa: E402

FARANDOLE = demo.TOGETHER[0]


def result(*rounds: tuple[float, float]) -> demo.Result:
    return demo.Result(FARANDOLE, 97.6, 50, [demo.Round(*one) for one in rounds])


def test_another_process_that_slows_whole_rounds_changes_nothing() -> None:
    quiet = result((48, 50), (48, 50), (48, 50), (48, 50), (48, 50))
    busy = result((48, 50), (96, 100), (144, 150), (48, 50), (48, 50))
    assert quiet.efficiency == busy.efficiency == pytest.approx(0.96)
    assert quiet.step_ms == busy.step_ms == 50


def test_single_slow_rounds_do_not_change_the_median() -> None:
    disturbed = result((48, 50), (48, 100), (90, 50), (48, 50), (48, 75))
    assert disturbed.efficiency == pytest.approx(0.96)


def test_one_process_has_a_turn_directly_before_each_of_the_others() -> None:
    order: list[str] = []

    class FakeJob:
        def __init__(self, name: str, times: Iterator[float]) -> None:
            self.name, self.times = name, times

        def turn(self) -> tuple[float, int]:
            order.append(self.name)
            return next(self.times), 50

    jobs = [FakeJob("one", iter((40, 44, 60, 20))), FakeJob("f", iter((50, 51))), FakeJob("g", iter((70, 71)))]
    found, images = demo.take_turns(jobs, 2)  # type: ignore[arg-type]
    assert order == ["one", "f", "one", "g"] * 2 and images == 50
    assert found[1] == [demo.Round(40, 50), demo.Round(60, 51)]
    assert found[2] == [demo.Round(44, 70), demo.Round(20, 71)]
    assert [one.job for one in found[0]] == [42, 40] and {one.efficiency for one in found[0]} == {1.0}


def test_the_table_has_the_range_and_the_other_processes() -> None:
    alone = demo.Result(demo.ALONE, 97.0, 50, [demo.Round(48, 48)] * 3)
    results = [alone, result((48, 50), (48, 60), (48, 48))]
    text = demo.table(results, others=0.1, cores=2)
    assert "  Farandole              2     97.6%       2000         50.0                 96%\n" in text
    assert text.endswith("(medians of 3 rounds; efficiency in single rounds: Farandole 80% to 100%)")
    text = demo.table(results, others=1.3, cores=1)
    assert "others used 1.3 cores" in text and "gives 1 core" in text


def test_a_turn_is_a_few_steps_of_any_epoch_and_the_script_continues_after_the_last_turn() -> None:
    events: list[Any] = []

    class Loader:
        batch_size = 50

    def answer(what: dict[str, Any]) -> None:
        assert what["seconds"] >= 0 and what["images"] == 50
        events.append("answer")

    epoch = turns.in_turns(lambda loader: iter(range(6)), lambda: events.append("wait"), answer)
    for _ in range(2):
        for batch in epoch(Loader()):
            events.append(batch)
    handover = ["answer", "wait"]
    assert events == ["wait", 0, 1, 2, 3, 4, *handover, 5, 0, 1, 2, 3, *handover, 4, 5]


def test_every_epoch_has_whole_rounds_of_turns() -> None:
    """Otherwise a process would wait forever for a turn or for an answer."""
    batches = 1500 // 50
    assert batches % turns.STEPS_PER_TURN == 0
    assert batches // 2 == demo.ROUNDS_PER_EPOCH * turns.STEPS_PER_TURN


def test_too_few_epochs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--epochs", "1"])
    assert "--epochs 1: expected at least 2" in capsys.readouterr().err


@contextlib.contextmanager
def started(folder: Path, interrupts: signal.Handlers) -> Iterator[subprocess.Popen[str]]:
    """The demo in a copy of the checkout, with what a shell does to SIGINT in the foreground or in the background."""
    for name in ("scripts", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    temporary = folder / "temporary files"
    temporary.mkdir()
    with subprocess.Popen(
        [sys.executable, folder / "scripts" / "demo.py", "--epochs", "2"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(temporary)},
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, interrupts),
    ) as process:
        try:
            yield process
        finally:
            process.terminate()  # it has ended, unless the test has failed


def below(folder: Path) -> list[str]:
    """Processes with their temporary files in this folder: a job's launcher, its ranks, and whatever they started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"TMPDIR={folder}".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def nothing_left(folder: Path) -> None:
    until(
        lambda: not below(folder), what=lambda: below(folder)
    )  # they are not children of this process, so it cannot wait for them
    assert list((folder / "temporary files").iterdir()) == []


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_runs_in_a_path_with_a_space_and_in_the_background(tmp_path: Path) -> None:
    folder = tmp_path / "with a space"
    with started(folder, signal.SIG_IGN) as process:
        output = process.communicate(timeout=560)[0]
    rows = re.findall(r"^  (one process|Farandole|DDP over Gloo) +(\d) +([\d.]+)% +\d+ +[\d.]+ +(\d+)%$", output, re.M)
    assert [row[:2] for row in rows] == [("one process", "1"), ("Farandole", "2"), ("DDP over Gloo", "2")], output
    assert all(float(row[2]) > 50 for row in rows) and rows[0][3] == "100", output
    assert process.returncode == (0 if min(float(row[2]) for row in rows) > 90 else 1)
    assert "medians of 3 rounds" in output
    nothing_left(folder)


@pytest.mark.ranks
def test_an_interrupt_ends_every_process_of_the_demo(tmp_path: Path) -> None:
    folder = tmp_path / "with a space"
    with started(folder, signal.SIG_DFL) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "DDP over Gloo" in line:  # the other jobs have already started
                break
        assert len(below(folder)) > 3
        process.send_signal(signal.SIGINT)
        assert "demo: interrupted" in process.communicate(timeout=100)[0]
    assert process.returncode == 130
    nothing_left(folder)
