# The program of a compute job: horovodrun -np 4 python -m horovod.tensorflow.data.compute_worker CONFIGFILE
# Touches compute_service and runtime; writes the file that the training job reads.
"""Serves data until the training job asks for the end (`config.compute_client().shutdown()`)."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
from collections.abc import Sequence

# By their full names: the program runs under Horovod's name as well.
from farandole import runtime
from farandole.objects import broadcast_object
from farandole.ops import barrier
from farandole.tensorflow.data.compute_service import SIDES, ComputeService, TfDataServiceConfig, compute_worker_fn


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: float) -> None:
    """Runs a worker in each rank; rank 0 holds the service and writes the file."""
    runtime.init()
    rank, size = runtime.rank(), runtime.size()
    if dispatchers < 1 or size % dispatchers:
        raise SystemExit(
            f"--dispatchers {dispatchers}: expected a number that divides the {size} processes of this job"
        )
    key = secrets.token_bytes(32)
    service = ComputeService(key) if rank == 0 else None
    try:
        config = None
        if service is not None:
            config = TfDataServiceConfig(
                dispatchers, size // dispatchers, dispatcher_side, service.addresses(), key, timeout
            )
            config.write(configfile)
        compute_worker_fn(broadcast_object(config, 0, "compute_worker"))
        barrier()  # all have heard it before the service ends
    finally:
        if service is not None:
            service.shutdown()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(configfile)
    runtime.shutdown()


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="One worker of a data service; start as many as you like as one job.")
    parser.add_argument("configfile", metavar="CONFIGFILE", help="written here, and read by the training job")
    parser.add_argument("--dispatchers", type=int, default=1, help="1, or one for each rank of the training job")
    parser.add_argument("--dispatcher-side", choices=SIDES, default="compute", help="which job runs the dispatchers")
    parser.add_argument("--timeout", type=float, default=60, help="seconds to wait for the others to come")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    asked = parsed()
    main(asked.dispatchers, asked.dispatcher_side, asked.configfile, asked.timeout)
