"""The benchmark's bookkeeping: rows, merging, tables, targets, the page and the pictures, from made-up numbers.
Writes into a temporary folder; tests/ranks/test_bench_quick.py runs the real thing."""

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

from farandole import library
from farandole.engine import DType
from farandole.tools.bench import command, kernels, plan, report, steps, targets
from farandole.tools.bench.inside import collectives, libraries, together
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


@pytest.mark.parametrize("operation", libraries.OPERATIONS)
def test_wrong_results_are_noticed(operation: str, tmp_path: Path) -> None:
    """A library that returns what it got is right for a broadcast to its own root alone."""

    class Lazy(libraries.Library):
        rank, size = 0, 2

        def call(self, operation: str, name: str, fresh: bool) -> libraries.Call:
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
def test_the_kernel_alone_can_be_measured(dtype: str) -> None:
    assert kernels.there(), "the library is older than the source: make test builds it"
    numbers = np.array([0x3F80, 0x4000], np.uint16) if dtype != "float32" else np.array([1, 2], np.float32)
    if dtype == "float16":
        numbers = np.array([1, 2], np.float16).view(np.uint16)
    out = np.empty_like(numbers)
    library.add(DType[dtype.upper()], numbers, numbers, out)
    expected = {"bfloat16": [0x4000, 0x4080], "float16": np.array([2, 4], np.float16).view(np.uint16).tolist()}
    assert out.tolist() == expected.get(dtype, [2.0, 4.0])
    assert all(time > 0 for time in kernels.measure(dtype, 4096, 4096, 2))
    with pytest.raises(ValueError):
        library.add(99, numbers, numbers, out)  # type: ignore[arg-type]


def test_the_page_is_current() -> None:
    assert performance.PAGE.read_text() == performance.page(), "run: python scripts/performance.py"


def test_the_committed_runs_name_no_host_and_no_path() -> None:
    for path in performance.RESULTS.glob("*.json"):
        found = json.loads(path.read_text())
        assert found["format"] == command.FORMAT and not found["quick"]
        assert "/" not in "".join(str(value) for value in found["machine"].values())


def test_pictures_are_drawn_from_a_file_without_measuring(tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs the list `bench` of scripts/requirements")
    facts = {"architecture": "x", "processor": "y", "cores": 2, "kernel": "6", "farandole": "1", "kernels": "z"}
    command.write(tmp_path / "run.json", {**facts, "versions": {}}, made_up(), quick=False)
    words = [sys.executable, "-m", "farandole.tools.bench", "--from", "run.json", "--plots", "pictures"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "allreduce 64 MiB: >= 5 x Gloo" in done.stdout
    drawn = {path.name for path in (tmp_path / "pictures").iterdir() if path.read_bytes().startswith(b"\x89PNG")}
    assert drawn == {"bandwidth.png", "latency.png", "efficiency.png", "step.png"}
