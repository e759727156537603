# A rank of a job that runs cases on one backend of torch.distributed and keeps what came out.
# Touches torch.distributed as users see it.
"""`python distributed_job.py MODULE BACKEND FOLDER`: FOLDER/RANK has a dictionary of results by case.

With BASE behind it torch has a base class for backends as its next release documents it: the private one of today. That
needs TORCH_DEVICE_BACKEND_AUTOLOAD=0, since the backend is registered as torch then is. Names behind that are cases to
leave out.
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
    """That it raises is what both backends have in common."""
    try:
        call(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
        return "raises"
    return "does not raise"


def main(module: str, backend: str, folder: str, way: str = "", *omitted: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    modules = module.split(",")
    for one in modules:
        importlib.import_module(one)
    if way == "BASE":
        dist.BackendBase = dist._Backend  # type: ignore[attr-defined]
    if backend == "farandole":
        import farandole.torch.distributed  # noqa: F401
    chosen = {name: run for name, run in CASES.items() if run.__module__ in modules and name not in omitted}
    cases = dict(sorted(chosen.items(), key=lambda one: modules.index(one[1].__module__)))
    rank, size = int(os.environ["FARANDOLE_RANK"]), int(os.environ["FARANDOLE_SIZE"])
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    found: dict[str, Any] = {}
    for name, run in cases.items():
        try:
            found[name] = run(rank, size)
        except Exception:
            found[name] = traceback.format_exc()
        torch.save(found, f"{folder}/{rank}.part")
        dist.barrier()
    dist.destroy_process_group()
    os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}")


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    # One copy of this module, whoever imports it.
    importlib.import_module("distributed_job").main(*sys.argv[1:])
