# What the tests of farandole.spark do in a driver: each case returns plain data that the test checks.
# Touches the Spark session it is given, and processes of its own ranks.
"""Functions for ranks are nested, so that cloudpickle sends their code to the ranks."""

from __future__ import annotations

import io
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import farandole.spark as hvd_spark
from farandole.base.errors import RankFailed


def place(add: float = 0.0, factor: float = 1.0) -> dict[str, Any]:
    import os as own_os
    import sys as own_sys

    import numpy as np

    import farandole as hvd
    from farandole.spark.task import get_available_devices

    hvd.init()
    total = hvd.allreduce(np.array([(hvd.rank() + 1.0) * factor + add]), op=hvd.Sum)[0]
    print(f"rank {hvd.rank()} is here", flush=True)
    print("and complains", file=own_sys.stderr, flush=True)
    found = {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local": [hvd.local_rank(), hvd.local_size()],
        "cross": [hvd.cross_rank(), hvd.cross_size()],
        "sum": float(total),
        "extra": own_os.environ.get("EXTRA"),
        "tunables": own_os.environ.get("GLIBC_TUNABLES"),
        "inherited": own_os.environ.get("NOT_INHERITED"),
        "gpus": own_os.environ.get("CUDA_VISIBLE_DEVICES"),
        "devices": get_available_devices(),
        "threads": own_os.environ.get("OMP_NUM_THREADS"),
        "secrets": [name for name in own_os.environ if "SECRET" in name and name != "FARANDOLE_SECRET_FD"],
        "pid": own_os.getpid(),
        "executor": own_os.environ["FARANDOLE_PRIVATE_DIRECTORY"],
    }
    hvd.shutdown()
    return found


def contract(spark: Any, count: int | None = None) -> dict[str, Any]:
    out, err = io.StringIO(), io.BytesIO()
    os.environ["NOT_INHERITED"] = "1"
    began = time.monotonic()
    env = {"EXTRA": "7", "GLIBC_TUNABLES": "glibc.rtld.nns=5"}
    found = hvd_spark.run(
        place, (1.0,), {"factor": 2.0}, num_proc=count, env=env, stdout=out, stderr=err, use_gloo=True
    )
    return {
        "run": found,
        "seconds": time.monotonic() - began,
        "out": out.getvalue(),
        "err": err.getvalue().decode(),
        "left": [one["pid"] for one in found if _runs(one["pid"])],
    }


def workers_that_stay(spark: Any) -> dict[str, Any]:
    def remember(value: int) -> int:
        import builtins

        builtins.kept = getattr(builtins, "kept", 0) + value  # type: ignore[attr-defined]
        return int(builtins.kept)  # type: ignore[attr-defined]

    out = io.StringIO()
    with hvd_spark.SparkExecutor(2, stdout=out, stderr=out, prefix_output_with_timestamp=True) as executor:
        found = {
            "run": executor.run(remember, (1,)),
            "again": executor.run(remember, (2,)),
            "single": executor.execute_single(remember, (3,)),
            "submit": executor.submit(remember, 1, 10).result(),
            "remote": [one.result() for one in executor.run_remote(remember, (4,))],
        }
        executor.run(lambda: print("hello", flush=True))
        found["error"] = _error(lambda: executor.run(lambda: 1 // 0))
        found["after"] = executor.run(remember, (0,))
        # One slot is left: a job that needs two waits in vain.
        found["busy"] = _error(lambda: hvd_spark.run(place, num_proc=2, start_timeout=2))
    found["out"] = out.getvalue()
    return found


def failing(spark: Any) -> dict[str, Any]:
    def raises() -> None:
        import numpy as np

        import farandole as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise ValueError("on purpose")
        hvd.allreduce(np.ones(4))

    quiet = io.StringIO()
    began = time.monotonic()
    found: dict[str, Any] = {}
    try:
        hvd_spark.run(raises, num_proc=2, stdout=quiet, stderr=quiet)
    except ValueError:
        found["error"] = traceback.format_exc()
    found["seconds"] = time.monotonic() - began

    executor = hvd_spark.SparkExecutor(2, stdout=quiet, stderr=quiet).start()
    pids = executor.run(os.getpid)
    waiting = executor.run_remote(lambda: time.sleep(600))  # sleep: until it is killed
    workers = {_spark_worker(pid) for pid in pids}
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    try:
        waiting[0].result(60)
    except RankFailed as error:
        found["killed"] = str(error)
    deadline = time.monotonic() + 30
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)  # sleep: between two looks
    found["left"] = [pid for pid in pids if _runs(pid)]
    executor.shutdown()
    found["works"] = spark.range(5).count()
    return found


def bad_input(spark: Any) -> dict[str, str | None]:
    run, elastic = hvd_spark.run, hvd_spark.run_elastic
    return {
        "slots": _error(lambda: run(place, num_proc=9)),
        "elastic slots": _error(lambda: elastic(place, num_proc=9)),
        "none": _error(lambda: run(place, num_proc=0)),
        "mpi": _error(lambda: run(place, num_proc=2, use_mpi=True)),
        "function": _error(lambda: run(5, num_proc=1)),  # type: ignore[arg-type]
        "nics": _error(lambda: run(place, num_proc=2, nics="nothing0")),
        "timeout": _error(lambda: run(place, num_proc=2, start_timeout=-1)),
        "least": _error(lambda: elastic(place, num_proc=2, min_num_proc=3)),
        "most": _error(lambda: elastic(place, num_proc=2, max_num_proc=1)),
    }


def elastic(spark: Any, scratch: str, least: int, most: int) -> list[int]:
    """elastic_counting.py in ranks on Spark; it tells its progress in files."""

    def train() -> int:
        import os as own_os
        import sys as own_sys

        own_os.environ["SCRATCH"] = scratch
        own_sys.argv = ["elastic_counting.py", "101", "2", "1"]
        import elastic_counting

        elastic_counting.main()
        return own_os.getpid()

    with open(Path(scratch) / "output", "w") as output:
        return hvd_spark.run_elastic(
            train, num_proc=most, min_num_proc=least, max_num_proc=most, stdout=output, stderr=output, start_timeout=60
        )


def _error(act: Callable[[], Any]) -> str | None:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _spark_worker(pid: int) -> int:
    """The process that Spark itself started, above this rank: rank -> agent -> guard -> Spark's worker."""
    for _ in range(3):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert b"pyspark.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return pid
