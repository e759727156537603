# How training with Lightning starts: by the script itself, in a notebook, under launchers, and from a stack's file.
# Touches processes, and imports Lightning only in them.
"""These scripts do not import farandole: torch finds the entry point, as after `pip install`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import bed
import pytest
from entry_point import install

pytest.importorskip("torch")
pytest.importorskip("lightning_utilities", reason="Lightning is not installed")
ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "examples" / "lightning_digits.py")
pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment as after `pip install`; its temporary files are the test's."""
    own = dict.fromkeys(("TMPDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"), str(tmp_path))
    own["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    path = f"{ROOT / 'src'}:{install(tmp_path)}:{Path(__file__).parent}"
    own |= {"TESTS_WITHOUT": "matplotlib pandas", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **own, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def output_of(arguments: list[str], environment: dict[str, str], code: int = 0) -> str:
    done = subprocess.run(
        arguments, env=environment, capture_output=True, text=True, timeout=180, cwd=environment["TMPDIR"]
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout + done.stderr


def accuracies(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"accuracy ([\d.]+)% after \d epochs", text)]


@pytest.mark.parametrize("ranks", ["2", pytest.param("4", marks=pytest.mark.nightly)])
def test_a_script_starts_its_own_ranks(installed: dict[str, str], ranks: str) -> None:
    """The process that the user started trains nothing; it has the results of rank 0."""
    text = output_of([sys.executable, DIGITS, "--epochs", "4", "--devices", ranks], installed)
    [accuracy] = accuracies(text)
    assert accuracy > 70, text


@pytest.mark.parametrize("launcher", ["horovodrun", "openmpi", "torchrun"])
def test_under_a_launcher_lightning_starts_no_ranks(installed: dict[str, str], launcher: str) -> None:
    """devices=2 in the script, and 2 ranks in total."""
    arguments = [sys.executable, "-m", "farandole", "run", "-np", "2"]
    if launcher == "openmpi":
        if shutil.which("mpirun.openmpi") is None:
            pytest.skip("mpirun.openmpi is not installed (Debian's package openmpi-bin)")
        arguments = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    arguments.append(sys.executable)
    if launcher == "torchrun":
        arguments = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    [accuracy] = accuracies(output_of([*arguments, DIGITS, "--epochs", "2"], installed))
    assert accuracy > 70


NOTEBOOK = """
import nbformat, nbclient
cell = '''
import lightning.pytorch as pl, torch
from torch.utils.data import DataLoader, TensorDataset

class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        loss = (self.layer(batch[0]) - batch[1]).square().mean()
        self.log("ranks", float(self.trainer.world_size))
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

x = torch.randn(32, 2)
line = Line()
before = line.layer.weight.clone()
trainer = pl.Trainer(strategy="farandole", devices=2, accelerator="cpu", max_epochs=2, logger=False,
                     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(line, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4))
print("ranks", trainer.callback_metrics["ranks"].item(), "steps", trainer.global_step)
print("learned", not torch.equal(before, line.layer.weight))
'''
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
nbclient.NotebookClient(book, timeout=150, kernel_name="python3").execute()
print("".join(output.get("text", "") for output in book.cells[0].outputs))
"""


def test_a_notebook_starts_its_own_ranks(installed: dict[str, str]) -> None:
    pytest.importorskip("nbclient")
    text = output_of([sys.executable, "-c", NOTEBOOK], installed)
    assert "ranks 2.0 steps 8" in text and "learned True" in text, text


FABRIC = """
import os, sys, torch
from lightning.fabric import Fabric

def train(fabric):
    model = torch.nn.Linear(2, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    fabric.backward(model(torch.full((4, 2), float(fabric.global_rank))).sum())
    return fabric.world_size, model.weight.grad.tolist()

if "RANK" not in os.environ:
    print("got", Fabric(accelerator="cpu", devices=2, strategy="farandole").launch(train), flush=True)
fabric = Fabric(accelerator="cpu", devices=2, strategy="horovod")
fabric.launch()
os.write(1, f"rank {fabric.global_rank} {train(fabric)}\\n".encode())  # in one piece
"""


def test_fabric_starts_its_own_ranks(installed: dict[str, str], tmp_path: Path) -> None:
    """With a function, and as scripts do it: everything after launch() runs in the ranks."""
    script = tmp_path / "train.py"
    script.write_text(FABRIC)
    text = output_of([sys.executable, str(script)], installed)
    assert text.count("got (2, [[2.0, 2.0]])") == 1
    assert sorted(re.findall(r"rank \d .*", text)) == [f"rank {rank} (2, [[2.0, 2.0]])" for rank in range(2)]


LAZY = """
import sys, torch
assert not any(name.startswith(("lightning.", "pytorch_lightning", "farandole.torch")) for name in sys.modules)
import lightning.pytorch.strategies, lightning.fabric.strategies
assert {"farandole", "horovod", "ddp"} <= set(lightning.pytorch.strategies.StrategyRegistry)
assert {"farandole", "horovod", "ddp"} <= set(lightning.fabric.strategies.STRATEGY_REGISTRY)
assert not any(name.startswith("farandole.torch") for name in sys.modules), "nothing of ours is loaded yet"
from lightning_horovod import HorovodStrategy
from farandole.lightning import FarandoleStrategy
import pickle
for kind in (HorovodStrategy, FarandoleStrategy):
    assert pickle.loads(pickle.dumps(kind)) is kind, kind
assert HorovodStrategy.__name__ == "HorovodStrategy" and HorovodStrategy().scale_lr and not FarandoleStrategy().scale_lr
print("fine")
"""
MISSING = """
import sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("lightning", "pytorch_lightning"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Gone())
import torch, farandole.lightning
try:
    farandole.lightning.FarandoleStrategy
except ModuleNotFoundError as error:
    print(error)
"""


def test_names_are_known_without_an_import(installed: dict[str, str]) -> None:
    assert "fine" in output_of([sys.executable, "-W", "error::UserWarning:farandole", "-c", LAZY], installed)


def test_lightning_that_is_not_installed_is_an_error(installed: dict[str, str]) -> None:
    text = output_of([sys.executable, "-c", MISSING], installed)
    assert "farandole.lightning needs lightning.pytorch, which is not installed: pip install" in text


def test_an_old_lightning_is_refused(installed: dict[str, str], tmp_path: Path) -> None:
    for package in ("lightning", "lightning/pytorch"):
        (tmp_path / "site" / package).mkdir()
        (tmp_path / "site" / package / "__init__.py").write_text('__version__ = "2.1.4"\n')
    environment = {**installed, "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT / 'src'}"}
    text = output_of([sys.executable, "-c", "from farandole.lightning import FarandoleStrategy"], environment, code=1)
    assert "lightning.pytorch is version 2.1.4; farandole.lightning needs 2.6 or newer" in text


RUNS = {  # logger -> its module, and the files that one run writes
    "wandb": ("wandb", "wandb/offline-run-*/*.wandb"),
    "mlflow": ("mlflow", "mlflow/*/*/metrics/loss_epoch"),
    "comet": ("comet_ml", "comet/*.zip"),
}


def test_loggers_of_other_packages_write_one_run(installed: dict[str, str], tmp_path: Path) -> None:
    """Offline or to a file: two ranks, one run, that of rank 0. Lightning 2.6 has no logger for Neptune any more."""
    installed_loggers = [name for name, (module, _) in RUNS.items() if importlib.util.find_spec(module) is not None]
    if not installed_loggers:
        pytest.skip("neither wandb nor mlflow nor comet_ml is installed")
    environment = {**installed, "SCRATCH": str(tmp_path), "LOGGERS": " ".join(installed_loggers), "HOME": str(tmp_path)}
    environment |= {"WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true", "COMET_START_ONLINE": "0"}
    job = str(ROOT / "tests" / "frameworks" / "lightning_loggers_job.py")
    output_of([sys.executable, "-m", "farandole", "run", "-np", "2", sys.executable, job], environment)
    for name in installed_loggers:
        [run] = tmp_path.glob(RUNS[name][1])
        assert run.stat().st_size > 20, name


@pytest.mark.parametrize("communication", ["{compression: bf16, scale_lr: false}", "gloo"], ids=["farandole", "gloo"])
def test_a_stack_from_a_file(installed: dict[str, str], tmp_path: Path, communication: str) -> None:
    shutil.copy(DIGITS, tmp_path)
    text = (
        (ROOT / "examples" / "stack.yaml")
        .read_text()
        .replace("communication: farandole", f"communication: {communication}")
    )
    logged = text.replace(
        "logger: false", "logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs}}"
    )
    (tmp_path / "stack.yaml").write_text(logged)
    environment = {**installed, "GLOO_SOCKET_IFNAME": "lo"}
    output_of([sys.executable, "-m", "farandole", "fit", str(tmp_path / "stack.yaml")], environment)
    [table] = (tmp_path / "logs").rglob("metrics.csv")
    header, *rows = table.read_text().splitlines()
    index = header.split(",").index("accuracy")
    assert float([row.split(",")[index] for row in rows if row.split(",")[index]][-1]) > 0.7


def test_a_stack_over_two_hosts(installed: dict[str, str]) -> None:
    text = (ROOT / "examples" / "stack.yaml").read_text()
    text = text.replace("\n  kind: local", "\n  kind: hosts\n  hosts: host1:1,host2:1")
    (ROOT / "build").mkdir(exist_ok=True)
    # Below the repository: these hosts have temporary folders of their own.
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as path, bed.hosts(2, ssh=True) as hosts:
        shutil.copy(DIGITS, path)
        Path(path, "stack.yaml").write_text(text)
        before = hosts[1].counters()
        command = [sys.executable, "-m", "farandole", "fit", f"{path}/stack.yaml"]
        environment = {**installed, "TMPDIR": "/tmp", "PYTHONPATH": str(ROOT / "src")}
        done = hosts[0].run(command, cwd=bed.ROOT, env=environment, timeout=180, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        assert "`max_epochs=2` reached" in done.stdout + done.stderr
        assert (hosts[1].counters() - before).sent > 100_000, "the ranks should have met over the wire"


def test_after_the_trainer_has_started_ranks_its_properties_are_those_after_ddp_spawn(
    installed: dict[str, str],
) -> None:
    job = str(Path(__file__).with_name("lightning_spawn_job.py"))
    found = {}
    for strategy in ("ddp_spawn", "farandole", "object"):
        folder = Path(installed["TMPDIR"]) / strategy
        text = output_of([sys.executable, job, strategy, str(folder)], installed)
        [line] = [line for line in text.splitlines() if line.startswith("said ")]
        found[strategy] = json.loads(line[5:])
        found[strategy].pop("pid")
        if strategy == "farandole":  # the filters of the script hold in the ranks
            assert "a warning that the script shows" in text and "that the script hides" not in text, text
    assert found["farandole"] == found["ddp_spawn"] == found["object"]
    assert [answers[0] for answers in found["farandole"]["asked"]] == [2, 2]  # the number of ranks
    assert set(found["farandole"]["metrics"]) == {"train", "train_epoch", "train_step", "val"}, found
    assert found["farandole"]["state"][2] and found["farandole"]["there"] == [found["farandole"]["best"]]
