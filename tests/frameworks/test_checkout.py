# A checkout after `make demo` works like a wheel: it has the commands, and entry points that need no import.
# Touches the environment that runs the tests, in separate processes with the default search path.
"""`init_process_group("farandole")` and `Trainer(strategy="farandole")` in scripts that do not name this package."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]
ROOT = Path(__file__).resolve().parents[2]
SUM = """
import os, torch, torch.distributed as dist
dist.init_process_group("farandole")
tensor = torch.full((4,), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
os.write(1, f"{dist.get_rank()} of {dist.get_world_size()}: {tensor.tolist()}\\n".encode())  # one write
dist.destroy_process_group()
"""
FIT = """
import os, torch, lightning
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(16, 3))
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(strategy="farandole", accelerator="cpu", devices=2, max_epochs=1, **quiet)
trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=4))
who, how = f"{trainer.global_rank} of {trainer.world_size}", type(trainer.strategy).__module__
os.write(1, f"{who}: {trainer.global_step} steps with {how}\\n".encode())
"""


def launch(script: str, folder: Path) -> str:
    """Runs a script with two ranks by the installed command. Returns the output."""
    assert "import farandole" not in script
    (folder / "script.py").write_text(script)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder)  # torch makes it, even an empty one
    command = [
        str(Path(sys.executable).with_name("farandole")),
        "run",
        "--raw",
        "-np",
        "2",
        sys.executable,
        "script.py",
    ]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_checkout_is_installed() -> None:
    found = importlib.metadata.distribution("farandole")
    assert found.version == (ROOT / "VERSION").read_text().strip()
    command = [sys.executable, "-c", "import farandole; print(farandole.__file__)"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    imported = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=True).stdout
    assert imported.strip() == str(ROOT / "src" / "farandole" / "__init__.py")


def test_torch_knows_the_backend(tmp_path: Path) -> None:
    output = launch(SUM, tmp_path)
    assert sorted(output.splitlines()) == [f"{rank} of 2: [3.0, 3.0, 3.0, 3.0]" for rank in range(2)]


def test_lightning_finds_the_strategy_by_its_name(tmp_path: Path) -> None:
    pytest.importorskip("lightning_utilities", reason="Lightning is not installed")
    output = launch(FIT, tmp_path)
    lines = sorted(line for line in output.splitlines() if " of 2: " in line)
    assert [line.split(" with ")[0] for line in lines] == [f"{rank} of 2: 2 steps" for rank in range(2)]
    assert all(" with farandole.lightning" in line for line in lines)
