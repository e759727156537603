# The program of a compute job: horovodrun -np 4 python -m horovod.tensorflow.data.compute_worker CONFIGFILE
# Touches compute_service, basics and broadcast_object; writes the file that the training job reads.
"""The ranks of this job serve data until the training job calls `config.compute_client().shutdown()`."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
from collections.abc import Iterator

# Absolute imports, because the program also runs under Horovod's name.
from farandole.operations.objects import broadcast_object
from farandole.tensorflow.data.compute_service import SIDES, ComputeService, TfDataServiceConfig, compute_worker_fn
from farandole.world import basics


@contextlib.contextmanager
def serving(
    size: int, dispatchers: int, dispatcher_side: str, configfile: str, timeout: float
) -> Iterator[TfDataServiceConfig]:
    """Runs the server where the `size` workers register, and writes `configfile`, with which others find the server."""
    key = secrets.token_bytes(32)
    service = ComputeService(key)
    try:
        workers_each = size // dispatchers
        config = TfDataServiceConfig(dispatchers, workers_each, dispatcher_side, service.addresses(), key, timeout)
        config.write(configfile)
        yield config
    finally:
        service.shutdown()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(configfile)


def check(dispatchers: int, size: int) -> None:
    """Raises SystemExit unless all dispatchers get the same number of workers."""
    if dispatchers < 1 or size % dispatchers:
        raise SystemExit(
            f"--dispatchers {dispatchers}: expected a number that divides the {size} processes of this job"
        )


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: float) -> None:
    """Runs a worker in each rank. Rank 0 also runs the server and writes `configfile`."""
    basics.init()
    rank, size = basics.rank(), basics.size()
    check(dispatchers, size)
    server = serving(size, dispatchers, dispatcher_side, configfile, timeout) if rank == 0 else contextlib.nullcontext()
    with server as config:
        compute_worker_fn(broadcast_object(config, 0, "compute_worker"))
    basics.shutdown()


def parser(description: str) -> argparse.ArgumentParser:
    """The command line options of a data service."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("configfile", metavar="CONFIGFILE", help="written here, and read by the training job")
    made.add_argument("--dispatchers", type=int, default=1, help="1, or one for each rank of the training job")
    made.add_argument("--dispatcher-side", choices=SIDES, default="compute", help="which job runs the dispatchers")
    made.add_argument("--timeout", type=float, default=60, help="seconds to wait for the others to come")
    return made


if __name__ == "__main__":
    options = parser("One worker of a data service; start as many as you like as one job.").parse_args()
    main(options.dispatchers, options.dispatcher_side, options.configfile, options.timeout)
