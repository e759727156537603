# Parallelism on top of the torch.distributed backend: meshes, checkpoints, hosts, examples, Accelerate, other releases.
# Touches farandole.launch, the bed, the cases and torch.
"""The cases of distributed_mesh_cases.py also run on Gloo, and must give the same results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bed
import pytest
from entry_point import install

from farandole.launch import local

torch = pytest.importorskip("torch")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import distributed_job  # noqa: E402
import distributed_training_cases  # noqa: E402, F401

BEFORE = list(distributed_job.CASES)
import distributed_mesh_cases  # noqa: E402, F401
from distributed_runs import SOURCE, compare, run, same  # noqa: E402

MESHES = [name for name in distributed_job.CASES if name not in BEFORE]
ROOT = HERE.parents[1]
pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("distributed")
    return {name: run("distributed_mesh_cases", name, 4, folder / name) for name in ("gloo", "farandole")}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_meshes_equal_those_of_gloo(meshes: dict[str, list[dict[str, Any]]], name: str) -> None:
    same(meshes, name)


@pytest.mark.slow
def test_checkpoints_at_another_size(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    runs = {
        ranks: run("distributed_checkpoint_cases", "farandole", ranks, tmp_path / str(ranks), CHECKPOINT=str(kept))
        for ranks in (3, 2, 1)
    }
    for name in ("saved", "saved_in_the_background"):
        for ranks, found in runs.items():
            for result in found:
                assert not isinstance(result[name], str), result[name]
                compare(result[name], runs[3][0][name], True)
            assert len(found) == ranks


@pytest.mark.slow
def test_the_optimizers_state_is_sharded(tmp_path: Path) -> None:
    for ranks in (2, 3):  # the second run continues from the checkpoint of the first
        command = [sys.executable, str(HERE / "torch_sharding_job.py"), str(tmp_path / "state")]
        environment = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        with local.start(command, ranks, env=environment) as job:
            assert job.wait(100) == 0, "\n".join(job.stderr(rank)[-3000:] for rank in range(ranks))


HOOK = """
import sys, torch, torch.distributed as dist, farandole.torch as hvd, farandole.torch.distributed
dist.init_process_group(sys.argv[1])
hvd.init()
half = [dist.new_group([0]), dist.new_group([1])][hvd.rank()]
for group, state in ((None, None), (None, hvd.global_process_set), (None, hvd.Hosts()), (half, hvd.Hosts(half))):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 4), process_group=group)
    model.register_comm_hook(state, hvd.ddp_hook)
    model(torch.full((2, 5), float(hvd.rank()))).sum().backward()
    assert torch.allclose(model.module.weight.grad, torch.ones(4, 5)), (state, model.module.weight.grad)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["gloo", "farandole"])
def test_hook_for_ddp(tmp_path: Path, backend: str) -> None:
    environment = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    with local.start([sys.executable, "-c", HOOK, backend], 2, env=environment) as job:
        assert job.wait(60) == 0, job.stderr(0) + job.stderr(1)


EXAMPLES = {"fsdp2": 2, "tensor_parallel": 2, "pipeline": 2, "hybrid": 4, "accelerate_digits": 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(tmp_path: Path, name: str) -> None:
    """Under the launcher, with the entry point as after `pip install`: no script imports farandole."""
    if name == "accelerate_digits":
        pytest.importorskip("accelerate", reason="accelerate is not installed")
    path = {"PYTHONPATH": f"{SOURCE}:{install(tmp_path)}", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "farandole", "run", "-np", str(EXAMPLES[name]), sys.executable]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / f"{name}.py")],
        env={**os.environ, **path, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("% of 297" if name == "accelerate_digits" else "loss") in done.stdout, done.stdout


@pytest.mark.slow
def test_pipeline_of_data_over_two_hosts(tmp_path: Path) -> None:
    job = [sys.executable, str(HERE / "distributed_hosts_job.py"), "pipeline_of_data_1f1b", "hsdp"]
    start = [sys.executable, "-m", "farandole", "run", "-np", "4", "-H", "host1:2,host2:2"]
    environment = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    with bed.hosts(2, ssh=True) as hosts:
        before = hosts[1].counters()
        done = hosts[0].run([*start, *job], cwd=bed.ROOT, env={**os.environ, **environment}, timeout=150)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        assert done.stdout.count("pipeline_of_data_1f1b is done") == 4, done.stdout
        assert done.stdout.count("hsdp is done") == 4, done.stdout
        assert (hosts[1].counters() - before).sent > 10_000
