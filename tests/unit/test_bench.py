"""The benchmark's bookkeeping: rows, merging, tables, targets, the page and the pictures, from invented numbers.
Writes into a temporary folder; tests/ranks/test_bench_quick.py runs the real benchmark."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farandole.engine.interface import DType
from farandole.engine.library import load
from farandole.tools.bench import command, compare, kernels, plan, report, steps, targets
from farandole.tools.bench.inside import collectives, library, together
from farandole.tools.bench.plan import KIB, MIB, row
from farandole.tools.bench.processes import Failed

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import performance  # noqa: E402


def made_up(ours: float = 0.008, gloo: float = 0.048) -> list[plan.Row]:
    """Rows as a run gives them."""
    key: dict[str, Any] = {"kind": "reused", "dtype": "float32", "checked": 18}
    found = []
    for size in (KIB, 64 * MIB):
        part = size / (64 * MIB)
        values = {"farandole": [ours * part] * 7, "Gloo": [gloo * part] * 7, "memcpy": [0.004 * part] * 7}
        found.append(row("collectives", "allreduce", 2, "s", values, bytes=size, **key))
    for ranks in (1, 2):
        values = {"farandole": [0.2] * 7, "DDP on Gloo": [0.3] * 7, "single": [0.19] * 7}
        found.append(row("training", "gpt", ranks, "s", values, bytes=4000))
    memory = {"farandole": [300.0 * MIB], "single": [200.0 * MIB]}
    found.append(row("memory", "vgg", 2, "B", memory, bytes=100 * MIB))
    facts = {"phases": [["forward", 0, 3], ["backward", 3, 8], ["optimizer.step", 8, 9]]}
    facts["spans"] = [["w", "NEGOTIATE_ALLREDUCE", 4, 5], ["w", "SHM_ALLREDUCE", 5, 6]]
    found.append(row("trace", "gpt", 2, "s", {"farandole": [0.1]}, facts=facts))
    return found


def verdict(rows: list[plan.Row], target: str) -> targets.Verdict:
    (found,) = [one for one in targets.verdicts(rows, 2, "aarch64") if one.target.startswith(target)]
    return found


def test_a_target_is_met_missed_or_not_measured() -> None:
    assert verdict(made_up(), "allreduce 64 MiB: >= 5 x Gloo") == targets.Verdict(
        "allreduce 64 MiB: >= 5 x Gloo", "6.0 x", True
    )
    assert verdict(made_up(ours=0.01), "allreduce 64 MiB: >= 5 x Gloo").met is False
    assert verdict(made_up(), "allreduce 64 MiB: >= 0.5 x memcpy").met is True
    assert verdict(made_up(), "gpt, 2 ranks: efficiency").met is False  # 95 %
    assert verdict(made_up(), "gpt, 2 ranks: ahead of DDP").measured == "1.50 x"
    assert verdict(made_up(), "extra memory") == targets.Verdict(
        "extra memory: <= 1 x gradients + 32 MiB", "100 MiB of 132", True
    )
    assert verdict(made_up(), "init and shutdown").cells() == ["init and shutdown: <= 15 ms", "-", "not measured"]
    wide = {one.target for one in targets.verdicts([], 16, "x86_64")}
    assert any("16 ranks: <= 150 us" in target for target in wide)


def test_a_run_in_pieces_fills_one_file(tmp_path: Path) -> None:
    first, second = made_up(), [{**row, "busy_cores": 1.5} for row in made_up(ours=0.1)[:2]]
    merged = command.merge(first, second)
    assert len(merged) == len(first)
    assert report.median(merged[1], "farandole") == 0.1
    facts = {"architecture": "x", "processor": "y", "cores": 2}
    path = tmp_path / "deeper" / "run.json"
    command.write(path, facts, merged, quick=False)
    assert command.read(path, facts) == json.loads(path.read_text())["rows"] == merged
    with pytest.raises(Failed, match="another machine"):
        command.read(path, {**facts, "cores": 4})


def test_tables_show_values_rates_and_ratios() -> None:
    text = report.tables(made_up())
    assert "8 ms, 8.39 GB/s ±0 %" in text
    assert "48 ms (6.0x)" in text
    assert "4 ms (50 %)" in text
    assert report.markdown([["a", "b"], ["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_unknown_parts_and_ranks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["colectives"]) == 2
    assert "there are collectives" in capsys.readouterr().err
    assert command.main(["idle", "--ranks", "0"]) == 2
    assert command.main(["--from", "no-such-file.json"]) == 2


def test_plans_measure_what_was_asked_for() -> None:
    assert plan.full([], 16, 9).ranks == (2, 4, 8, 16)
    assert plan.full([], 16, 9).training_ranks == (1, 2, 4, 8, 16)
    some = plan.lean([1, 8], 16, 7)
    assert (some.ranks, some.training_ranks, some.repeats) == ((8,), (1, 8), 7)
    assert {KIB, MIB, 64 * MIB} <= set(some.allreduce_sizes) <= set(plan.full([], 2, 9).allreduce_sizes)


@pytest.mark.parametrize("operation", library.OPERATIONS)
def test_wrong_results_are_noticed(operation: str, tmp_path: Path) -> None:
    """A library that returns what it got is right for a broadcast to its own root alone."""

    class Lazy(library.Library):
        rank, size = 0, 2

        def call(self, operation: str, name: str, fresh: bool) -> library.Call:
            return lambda tensor: np.resize(tensor, len(collectives.wanted(operation, 0, 2, len(tensor))))

    class Nobody(together.Together):
        def wait(self) -> None:
            pass

    timed = collectives.Collectives(Nobody(str(tmp_path / "together"), 0, 2))
    order = {"operation": operation, "bytes": 4096, "kind": "fresh", "dtype": "float32", "count": 2}
    if operation == "broadcast":
        assert timed.run(Lazy(), order)["checked"] == 2
        return
    with pytest.raises(AssertionError, match="wrong result"):
        timed.run(Lazy(), order)


def test_ranks_that_differ_and_gradients_that_are_no_mean_are_noticed() -> None:
    same = [{"digest": "a", "gradients": [1.0, 2.0]}, {"digest": "a", "gradients": [1.0, 2.0]}]
    assert steps.check("farandole", same, [1.0, 2.0]) == [1.0, 2.0]
    with pytest.raises(Failed, match="differ"):
        steps.check("farandole", [same[0], {"digest": "b", "gradients": []}], None)
    with pytest.raises(Failed, match="mean"):
        steps.check("farandole", same, [1.0, 2.1])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_sum_kernel_can_be_called_alone(dtype: str) -> None:
    numbers = np.array([0x3F80, 0x4000], np.uint16) if dtype != "float32" else np.array([1, 2], np.float32)
    if dtype == "float16":
        numbers = np.array([1, 2], np.float16).view(np.uint16)
    out = np.empty_like(numbers)
    load().add(DType[dtype.upper()], numbers, numbers, out)
    expected = {"bfloat16": [0x4000, 0x4080], "float16": np.array([2, 4], np.float16).view(np.uint16).tolist()}
    assert out.tolist() == expected.get(dtype, [2.0, 4.0])
    assert all(time > 0 for time in kernels.measure(dtype, 4096, 4096, 2))
    with pytest.raises(ValueError):
        load().add(99, numbers, numbers, out)


FACTS = {"architecture": "aarch64", "processor": "y", "cores": 2, "kernel": "6", "farandole": "1", "kernels": "z"}


@pytest.mark.parametrize(
    ("architecture", "cores", "kind"),
    [
        ("aarch64", 2, "arm-2-cores"),
        ("arm64", 4, "arm-4-cores"),
        ("x86_64", 16, "x86-16-cores"),
        ("AMD64", 1, "x86-1-core"),
        ("riscv64", 8, "riscv64-8-cores"),
    ],
)
def test_the_kind_of_a_machine_is_its_processor_family_and_number_of_cores(
    architecture: str, cores: int, kind: str
) -> None:
    assert compare.kind_of_machine(architecture, cores) == kind


def test_each_committed_run_is_named_after_its_kind_of_machine() -> None:
    for name, run in performance.load().items():
        assert compare.kind_of(run["machine"]) == name


def two_runs(factor: float, before: list[float], after: list[float], **more: list[float]) -> list[compare.Change]:
    """What is found when we need `factor` times as long beside the same Gloo, on a machine that is three times slower;
    `before` and `after` are what the repeats of both took more than 1 or less."""
    values: dict[str, Any] = {"farandole": [0.010 * one for one in before], "Gloo": [0.040] * len(before)}
    slower = {"farandole": [0.030 * factor * one for one in after], "Gloo": [0.120] * len(after)}
    key = {"bytes": MIB, "kind": "reused", "dtype": "float32"}
    old = row("collectives", "allreduce", 2, "s", {**values, **{name: [0.02] * 9 for name in more}}, **key)
    new = row("collectives", "allreduce", 2, "s", {**slower, **more}, **key)
    return list(compare.changes([old], [new]))


STEADY, NOISY = [1.0] * 9, [0.8, 1.2, 1.0, 0.9, 1.1, 1.0, 0.85, 1.15, 1.0]


@pytest.mark.parametrize(
    ("factor", "before", "after", "verdict"),
    [
        (1.0, STEADY, STEADY, "same"),  # three times the time, the same ratio
        (1.09, STEADY, STEADY, "same"),
        (1.12, STEADY, STEADY, "slower"),
        (0.89, STEADY, STEADY, "faster"),
        (1.3, STEADY, NOISY, "same"),  # 3 x 12.5 %
        (1.3, NOISY, STEADY, "same"),
        (1.4, NOISY, STEADY, "slower"),
        (1.4, NOISY, NOISY, "same"),  # 3 x 17.7 %
        (1.6, NOISY, NOISY, "slower"),
        (1.9, STEADY, [1.0], "same"),  # a quick run
        (2.1, STEADY, [1.0], "slower"),
    ],
)
def test_slower_results_are_reported(factor: float, before: list[float], after: list[float], verdict: str) -> None:
    (found,) = two_runs(factor, before, after)
    assert found.slower == pytest.approx(factor - 1, abs=1e-3)
    assert ("slower" if found.is_slower else "faster" if found.is_faster else "same") == verdict
    assert (found.noise is None) == (len(after) == 1)


def test_bench_compares_with_the_library_with_the_least_noise_and_reports_efficiency() -> None:
    (found,) = two_runs(1.2, STEADY, STEADY, MPI=[0.02, 0.08] * 4 + [0.02])
    assert (found.peer, round(found.before, 3), round(found.now, 3)) == ("Gloo", 0.25, 0.3)
    assert found.cells()[3:] == ["4x", "3.33x", "+20 %", "±0 %"]
    times = {"farandole": [0.2] * 7, "DDP on Gloo": [0.3] * 7, "single": [0.19, 0.18] * 3 + [0.19]}
    slower = {**times, "farandole": [0.25] * 7}
    rows = [row("training", "gpt", 2, "s", values, bytes=4000) for values in (times, slower)]
    (found,) = compare.changes(rows[:1], rows[1:])
    assert found.peer == "single" and found.is_slower
    assert found.cells()[3:6] == ["95 %", "76 %", "+25 %"]


def test_only_what_both_runs_measured_is_compared() -> None:
    old, new = made_up(), made_up(ours=0.016)
    del new[0]["values"]["Gloo"]
    del new[0]["values"]["memcpy"]  # no other library is left
    new[1]["bytes"] *= 2  # another row
    new[2]["values"]["farandole"] = [0.0]  # no time
    assert [one.row["part"] for one in compare.changes(old, new)] == ["training", "memory"]


def test_a_run_is_compared_with_the_file_of_its_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "with a space"
    command.write(tmp_path / "now.json", {**FACTS, "versions": {}}, made_up(ours=0.016), quick=False)
    arguments = ["--from", str(tmp_path / "now.json"), "--compare", str(folder)]
    assert command.main(arguments) == 2  # no such folder
    assert "expected a file that --json wrote, or a folder" in capsys.readouterr().err
    command.write(folder / "x86-2-cores.json", {**FACTS, "architecture": "x86_64"}, made_up(), quick=False)
    assert command.main(arguments) == 0 and command.main([*arguments, "--strict"]) == 1
    output = capsys.readouterr().out
    assert "no run of this kind of machine (arm-2-cores)" in output
    assert f"--json '{folder}/arm-2-cores.json'" in output
    command.write(folder / "arm-2-cores.json", FACTS, made_up(), quick=False)
    assert command.main(arguments) == 0 and command.main([*arguments, "--strict"]) == 1
    output = capsys.readouterr().out
    assert "2 became slower, 0 faster" in output
    assert (
        output.count("collectives: allreduce 2 ranks 64 MiB reused  farandole  Gloo    6x      3x   +100 %  ±0 %") == 2
    )
    command.write(folder / "arm-2-cores.json", FACTS, made_up(ours=0.016), quick=False)
    assert command.main([*arguments, "--strict"]) == 0
    assert "0 became slower" in capsys.readouterr().out
    assert command.main([*arguments[:2], "--compare", str(folder / "x86-2-cores.json")]) == 0
    assert "that was x86-2-cores, this is arm-2-cores" in capsys.readouterr().out


def test_a_wrong_path_of_the_baseline_is_an_error_before_the_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["idle", "--strict"]) == 2
    assert command.main(["idle", "--compare", "no-such-file.json"]) == 1
    output = capsys.readouterr().err
    assert "without --compare" in output and "--compare no-such-file.json: expected a file" in output
    assert "bench: idle" not in output


def test_the_page_is_current() -> None:
    assert performance.PAGE.read_text() == performance.page(), "run: python scripts/performance.py"


def test_the_committed_runs_name_no_host_and_no_path() -> None:
    for path in performance.RESULTS.glob("*.json"):
        found = json.loads(path.read_text())
        assert found["format"] == command.FORMAT and not found["quick"]
        assert "/" not in "".join(str(value) for value in found["machine"].values())


def test_plots_are_made_from_a_file_without_measuring(tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs the list `bench` of scripts/requirements")
    command.write(tmp_path / "run.json", {**FACTS, "versions": {}}, made_up(), quick=False)
    arguments = [sys.executable, "-m", "farandole.tools.bench", "--from", "run.json", "--plots", "pictures"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "allreduce 64 MiB: >= 5 x Gloo" in done.stdout
    drawn = {path.name for path in (tmp_path / "pictures").iterdir() if path.read_bytes().startswith(b"\x89PNG")}
    assert drawn == {"bandwidth.png", "latency.png", "efficiency.png", "step.png"}
