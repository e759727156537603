# Measures collectives on CUDA tensors and deaths during them, on a machine with a GPU; ranks may share one GPU.
# Touches farandole and torch as users see them, processes, and MPS if it is installed.
"""`python bench/gpu.py`: prints a table, and writes it to bench/results/NAME.json, where NAME is that of the GPU."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
MANY = 1000  # tensors of 4 KiB
KILLS_AT_ONCE = 4
TWO_HOSTS = "localhost:1,127.0.0.1:1"  # the same one under two names
# NCCL takes ranks that share a GPU for ranks of two hosts; it must not look for a nearer way then.
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


# --- in each rank ----------------------------------------------------------------------------------------------------


def timed(act: Callable[[], object], meet: Callable[[], object], size: int = 0) -> float:
    """Seconds of one call: the median of repeats."""
    for _ in range(3):
        act()
    found = []
    for _ in range(5):
        calls = 5 if size >= 64 * MIB else 50 if size else 1
        torch.cuda.synchronize()
        meet()
        began = time.perf_counter()
        for _ in range(calls):
            act()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - began) / calls)
    return statistics.median(found)


def measure_farandole() -> dict[str, Any]:
    import farandole.torch as hvd
    from farandole.world.runtime import runtime

    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    rank, engine = hvd.rank(), runtime.world.engine
    torch.ones(1, device="cuda").add_(1)
    began = time.perf_counter()
    hvd.allreduce(torch.ones(1000, device="cuda"), op=hvd.Sum)
    found: dict[str, Any] = {"first_use_ms": 1e3 * (time.perf_counter() - began)}
    generator = torch.Generator().manual_seed(rank)
    for kind in (torch.float32, torch.bfloat16):
        mine = torch.randn(100_003, generator=generator).to(kind)
        same = torch.equal(hvd.allreduce(mine, op=hvd.Sum), hvd.allreduce(mine.cuda(), op=hvd.Sum).cpu())
        assert same, f"{kind}: the GPU has other bits than the CPU"
        for size in SIZES:
            tensor = torch.randn(size // kind.itemsize, device="cuda").to(kind)
            act = lambda tensor=tensor, name=f"{kind} {size}": hvd.allreduce_(tensor, op=hvd.Average, name=name)  # noqa: E731
            found[f"{str(kind).removeprefix('torch.')} {size // KIB} KiB us"] = 1e6 * timed(act, hvd.barrier, size)
    many = [torch.ones(1024, device="cuda") for _ in range(MANY)]

    def queued() -> None:
        for handle in [hvd.allreduce_async_(one, op=hvd.Average, name=f"q{at}") for at, one in enumerate(many)]:
            hvd.synchronize(handle)

    found["4 KiB queued us"] = 1e6 * timed(queued, hvd.barrier) / MANY
    grouped = lambda: hvd.grouped_allreduce_(many, op=hvd.Average, name="grouped")  # noqa: E731
    found["1000 x 4 KiB grouped us"] = 1e6 * timed(grouped, hvd.barrier)
    found["bytes on the GPU"] = engine.counter("on_device_bytes")
    found["collectives"] = engine.counter("collectives")
    hvd.shutdown()
    return found


def measure_gloo() -> dict[str, Any]:
    import torch.distributed as dist

    import farandole.torch as hvd

    hvd.init()
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['MEETING']}", rank=hvd.rank(), world_size=hvd.size()
    )
    found = {}
    for size in (MIB, 256 * MIB):
        tensor = torch.ones(size // 4, device="cuda")
        found[f"float32 {size // KIB} KiB us"] = 1e6 * timed(partial(dist.all_reduce, tensor), hvd.barrier, 64 * MIB)
    dist.destroy_process_group()
    hvd.shutdown()
    return found


def check_nccl(hvd: Any, rank: int) -> int:
    """Every operation and type by NCCL against the same on the CPU; how many were compared."""
    generator, compared = torch.Generator().manual_seed(rank), 0
    kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
    for kind, op in product((*kinds, torch.int8, torch.bool), (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product)):
        close: dict[str, Any] = {"rtol": 0.02, "atol": 0.02} if kind.itemsize == 2 else {}
        mine = (4 * torch.rand(10_001, generator=generator)).to(kind)
        if kind is torch.bool and op is hvd.Average:
            continue  # there is none
        for before, after in ((1.0, 1.0), (0.5, 2.0)):
            scales: dict[str, Any] = {"prescale_factor": before, "postscale_factor": after}
            given = hvd.allreduce(mine.cuda(), op=op, **scales).cpu()
            torch.testing.assert_close(given, hvd.allreduce(mine, op=op, **scales), **close)
        several = [mine[:1], mine[:777], mine]
        for one, other in zip(
            hvd.grouped_allreduce([part.cuda() for part in several], op=op),
            hvd.grouped_allreduce(several, op=op),
            strict=True,
        ):
            torch.testing.assert_close(one.cpu(), other, **close)
        compared += 5
        rows = mine[:9999].reshape(-1, 3)
        if op in (hvd.Sum, hvd.Average):
            torch.testing.assert_close(
                hvd.reducescatter(rows.cuda(), op=op).cpu(), hvd.reducescatter(rows, op=op), **close
            )
        if op is not hvd.Sum:
            continue
        for uneven in (0, rank):
            part = rows[: 100 + uneven]
            assert torch.equal(hvd.allgather(part.cuda()).cpu(), hvd.allgather(part))
        splits = torch.tensor([3 + 2 * rank, 7])
        part = rows[: int(splits.sum())]
        here, there = hvd.alltoall(part.cuda(), splits), hvd.alltoall(part, splits)
        assert torch.equal(here[0].cpu(), there[0]) and torch.equal(here[1].cpu(), there[1])
        assert torch.equal(hvd.broadcast(mine.cuda(), 1).cpu(), hvd.broadcast(mine, 1))
        compared += 4
    return compared


def measure_nccl() -> dict[str, Any]:
    """Two ranks that look like two hosts, so that NCCL connects them by sockets, also where they share a GPU."""
    os.environ["NCCL_HOSTID"] = os.environ["HOROVOD_RANK"]
    import torch.distributed as dist

    import farandole.torch as hvd
    from farandole import autoload
    from farandole.world.runtime import runtime

    autoload.register()  # a checkout has no entry points
    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    rank, engine = hvd.rank(), runtime.world.engine
    began = time.perf_counter()
    hvd.allreduce(torch.ones(1000, device="cuda"), op=hvd.Sum)
    found: dict[str, Any] = {"first_use_ms": 1e3 * (time.perf_counter() - began)}
    assert engine.counter("nccl_bytes") == 4000, "NCCL was not used"
    found["compared with the CPU"] = check_nccl(hvd, rank)
    assert engine.counter("on_device_bytes") == 0
    dist.init_process_group("nccl", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=hvd.size())
    for size in (4 * KIB, MIB, 16 * MIB, 64 * MIB):
        tensor = torch.ones(size // 4, device="cuda")
        name = f"float32 {size // KIB} KiB us"

        def raw(tensor: torch.Tensor = tensor) -> None:
            dist.all_reduce(tensor)
            torch.cuda.synchronize()

        act = lambda tensor=tensor, name=name: hvd.allreduce_(tensor, op=hvd.Sum, name=name)  # noqa: E731
        found[name], found[f"{name} (raw NCCL)"] = (
            1e6 * timed(act, hvd.barrier, size),
            1e6 * timed(raw, hvd.barrier, size),
        )
    many = [torch.ones(1024, device="cuda") for _ in range(MANY)]
    grouped = lambda: hvd.grouped_allreduce_(many, op=hvd.Average, name="grouped")  # noqa: E731
    found["1000 x 4 KiB grouped us"] = 1e6 * timed(grouped, hvd.barrier)
    dist.destroy_process_group()
    before = engine.counter("nccl_bytes")
    dist.init_process_group("farandole", init_method=f"file://{os.environ['MEETING']}2", rank=rank, world_size=2)
    for group in (None, dist.new_group([0, 1])):
        tensor = torch.full((1000,), rank + 1.0, device="cuda")
        dist.all_reduce(tensor, group=group)
        assert tensor.eq(3).all(), "a group of torch.distributed"
    assert engine.counter("nccl_bytes") == before + 8000, "a group of torch.distributed did not use NCCL"
    dist.destroy_process_group()
    began = time.perf_counter()
    hvd.shutdown()
    found["shutdown ms"] = 1e3 * (time.perf_counter() - began)
    return found


class Block(torch.nn.Module):
    """A transformer's block without attention: its parameters and most of its arithmetic."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = values + self.down(torch.nn.functional.gelu(self.up(self.norm(values))))
        return output


