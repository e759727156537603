# torch.distributed on Farandole against the same cases on Gloo.
# Touches farandole.launch, the cases and torch.
"""PyTorch's own behaviour is the oracle: equal bits for copies and whole numbers, rounding for sums."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from entry_point import install
from waiting import in_time

from farandole.launch import local

torch = pytest.importorskip("torch")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import distributed_cases  # noqa: E402, F401
import distributed_job  # noqa: E402

SHARED = list(distributed_job.CASES)
import distributed_own_cases  # noqa: E402, F401

OWN = [name for name in distributed_job.CASES if name not in SHARED]
import distributed_training_cases  # noqa: E402, F401
from distributed_runs import SOURCE, run, same  # noqa: E402

TRAINING = [name for name in distributed_job.CASES if name not in SHARED + OWN]
pytestmark = pytest.mark.ranks

# The two ways into torch: a group in Python that replaces torch's own, and an object in torch's own group, by the base
# class that torch's next release documents. Where that exists there is one way, and nothing of it is left out; before
# 2.15 there is only the other one.
BOTH = hasattr(torch.distributed, "get_backend_impl") and not hasattr(torch.distributed, "BackendBase")
WAYS = ["farandole", "BASE"] if BOTH else ["farandole"]
HOLDER = "torch 2.15 gives users a work that forwards wait and get_future to ours, and nothing else"
MISSING = {
    "receives_from_anybody": HOLDER,
    "completed_work": HOLDER,
    "a_group_is_split": "torch 2.15 crashes where a backend in Python gives no part to a rank outside of it",
}


def taken(way: str, module: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """The results of one backend, or of one way into torch."""
    if way != "BASE":
        return run(module, way, ranks, folder / way)
    omitted = [name for name in MISSING if name != "a_group_is_split" or ranks > 2]
    return run(module, "farandole", ranks, folder / way, way=("BASE", *omitted))


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"{size} ranks")
def size(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def gloo(size: int, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return taken("gloo", "distributed_cases", size, tmp_path_factory.mktemp("distributed"))


@pytest.fixture(scope="module", params=WAYS)
def ours(request: pytest.FixtureRequest, size: int, tmp_path_factory: pytest.TempPathFactory) -> Any:
    # The last shared case must be the last of all cases: after it the ranks have created different groups.
    both = "distributed_own_cases,distributed_cases"
    return taken(request.param, both, size, tmp_path_factory.mktemp("distributed"))


@pytest.mark.parametrize("name", SHARED)
def test_results_equal_those_of_gloo(gloo: list[dict[str, Any]], ours: list[dict[str, Any]], name: str) -> None:
    require(ours, name)
    same({"gloo": gloo, "farandole": ours}, name)


def require(results: list[dict[str, Any]], name: str) -> None:
    """Skips cases that were left out."""
    if name in MISSING and name not in results[0]:
        pytest.skip(MISSING[name])


@pytest.fixture(scope="module")
def gloo_trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return taken("gloo", "distributed_training_cases", 2, tmp_path_factory.mktemp("distributed"))


@pytest.fixture(scope="module", params=WAYS)
def trained(request: pytest.FixtureRequest, gloo_trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    ours = taken(request.param, "distributed_training_cases", 2, tmp_path_factory.mktemp("distributed"))
    return {"gloo": gloo_trained, "farandole": ours}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_training_as_on_gloo(trained: dict[str, list[dict[str, Any]]], name: str) -> None:
    same(trained, name)


@pytest.mark.parametrize("name", OWN)
def test_operations_that_gloo_does_not_have(ours: list[dict[str, Any]], name: str) -> None:
    require(ours, name)
    for rank, result in enumerate(ours):
        assert result[name] is None, f"rank {rank}: {result[name]}"


# --- without an import of farandole, under launchers, and when a rank dies --------------------------------------------

SUM = """
import os, sys, torch, torch.distributed as dist
loaded = [name for name in sys.modules if name.startswith("farandole.")]
if "FARANDOLE_RENDEZVOUS" in os.environ:  # a rank of our launcher notices mistakes: docs/mistakes.md
    loaded = [name for name in loaded if not name.startswith("farandole.base")]
