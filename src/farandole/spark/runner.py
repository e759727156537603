# `run` and `run_elastic` run a function in ranks on Spark, like Horovod's functions with these names.
# Touches only executor.py.
"""The arguments are those of `horovod.spark.run` and `horovod.spark.run_elastic`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farandole.base.config import SETTINGS, Config
from farandole.rendezvous.elastic.policy import Limits
from farandole.spark.executor import SparkExecutor


def run(
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None, start_timeout: float | None = None, use_mpi: bool | None = None,
    use_gloo: bool | None = None, extra_mpi_args: str | None = None, env: Mapping[str, str] | None = None,
    stdout: Any = None, stderr: Any = None, verbose: int = 1, nics: Any = None,
    prefix_output_with_timestamp: bool = False, executable: str | None = None,
) -> list[Any]:  # fmt: skip
    """Calls `fn(*args, **kwargs)` in `num_proc` Spark tasks that can all `init()`. Returns the results, by rank."""
    if use_mpi or extra_mpi_args:
        raise ValueError("run starts its ranks in Spark's tasks, without mpirun: leave use_mpi and extra_mpi_args out")
    with SparkExecutor(
        num_proc, start_timeout=start_timeout, env=env, stdout=stdout, stderr=stderr, verbose=verbose, nics=nics,
        prefix_output_with_timestamp=prefix_output_with_timestamp, executable=executable,
    ) as executor:  # fmt: skip
        return executor.run(fn, args, kwargs)


def run_elastic(
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None, min_num_proc: int | None = None, max_num_proc: int | None = None,
    start_timeout: float | None = None, elastic_timeout: float | None = None, reset_limit: int | None = None,
    env: Mapping[str, str] | None = None, stdout: Any = None, stderr: Any = None, verbose: int = 1, nics: Any = None,
    prefix_output_with_timestamp: bool = False, min_np: int | None = None, max_np: int | None = None,
) -> list[Any]:  # fmt: skip
    """Like `run`, in an elastic job whose ranks follow Spark's executors; `fn` uses the elastic API. It starts with
    `num_proc` ranks, needs at least `min_num_proc` and uses up to `max_num_proc` (None: all slots of Spark)."""
    SETTINGS["elastic_timeout"].check(elastic_timeout, "elastic_timeout")
    executor = SparkExecutor(
        num_proc, start_timeout=start_timeout, env=env, stdout=stdout, stderr=stderr, verbose=verbose, nics=nics,
        prefix_output_with_timestamp=prefix_output_with_timestamp,
    )  # fmt: skip
    count = executor.num_workers
    least = min_num_proc if min_np is None else min_np
    most = max_num_proc if max_np is None else max_np
    if least is not None and not 1 <= least <= count:
        raise ValueError(f"min_num_proc={least}: expected a number from 1 to num_proc, which is {count}")
    if most is not None and most < count:
        raise ValueError(f"max_num_proc={most}: expected at least num_proc, which is {count}")
    limits = Limits(
        count,
        count if least is None else least,
        most,
        reset_limit,
        None,
        float(Config.from_environment().elastic_timeout if elastic_timeout is None else elastic_timeout),
    )
    return executor.run_elastic(fn, args, kwargs, limits=limits)