def measure_training() -> dict[str, Any]:
    """Steps of 100 million parameters with AMP: alone, with DistributedOptimizer, and with DDP on our backend."""
    import torch.distributed as dist

    import farandole.torch as hvd
    from farandole import autoload

    autoload.register()  # a checkout has no entry points
    hvd.init()
    found = {}
    batch = torch.randn(4096, 1024, device="cuda")
    for way in ("without communication", "DistributedOptimizer", "DDP on farandole", "DDP on gloo"):
        torch.manual_seed(1)
        model: Any = torch.nn.Sequential(*(Block(1024) for _ in range(12))).cuda()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-6)
        if way == "DistributedOptimizer":
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        if way.startswith("DDP"):
            backend = way.split()[-1]
            meeting = f"file://{os.environ['MEETING']}-{backend}"
            dist.init_process_group(backend, init_method=meeting, rank=hvd.rank(), world_size=hvd.size())
            model = torch.nn.parallel.DistributedDataParallel(model)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            torch.cuda.synchronize()

        found[f"{way} ms"] = 1e3 * timed(step, hvd.barrier)
        if dist.is_initialized():
            dist.destroy_process_group()
    hvd.shutdown()
    return found


def be_killed(number: int, record: Path) -> None:
    """The last rank kills itself among allreduces; the others tell how long they needed to notice."""
    import farandole.torch as hvd

    hvd.init()
    rank, last = hvd.rank(), hvd.size() - 1
    os.environ["NCCL_HOSTID"] = str(rank)
    tensor = torch.ones(4 * MIB, device="cuda")
    hvd.allreduce_(tensor, name="first")
    end = time.monotonic() + random.Random(number).uniform(0.05, 0.5)
    died = record.with_suffix(".died")
    try:
        while True:
            if rank == last and time.monotonic() > end:
                if number % 2:  # in the middle of one
                    hvd.allreduce_async_(tensor, name="tensor")
                died.write_text(repr(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce_(tensor, name="tensor")
    except hvd.PeerLost:
        noticed = 1e3 * (time.monotonic() - float(died.read_text()))
    assert torch.ones(1000, device="cuda").sum().item() == 1000  # the context is as it was
    record.with_name(f"{record.name}.{rank}").write_text(repr(noticed))
    os._exit(0)


def run_rank(what: str, record: Path) -> None:
    kind, _, number = what.partition("-")
    if kind == "kill":
        be_killed(int(number), record)
    acts = {"farandole": measure_farandole, "gloo": measure_gloo, "training": measure_training, "nccl": measure_nccl}
    found = acts[kind]()
    if os.environ["HOROVOD_RANK"] == "0":
        record.write_text(json.dumps(found))


# --- above the ranks -------------------------------------------------------------------------------------------------


class Machine:
    """Starts ranks; keeps what they have recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = 0
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "FARANDOLE_CACHE_DIRECTORY": str(folder / "cache"),
        }

    def start(self, what: str, ranks: int, hosts: str = "") -> tuple[subprocess.Popen[str], Path]:
        """`hosts`: as of the launcher; "": this one."""
        self.number += 1
        record = self.folder / f"record{self.number}"
        launch = [sys.executable, "-m", "farandole", "run", "-np", str(ranks), *(["-H", hosts] if hosts else [])]
        rank = [sys.executable, str(HERE), "--rank", what, "--record", str(record)]
        environment = {**self.environment, "MEETING": str(self.folder / f"meeting{self.number}")}
        process = subprocess.Popen(
            [*launch, *rank],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return process, record

    def run(self, what: str, ranks: int, hosts: str = "") -> dict[str, Any]:
        process, record = self.start(what, ranks, hosts)
        output, _ = process.communicate(timeout=200)
        if process.returncode != 0:
            raise SystemExit(f"{what} with {ranks} ranks failed:\n{output[-4000:]}")
        found: dict[str, Any] = json.loads(record.read_text())
        return found

    def kill(self, times: int, ranks: int = 3, hosts: str = "") -> dict[str, Any]:
        """Jobs of which one rank is killed; those of one batch run at the same time."""
        noticed: list[float] = []
        survived = 0
        for first in range(0, times, KILLS_AT_ONCE):
            batch = range(first, min(times, first + KILLS_AT_ONCE))
            jobs = [self.start(f"kill-{number}", ranks, hosts) for number in batch]
            for process, record in jobs:
                try:
                    process.communicate(timeout=100)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.communicate()
                told = [float(path.read_text()) for path in self.folder.glob(f"{record.name}.[0-9]")]
                survived += len(told) == ranks - 1
                noticed += told
        return {"kills": times, "survived": survived, "ms until PeerLost": sorted(round(one, 1) for one in noticed)}


class Mps:
    """MPS while the block runs."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.folders = {f"CUDA_MPS_{kind}_DIRECTORY": str(machine.folder / kind.lower()) for kind in ("PIPE", "LOG")}

    def __enter__(self) -> None:
        for folder in self.folders.values():
            Path(folder).mkdir()
        self.machine.environment |= self.folders
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=self.machine.environment, check=True)

    def __exit__(self, *error: object) -> None:
        subprocess.run(
            ["nvidia-cuda-mps-control"], env=self.machine.environment, input="quit\n", text=True, check=False
        )
        for name in self.folders:
            del self.machine.environment[name]


def table(found: dict[str, Any]) -> str:
    lines = []
    for name, values in found.items():
        if not isinstance(values, dict):
            lines.append(f"{name}: {values}")
            continue
        lines.append(name)
        for key, value in values.items():
            text = f"{value:.1f}" if isinstance(value, float) else str(value)
            if isinstance(value, float) and key.endswith("KiB us") and "x" not in key:
                text += f"  {int(key.split()[1]) * KIB / value / 1e3:.1f} GB/s"
            lines.append(f"  {key:<28} {text}")
    return "\n".join(lines)


def facts(command: str) -> dict[str, Any]:
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "command": command,
        "gpus": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        "driver": driver.stdout.split("\n")[0],
        "torch": torch.__version__,
        "processors": f"{len(os.sched_getaffinity(0))} of {platform.machine()}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    chosen = parser.parse_args()
    if chosen.rank:
        run_rank(chosen.rank, chosen.record)
        return
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU that torch can use")
    found = facts("make gpu")
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder))
        for ranks in chosen.ranks:
            found[f"{ranks} ranks"] = machine.run("farandole", ranks)
        found["2 ranks, Gloo"] = machine.run("gloo", 2)
        found["training, 2 ranks"] = machine.run("training", 2)
        machine.environment |= SOCKETS
        found["2 ranks, NCCL by sockets"] = machine.run("nccl", 2, TWO_HOSTS)
        found["a killed rank of 2, NCCL by sockets"] = machine.kill(chosen.kills, 2, TWO_HOSTS)
        for name in SOCKETS:
            del machine.environment[name]
        found["a killed rank of 3"] = machine.kill(chosen.kills)
        if shutil.which("nvidia-cuda-mps-control"):
            with Mps(machine):
                for ranks in chosen.ranks:
                    found[f"{ranks} ranks, MPS"] = machine.run("farandole", ranks)
                found["training, 2 ranks, MPS"] = machine.run("training", 2)
    print(table(found))
    path = ROOT / "bench" / "results" / f"{torch.cuda.get_device_name().split()[-1].lower()}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