assert loaded == ["farandole.autoload"]
dist.init_process_group("farandole")
tensor = torch.full((4,), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
os.write(1, f"{dist.get_rank()} {dist.get_world_size()} {tensor.tolist()}\\n".encode())  # in one piece
dist.destroy_process_group()
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment in which torch finds the entry point, as after `pip install`."""
    return {"PYTHONPATH": f"{SOURCE}:{install(tmp_path)}", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}


def python(program: str, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    path = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = [sys.executable, *arguments, *(["-c", program] if program else [])]
    return subprocess.run(command, env={**path, **environment}, capture_output=True, text=True, timeout=280)


def test_under_torchrun(installed: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SUM)
    done = python("", installed, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} 2 [3.0, 3.0, 3.0, 3.0]" for rank in range(2)]


def test_under_our_launcher(installed: dict[str, str]) -> None:
    with local.start([sys.executable, "-c", SUM], 2, env=installed, stop_on_failure=False) as job:
        assert job.wait(60) == 0, job.stderr(0) + job.stderr(1)
        assert [job.stdout(rank).strip() for rank in range(2)] == [f"{r} 2 [3.0, 3.0, 3.0, 3.0]" for r in range(2)]


TWICE = """
import torch, torch.distributed as dist
import farandole.torch as hvd

hvd.init()
for _ in range(2):
    dist.init_process_group("farandole")
    pair = dist.new_group([0, 1])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=pair)
    print(int(tensor), flush=True)
    dist.destroy_process_group()
"""


def test_a_run_may_be_repeated_in_the_same_world(installed: dict[str, str]) -> None:
    with local.start([sys.executable, "-c", TWICE], 2, env=installed, stop_on_failure=False) as job:
        assert job.wait(60) == 0, job.stderr(0) + job.stderr(1)
        assert [job.stdout(rank).split() for rank in range(2)] == [["2", "2"]] * 2


IMPORTED = """
import sys, torch, torch.distributed as dist
ours = sorted(name for name in sys.modules if name.partition(".")[0] in ("farandole", "horovod", "lightning"))
print(dist.is_backend_available("farandole"), *ours)
"""


def test_the_import_of_torch_loads_one_file(installed: dict[str, str]) -> None:
    done = python(IMPORTED, installed, "-W", "error::UserWarning")
    assert done.stdout == "True farandole farandole.autoload\n", done.stderr


# What is replaced in torch and in the import system, looked at before and after.
TORCH_UNTOUCHED = """
import sys, torch, torch.distributed as dist
schemes = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
def look():
    ours = [finder for finder in sys.meta_path if "farandole" in str(finder)]
    return [dict(schemes), torch.amp.GradScaler.step, torch.amp.GradScaler.unscale_, ours]
