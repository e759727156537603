"""What runs in each rank of a measurement: ours, Gloo and memcpy in turn, in the same process and the same minute.
Uses the public interface of the package; torch only when it is installed; rank 0 writes a JSON file."""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import farandole

Array = npt.NDArray[np.float32]
Action = Callable[[], object]


def rounds(size: int) -> int:
    """How many operations one timing covers: enough for the clock, few enough for the patience."""
    return max(1, min(100, (4 << 20) // max(size, 1)))


def timed(action: Action, count: int) -> float:
    """Seconds per call; all ranks start together."""
    farandole.barrier()
    began = time.perf_counter()
    for _ in range(count):
        action()
    return (time.perf_counter() - began) / count


def data(count: int, rank: int) -> Array:
    """This rank's random numbers; small, so that sums of sums stay finite."""
    numbers = np.random.default_rng(rank + 1).random(count, dtype=np.float32)
    numbers -= np.float32(0.5)
    numbers *= np.float32(1e-10)
    return numbers


def gloo(folder: Path) -> Any | None:
    """torch.distributed over Gloo between these very processes, or None without torch."""
    try:
        import torch
        import torch.distributed as distributed
    except ImportError:
        return None
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'gloo'}", rank=farandole.rank(), world_size=farandole.size()
    )
    return torch


def actions(mine: Array, torch: Any | None) -> dict[str, dict[str, Action]]:
    """What is timed. reused: in place in memory that is warm; fresh: from an input into new memory."""
    target = np.empty_like(mine)
    ours = mine.copy()
    found: dict[str, dict[str, Action]] = {
        "reused": {"farandole": lambda: farandole.allreduce_(ours, op=farandole.Sum, name="reused")},
        "fresh": {"farandole": lambda: farandole.allreduce(mine, op=farandole.Sum, name="fresh")},
    }
    if torch is not None:
        reduce = torch.distributed.all_reduce
        theirs = torch.from_numpy(mine.copy())
        source = torch.from_numpy(mine)
        found["reused"]["gloo"] = lambda: reduce(theirs)
        found["fresh"]["gloo"] = lambda: reduce(source.clone())
    found["reused"]["memcpy"] = lambda: np.copyto(target, mine)
    found["fresh"]["memcpy"] = lambda: mine.copy()
    return found


def verify(mine: Array, torch: Any | None) -> None:
    """Both libraries give what NumPy gives."""
    size = farandole.size()
    expected = np.sum([data(mine.size, rank).astype(np.float64) for rank in range(size)], axis=0)
    results = {"farandole": farandole.allreduce(mine, op=farandole.Sum, name="verify")}
    if torch is not None:
        theirs = torch.from_numpy(mine.copy())
        torch.distributed.all_reduce(theirs)
        results["gloo"] = theirs.numpy()
    for name, result in results.items():
        if not np.allclose(result, expected, rtol=1e-5, atol=1e-16):
            raise AssertionError(f"{name}: wrong sum of {mine.nbytes} bytes on rank {farandole.rank()}")


def measure(size: int, repeats: int, torch: Any | None) -> dict[str, Any]:
    """All timings of one size; every repeat runs ours, then each peer, so that a busy moment hits all of them."""
    mine = data(max(1, size // 4), farandole.rank())
    verify(mine, torch)
    result: dict[str, Any] = {"bytes": mine.nbytes}
    for kind, candidates in actions(mine, torch).items():
        count = rounds(mine.nbytes)
        for action in candidates.values():
            timed(action, min(count, 10))  # warm: pages, plans, connections
        times: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(repeats):
            for name, action in candidates.items():
                times[name].append(timed(action, count))
        # An operation has ended when the slowest rank has its result.
        names = list(times)
        slowest = farandole.allreduce(np.array([times[name] for name in names]), op=farandole.Max, name="slowest")
        result[kind] = {name: [float(value) for value in slowest[number]] for number, name in enumerate(names)}
    return result


def allreduce(options: argparse.Namespace) -> dict[str, Any]:
    """Every size."""
    torch = gloo(options.folder)
    results = []
    for size in json.loads(options.sizes):
        results.append(measure(size, options.repeats, torch))
        if farandole.rank() == 0:
            print(f"  measured {results[-1]['bytes']} bytes", flush=True)
    if torch is not None:
        torch.distributed.destroy_process_group()
    return {"ranks": farandole.size(), "repeats": options.repeats, "results": results}


def idle(options: argparse.Namespace) -> dict[str, Any]:
    """What a rank costs that has nothing to do: CPU time and context switches of all its threads."""
    for _ in range(3):
        farandole.allreduce(np.ones(1000, dtype=np.float32), op=farandole.Sum, name="before")
    time.sleep(0.5)
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    time.sleep(options.seconds)
    after, seconds = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - began
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    switches = after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw
    mine = np.array([[100 * cpu / seconds, switches / seconds]])
    every = farandole.allgather(mine, name="idle")
    return {
        "ranks": farandole.size(),
        "seconds": seconds,
        "cpu_percent": [float(value) for value in every[:, 0]],
        "switches_per_s": [float(value) for value in every[:, 1]],
    }


def main() -> None:
    """Runs one measurement in this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["allreduce", "idle"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--sizes", default="[]")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    farandole.init()
    result = allreduce(options) if options.what == "allreduce" else idle(options)
    if farandole.rank() == 0:
        (options.folder / "result.json").write_text(json.dumps(result))
    farandole.shutdown()


if __name__ == "__main__":
    main()
