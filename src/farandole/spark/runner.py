# `run` and `run_elastic`: a function in ranks on Spark, as Horovod's functions of these names.
# Touches executor.py alone.
"""Arguments are those of `horovod.spark.run` and `horovod.spark.run_elastic`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farandole.spark.executor import SparkExecutor


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Any = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Calls `fn(*args, **kwargs)` in `num_proc` Spark tasks that can all `init()`; what they return, by rank."""
    if use_mpi or extra_mpi_args:
        raise ValueError("run starts its ranks in Spark's tasks, without mpirun: leave use_mpi and extra_mpi_args out")
    with SparkExecutor(
        num_proc,
        start_timeout=start_timeout,
        env=env,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose,
        nics=nics,
        prefix_output_with_timestamp=prefix_output_with_timestamp,
        executable=executable,
    ) as executor:
        return executor.run(fn, args, kwargs)


def run_elastic() -> None:
    raise NotImplementedError