before = look()
import farandole.torch as hvd, farandole.torch.distributed, farandole.lightning
assert dist.is_backend_available("farandole")
hvd.init()
hvd.DistributedOptimizer(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))
changed = [now != then for now, then in zip(look(), before)]
print(*changed)
"""
LIGHTNING_UNTOUCHED = """
import sys, farandole.lightning
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry
assert "farandole" not in StrategyRegistry
silent = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(accelerator="cpu", strategy=farandole.lightning.FarandoleStrategy(), devices=1, **silent)
assert trainer.strategy.cluster_environment.world_size() == 1
connectors = ("lightning.pytorch.trainer.connectors.accelerator_connector", "_AcceleratorConnector")
choose = getattr(sys.modules[connectors[0]], connectors[1])._choose_and_init_cluster_environment
print(hasattr(choose, "__wrapped__"), any("farandole" in str(finder) for finder in sys.meta_path))
"""


def test_autoload_can_be_switched_off(installed: dict[str, str]) -> None:
    off = {**installed, "FARANDOLE_AUTOLOAD": "0"}
    assert python(IMPORTED, off).stdout == "False farandole farandole.autoload\n"
    assert python(TORCH_UNTOUCHED, off).stdout == "False True True False\n"  # GradScaler: the optimizer needs it
    by_hand = {**installed, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert python(TORCH_UNTOUCHED, by_hand).stdout == "True True True True\n"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_registration_lightning_accepts_only_strategy_objects(installed: dict[str, str]) -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("Lightning is not installed")
    done = python(LIGHTNING_UNTOUCHED, {**installed, "FARANDOLE_AUTOLOAD": "0"})
    assert done.stdout == "False False\n", done.stderr


ALONE = """
import torch, torch.distributed as dist
print(torch.ones(2).sum(), flush=True)
dist.init_process_group("farandole", store=dist.HashStore(), rank=0, world_size=1)
"""


def test_a_broken_package_does_not_break_the_import_of_torch(installed: dict[str, str], tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "farandole"
    shutil.copytree(Path(SOURCE) / "farandole", broken, ignore=shutil.ignore_patterns("_native", "__pycache__"))
    environment = {**installed, "PYTHONPATH": f"{broken.parent}:{tmp_path / 'site'}"}
    done = python(ALONE, environment)
    assert done.returncode == 1 and done.stdout == "tensor(2.)\n", done.stderr
    assert "UserWarning" not in done.stderr and "libfarandole.so" in done.stderr, done.stderr


def test_a_library_of_another_version_does_not_break_the_import_of_torch(
    installed: dict[str, str], tmp_path: Path
) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(
        Path(SOURCE) / "farandole", checkout / "src" / "farandole", ignore=shutil.ignore_patterns("*chaos*")
    )
    (checkout / "VERSION").write_text("99.0\n")
    environment = {**installed, "PYTHONPATH": f"{checkout / 'src'}:{tmp_path / 'site'}"}
    done = python(ALONE, environment)
    assert done.returncode == 1 and done.stdout == "tensor(2.)\n", done.stderr
    assert "UserWarning" not in done.stderr and "99.0" in done.stderr, done.stderr


DEATH = """
import os, signal, sys, time, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import farandole.torch.distributed
dist.init_process_group("farandole")
rank = dist.get_rank()
model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1000):
    if rank == 1 and step == 5:
        # In the middle of the backward pass.
        model[1].register_full_backward_hook(lambda *_: (print(time.time(), flush=True), os.kill(os.getpid(), 9)))
    try:
        model(torch.ones(2, 16, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    except dist.DistBackendError as error:
        print(time.time(), str(error).replace(chr(10), " "), flush=True)
        sys.exit(7)
"""


# Its buckets are in memory that the ranks share; rank 1 dies while the others reduce one of them.
DEATH_IN_SHARED_MEMORY = """
import os, sys, time, torch, torch.distributed as dist
from torch import nn
import farandole.torch.distributed
from farandole.world.runtime import runtime
dist.init_process_group("farandole")
rank = dist.get_rank()
layers = nn.Sequential(*[nn.Linear(1100, 1100) for _ in range(3)])
model = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=4)
for step in range(1000):
    if rank == 1 and step == 5:
        assert runtime.world.engine.counter("in_place_bytes") > 0
        layers[0].register_full_backward_hook(lambda *_: (print(time.time(), flush=True), os.kill(os.getpid(), 9)))
    try:
        model(torch.ones(2, 1100, requires_grad=True)).sum().backward()
    except dist.DistBackendError as error:
        print(time.time(), str(error).replace(chr(10), " "), flush=True)
        sys.exit(7)
"""


# What torch's next release has; the entry point would have registered the backend before.
BASE = "import torch.distributed as dist; dist.BackendBase = dist._Backend\n"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", [DEATH, DEATH_IN_SHARED_MEMORY], ids=["FSDP2", "DDP in shared memory"])
def test_a_death_is_reported_at_once_with_the_rank(tmp_path: Path, program: str, way: str) -> None:
    environment = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    program = (BASE if way == "BASE" else "") + program
    with local.start([sys.executable, "-c", program], 3, env=environment, stop_on_failure=False) as job:
        job.wait(60)
        assert list(job.codes) == [7, 137, 7], [job.stderr(rank)[-2000:] for rank in range(3)]
        died = float(job.stdout(1).split()[0])
        for rank in (0, 2):
            when, _, text = job.stdout(rank).partition(" ")
            assert "rank 1" in text, text
            in_time(float(when) - died, 1.0, "detecting a death")


COMPOSED = """
import torch, farandole.torch.distributed
from farandole.torch.distributed.device_backend import DeviceBackend
dist.init_process_group("cpu:farandole,cuda:gloo")
near, far = (dist.get_backend_impl(device=torch.device(name)) for name in ("cpu", "cuda"))
assert type(near) is DeviceBackend and isinstance(far, dist.ProcessGroupGloo), (near, far)
group = dist.new_group([0, 1])
tensor = torch.full((4,), float(dist.get_rank() + 1))
dist.all_reduce(tensor, group=group)
assert tensor.tolist() == [3.0] * 4, tensor
# Torch's own group, with torch's own recorder; nothing of ours takes the place of either.
assert type(group) is dist.ProcessGroup and group in dist.distributed_c10d._world.pg_flight_recorder_hooks
assert [name for name in dist.Backend.backend_list if "farandole" in name] == ["farandole"]
dist.destroy_process_group()
"""


@pytest.mark.skipif(not BOTH, reason="only torch 2.15 has the base class under a private name")
def test_torch_composes_and_records(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    with local.start([sys.executable, "-c", BASE + COMPOSED], 2, env=environment, stop_on_failure=False) as job:
        assert job.wait(60) == 0, job.stderr(0) + job.stderr(1)
