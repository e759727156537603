# Backends: where the ranks of an estimator run.
# Touches Spark through farandole.spark.run.
"""`SparkBackend` runs them as tasks of Spark. Your own `Backend` may run them anywhere if they reach the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..session import active, default_parallelism

Arguments = Sequence[Any]
KeywordArguments = Mapping[str, Any] | None
Variables = Mapping[str, str] | None


def default_num_proc() -> int:
    """The default number of ranks: Spark's default parallelism."""
    return default_parallelism(active())


class Backend:
    """The interface that an estimator needs to run ranks."""

    def run(
        self, fn: Callable[..., Any], args: Arguments = (), kwargs: KeywordArguments = None, env: Variables = None
    ) -> list[Any]:
        """Calls the function in every rank. Returns the results, by rank."""
        raise NotImplementedError

    def num_processes(self) -> int:
        """The number of ranks."""
        raise NotImplementedError


class SparkBackend(Backend):
    """Runs ranks as tasks of Spark. `kwargs` are those of `farandole.spark.run`."""

    def __init__(self, num_proc: int | None = None, env: Variables = None, **kwargs: Any) -> None:
        self._num_proc = num_proc
        self._env = env
        self._kwargs = kwargs

    def run(
        self, fn: Callable[..., Any], args: Arguments = (), kwargs: KeywordArguments = None, env: Variables = None
    ) -> list[Any]:
        """Calls the function in every rank. Returns the results, by rank."""
        from .. import run

        variables = {**(self._env or {}), **(env or {})} or None
        number = self.num_processes()
        return list(run(fn, tuple(args), dict(kwargs or {}), num_proc=number, env=variables, **self._kwargs))

    def num_processes(self) -> int:
        """The given number, or Spark's default parallelism."""
        if self._num_proc is None:
            self._num_proc = default_num_proc()
        return self._num_proc
