# A rank of a job that runs cases on one backend of torch.distributed and saves their results.
# Touches torch.distributed as users see it.
"""`python distributed_job.py MODULE BACKEND FOLDER`: writes FOLDER/RANK, a dictionary from case to result.

A fourth argument BASE gives torch the name `BackendBase` of its next release, for the private base class of today. This
needs TORCH_DEVICE_BACKEND_AUTOLOAD=0: otherwise the import of torch registers our backend before the name exists.
Further arguments are names of cases to leave out.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

CASES: dict[str, Callable[[int, int], Any]] = {}
CLOSE: set[str] = set()  # cases whose floating sums may differ in the last bits


def case(function: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    CASES[function.__name__] = function
    return function


def close(function: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    CLOSE.add(function.__name__)
    return case(function)


def raises(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Whether a call raises. Backends may raise different exceptions for the same mistake."""
    try:
        call(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
        return "raises"
    return "does not raise"


def main(module: str, backend: str, folder: str, way: str = "", *omitted: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    modules = module.split(",")
    for name in modules:
        importlib.import_module(name)
    if way == "BASE":
        dist.BackendBase = dist._Backend  # type: ignore[attr-defined]
    if backend == "farandole":
        import farandole.torch.distributed  # noqa: F401
    chosen = {name: run for name, run in CASES.items() if run.__module__ in modules and name not in omitted}
    cases = dict(sorted(chosen.items(), key=lambda item: modules.index(item[1].__module__)))
    rank, size = int(os.environ["FARANDOLE_RANK"]), int(os.environ["FARANDOLE_SIZE"])
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    results: dict[str, Any] = {}
    for name, run in cases.items():
        try:
            results[name] = run(rank, size)
        except Exception:
            results[name] = traceback.format_exc()
        torch.save(results, f"{folder}/{rank}.part")
        dist.barrier()
    dist.destroy_process_group()
    os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}")


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    # The cases register themselves in the module `distributed_job`, which is not `__main__`.
    importlib.import_module("distributed_job").main(*sys.argv[1:])
