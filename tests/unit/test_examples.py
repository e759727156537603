"""The examples run, and the guides' code and diffs do what they say; the page of public names is current.
Starts the scripts as a user would, with few steps; writes into temporary folders."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(ROOT / "scripts"))

import api  # noqa: E402

LAUNCH = "import sys; from farandole.launch.cli import horovodrun; sys.exit(horovodrun())"
RANKS = [sys.executable, "-c", LAUNCH, "-np", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]


def run(launcher: list[str], script: Path, *options: str) -> str:
    """What the script printed; the test fails with its errors."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    command = [*launcher, sys.executable, str(script), *options]
    with tempfile.TemporaryDirectory() as path:  # torch leaves a cache behind
        environment["TMPDIR"] = path
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def apply(diff: str, text: str) -> str:
    """The text with a diff applied whose parts are separated by @@ lines; each part fits in exactly one place."""
    for hunk in re.split(r"^@@\n", diff, flags=re.M):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        if lines:
            assert text.count(old) == 1, f"this part fits in {text.count(old)} places:\n{hunk}"
            text = text.replace(old, new)
    return text


def test_the_distributed_example_has_at_most_ten_more_lines() -> None:
    before, after = ((EXAMPLES / f"torch_{name}.py").read_text().splitlines() for name in ("single", "digits"))
    added = [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert len(added) <= 10, "\n".join(added)
    steps = ["hvd.init()", "hvd.device()", "DistributedSampler(", "hvd.scale_lr(", "hvd.DistributedOptimizer("]
    steps += ["hvd.broadcast_parameters(", "hvd.broadcast_optimizer_state(", "hvd.rank()"]
    assert [step for step in steps if not any(step in line for line in added)] == []


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "launcher"), [("single", []), ("digits", RANKS), ("ddp", TORCHRUN)], ids=["single", "digits", "ddp"]
)
def test_the_digits_are_learned(name: str, launcher: list[str], tmp_path: Path) -> None:
    file = tmp_path / "digits.pt"
    output = run(launcher, EXAMPLES / f"torch_{name}.py", "--epochs", "2", "--rate", "0.02", "--save", str(file))
    (accuracy,) = re.findall(r"accuracy ([\d.]+)%", output)  # one rank speaks
    assert float(accuracy) > 50
    assert len(torch.load(file)) == 8


@pytest.mark.ranks
@pytest.mark.parametrize("options", [[], ["--fp16-allreduce", "--use-adasum"]], ids=["plain", "fp16 and adasum"])
def test_the_synthetic_benchmark_prints_what_horovods_does(options: list[str]) -> None:
    sizes = "--model tiny --batch-size 2 --image-size 32 --num-warmup-batches 1 --num-batches-per-iter 1 --num-iters 2"
    output = run(RANKS, EXAMPLES / "torch_synthetic.py", "--no-cuda", *sizes.split(), *options)
    lines = [line.removeprefix("[0]<stdout>:") for line in output.splitlines()]
    patterns = [
        r"Model: tiny",
        r"Batch size: 2",
        r"Number of CPUs: 2",
        r"Running warmup\.\.\.",
        r"Running benchmark\.\.\.",
        r"Iter #0: [\d.]+ img/sec per CPU",
        r"Iter #1: [\d.]+ img/sec per CPU",
        r"Img/sec per CPU: [\d.]+ \+-[\d.]+",
        r"Total img/sec on 2 CPU\(s\): [\d.]+ \+-[\d.]+",
    ]
    assert len(lines) == len(patterns)
    assert [p for p, line in zip(patterns, lines, strict=True) if not re.fullmatch(p, line)] == []


@pytest.mark.ranks
def test_sparse_gradients_touch_few_rows() -> None:
    output = run(RANKS, EXAMPLES / "torch_sparse_embedding.py", "--steps", "60", "--words", "2000")
    (rows,) = re.findall(r"a step changed (\d+) of 2000 rows", output)
    assert 0 < int(rows) < 1500
    (accuracy,) = re.findall(r"accuracy ([\d.]+)%", output)
    assert float(accuracy) > 50


@pytest.mark.ranks
def test_the_elastic_script_of_horovod() -> None:
    output = run([*RANKS, "--min-np", "1"], EXAMPLES / "elastic_horovod.py", "--epochs", "3")
    (accuracy,) = re.findall(r"accuracy ([\d.]+)% after 3 epochs on 2 ranks", output)
    assert float(accuracy) > 80


@pytest.mark.ranks
def test_the_exact_elastic_script_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    pattern = r"after (\d) epochs, weights (\w+)"
    arguments = ["--checkpoints", str(tmp_path), "--epochs"]
    [first] = re.findall(pattern, run([], EXAMPLES / "elastic_exact.py", *arguments, "1"))
    [second] = re.findall(pattern, run([*RANKS, "--min-np", "1"], EXAMPLES / "elastic_exact.py", *arguments, "2"))
    assert first[0] == "1" and second[0] == "2" and first[1] != second[1]


@pytest.mark.ranks
def test_the_guide_from_horovod(tmp_path: Path) -> None:
    (script,) = blocks("docs/from-horovod.md", "python")
    (diff,) = blocks("docs/from-horovod.md", "diff")
    for name, text in (("before.py", script), ("after.py", apply(diff, script))):
        (tmp_path / name).write_text(text)
        assert "loss below 0.1: True" in run(RANKS, tmp_path / name)


@pytest.mark.parametrize(("page", "before"), [("README.md", "torch_single.py"), ("docs/from-ddp.md", "torch_ddp.py")])
def test_the_diff_of_a_page_makes_the_distributed_script(page: str, before: str) -> None:
    (diff,) = blocks(page, "diff")
    # Both ends of it are run above.
    assert apply(diff, (EXAMPLES / before).read_text()) == (EXAMPLES / "torch_digits.py").read_text()


def test_the_page_of_names_is_current() -> None:
    assert api.PAGE.read_text() == api.page(), "run: python scripts/api.py"
