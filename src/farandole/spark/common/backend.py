# Backends: where the ranks of an estimator run.
# Touches Spark through farandole.spark.run.
"""`SparkBackend` runs them as tasks of Spark; a `Backend` of your own may run them anywhere that reaches the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..session import active, default_parallelism


class Backend:
    """What an estimator asks of a place to run."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Calls the function in every rank; what they return, by rank."""
        raise NotImplementedError

    def num_processes(self) -> int:
        """How many ranks there will be."""
        raise NotImplementedError


class SparkBackend(Backend):
    """Ranks are tasks of Spark; `kwargs` are those of `farandole.spark.run`."""

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        self._num_proc = num_proc
        self._env = env
        self._kwargs = kwargs

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Calls the function in every rank; what they return, by rank."""
        from .. import run

        variables = {**(self._env or {}), **(env or {})} or None
        number = self.num_processes()
        return list(run(fn, tuple(args), dict(kwargs or {}), num_proc=number, env=variables, **self._kwargs))

    def num_processes(self) -> int:
        """As many as were asked for, or Spark's default parallelism."""
        if self._num_proc is None:
            self._num_proc = default_parallelism(active())
        return self._num_proc
