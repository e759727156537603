# `farandole check` on scripts with mistakes and on one without, as a user types it.
# Starts ranks; writes into temporary folders.
"""Each script has several mistakes, because a job of two ranks costs seconds; the findings are compared as JSON."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from entry_point import install

from farandole.tools import new

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]

BEGIN = """
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import farandole.torch as hvd
hvd.init()
"""
MODEL = """
model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.1), torch.nn.Linear(2, 1))
def train(loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        (model(x).squeeze(1) - y).square().mean().backward()
        optimizer.step()
"""
MANY = (
    BEGIN
    + "torch.manual_seed(hvd.rank())\n"
    + "data = TensorDataset(torch.arange(4000.0).reshape(1000, 4) / 4000, torch.ones(1000))\n"
    + MODEL
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
loader = DataLoader(data, 5, shuffle=True)
test = DataLoader(data, 5, sampler=DistributedSampler(data, hvd.size(), hvd.rank()))
for epoch in range(3):
    train(loader, optimizer)
    with torch.no_grad():
        total = sum((model(x) ** 2).sum().item() for x, y in test)
    torch.save(model.state_dict(), "best.pt")
    assert len(torch.load("best.pt")) == 4
"""
)
SAME = (
    "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\ntorch.manual_seed(7)\n"
    "data = TensorDataset(torch.randn(100, 4), torch.randn(100))\n"
    + MODEL
    + "optimizer = torch.optim.Adam(model.parameters())\n"
    "for epoch in range(2):\n    train(DataLoader(data, 5), optimizer)\n"
)
RIGHT = (
    BEGIN
    + "torch.manual_seed(1)\ndata = TensorDataset(torch.randn(100, 4), torch.randn(100))\n"
    + MODEL
    + """
rate = 0.001 * hvd.size()
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
torch.manual_seed(1 + hvd.rank())
sampler = DistributedSampler(data, hvd.size(), hvd.rank())
loader = DataLoader(data, 5, sampler=sampler)
for epoch in range(4):
    sampler.set_epoch(epoch)
    train(loader, optimizer)
    with torch.no_grad():
        total = sum((model(x) ** 2).sum() for x, y in loader)
    hvd.allreduce(total, name="total")
if hvd.rank() == 0:
    torch.save(model.state_dict(), "best.pt")
"""
)


def check(tmp_path: Path, script: str, code: int) -> tuple[dict[str, dict[str, str]], str]:
    """The findings by what they are about, and the text."""
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "farandole", "check", "train.py", "--json", "found.json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == code, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text()) if code < 2 else []
    return {one["about"]: one for one in found}, done.stdout + done.stderr


def line_of(script: str, part: str) -> str:
    """`train.py:N`, the line with this part."""
    (number,) = (at for at, line in enumerate(script.splitlines(), 1) if part in line)
    return f"train.py:{number}"


@pytest.mark.ranks
def test_a_script_with_many_mistakes(tmp_path: Path) -> None:
    found, said = check(tmp_path, MANY, 1)
    wrong = {about: one["line"] for about, one in found.items() if one["state"] == "WRONG"}
    assert wrong == {
        "broadcast": line_of(MANY, "optimizer.step()"),
        "optimizer": line_of(MANY, "torch.optim.SGD("),
        "samples": line_of(MANY, "for x, y in loader"),
        "evaluation": line_of(MANY, "total = sum("),
        "files": line_of(MANY, "torch.save("),
    }, said
    assert found["rate"]["state"] == "note" and found["init"]["state"] == found["loss"]["state"] == "ok", said
    assert "samples are read 2 times" in found["samples"]["text"]
    assert not (tmp_path / "best.pt").exists()  # the script's own file would have been replaced


@pytest.mark.nightly
@pytest.mark.ranks
def test_a_script_that_does_not_use_ranks(tmp_path: Path) -> None:
    found, said = check(tmp_path, SAME, 1)
    wrong = {about for about, one in found.items() if one["state"] == "WRONG"}
    assert wrong == {"init", "optimizer", "samples"}, said
    assert found["samples"]["text"] == "all ranks read the same samples, in the same order"
    assert found["loss"]["state"] == found["seeds"]["state"] == "note", said  # dropout, and equal losses


