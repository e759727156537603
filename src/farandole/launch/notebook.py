# `notebook_launcher`: Accelerate's function of this name, with ranks of Farandole.
# Touches launch/executor.py; looks whether torch is loaded and has GPUs.
"""A cell of a notebook that calls Accelerate's `notebook_launcher` needs another import and nothing else."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from farandole.launch.executor import Executor
from farandole.launch.machine import usable_cores

PRECISIONS = ("no", "fp16", "bf16", "fp8")


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> list[Any]:
    """Calls `function(*args)` on `num_processes` ranks of this host, and returns the results, by rank. The arguments
    are those of Accelerate's function of this name.

    Without a number there is a rank for each GPU, or for each core where there is no GPU. After a failure the function
    is called again, at most `max_restarts` times. Ranks find each other, so what says where they meet has no effect.
    """
    if num_nodes != 1 or node_rank != 0:
        raise ValueError(
            f"num_nodes={num_nodes}, node_rank={node_rank}: one call starts the ranks of all hosts; "
            'use farandole.run(function, args, hosts="host1:2,host2:2", np=4)'
        )
    precision = str(mixed_precision).lower()
    if precision not in PRECISIONS:
        raise ValueError(f"mixed_precision={mixed_precision!r}: expected one of {', '.join(PRECISIONS)}")
    ranks = num_processes or _gpus() or usable_cores()
    variables = {"ACCELERATE_MIXED_PRECISION": precision}  # Accelerate reads it in the ranks
    for _ in range(max_restarts):
        with contextlib.suppress(Exception), Executor(ranks, env=variables) as executor:  # its ranks have printed why
            return executor.run(function, args)
    with Executor(ranks, env=variables) as executor:
        return executor.run(function, args)


def _gpus() -> int:
    """How many GPUs a torch that is already loaded has."""
    torch = sys.modules.get("torch")
    return int(torch.cuda.device_count()) if torch is not None else 0