@pytest.mark.ranks
def test_a_new_project_is_right(tmp_path: Path) -> None:
    new.write("torch", tmp_path)
    found, said = check(tmp_path, (tmp_path / "train.py").read_text(), 0)
    states = {about: one["state"] for about, one in found.items()}
    assert states.pop("evaluation") == "-"  # of all samples on each rank, without a loader
    assert set(states.values()) == {"ok"}, said
    assert "rank 0 writes" in found["files"]["text"], said


@pytest.mark.nightly
@pytest.mark.ranks
@pytest.mark.parametrize("kind", new.TITLES)
def test_the_commands_of_a_new_project(kind: str, tmp_path: Path) -> None:
    """What its README tells people to type, as far as it needs no other host, no SLURM and no Docker."""
    pytest.importorskip(kind)
    new.write(kind, tmp_path)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "farandole").write_text(f'#!/bin/sh\nexec {sys.executable} -m farandole "$@"\n')
    (bin_folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (bin_folder / "srun").write_text('#!/bin/sh\nexec farandole run -np 2 "$@"\n')
    for program in bin_folder.iterdir():
        program.chmod(0o755)
    (block,) = re.findall(r"```\n(.*?)```", (tmp_path / "README.md").read_text(), flags=re.DOTALL)
    lines = [line.partition("#")[0].strip() for line in block.splitlines()]
    typed = [line for line in lines if line.startswith("farandole ") and "host1" not in line] + ["bash job.sbatch"]
    assert len(typed) == 4, block
    extra = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    path = f"{ROOT / 'src'}:{install(tmp_path)}"
    env = {**os.environ, **extra, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    for line in typed:
        done = subprocess.run(shlex.split(line), env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, line + "\n" + done.stdout + done.stderr
        if "check" not in line:
            (right,) = re.findall(r"accuracy ([\d.]+)% on 2 ranks", done.stdout)
            assert float(right) > 85, done.stdout


@pytest.mark.nightly
@pytest.mark.ranks
@pytest.mark.parametrize("more", ["", ", shard_optimizer_state=True", ", op=hvd.Adasum"])
def test_a_script_that_is_right(tmp_path: Path, more: str) -> None:
    wrapped = "named_parameters=model.named_parameters()"
    found, said = check(tmp_path, RIGHT.replace(wrapped, wrapped + more), 0)
    assert {one["state"] for one in found.values()} == {"ok"}, said
    assert "rank 0 writes" in found["files"]["text"] and "best.pt" in found["files"]["text"]
    assert "ms per step" in said and "moving data" in said, said


@pytest.mark.nightly
@pytest.mark.ranks
def test_a_script_that_fails(tmp_path: Path) -> None:
    script = BEGIN + "if hvd.rank() == 1: raise ValueError('no data')\nhvd.barrier()\n"
    found, said = check(tmp_path, script, 3)
    assert not found
    assert "farandole check: rank 1 failed: ValueError: no data (train.py:6)" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.py", "--epochs", "3"], "stand behind --: farandole check train.py -- --epochs 3"),
        (["nothing.py"], "there is no file nothing.py (looked from "),
        (["-np", "1", __file__], "expected at least 2 ranks"),
    ],
)
def test_wrong_command_lines(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    from farandole.tools.check import command

    with pytest.raises(SystemExit) as end:
        command.parse(words)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [
        "torch_digits",
        "torch_ddp",
        "accelerate_digits",
        "elastic_exact",
        "elastic_horovod",
        "fsdp2",
        "torch_sparse_embedding",
        "lightning_digits",
        "keras_digits",
        "tensorflow_digits",
        "jax_digits",
    ],
)
def test_nothing_is_wrong_in_the_examples(name: str, tmp_path: Path) -> None:
    for needed in {"accelerate_digits": ["accelerate"], "lightning_digits": ["lightning"]}.get(name, []):
        pytest.importorskip(needed)
    check(tmp_path, (ROOT / "examples" / f"{name}.py").read_text(), 0)
