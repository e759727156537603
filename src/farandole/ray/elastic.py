# Elastic jobs on Ray with Horovod's names: the discovery classes, the adapter and the older executor.
# Touches elastic_adapter and runner.
"""New scripts use `RayExecutor(min_workers=...)`. `ElasticRayExecutor` is for older scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farandole.ray.elastic_adapter import ElasticAdapter as ElasticAdapter  # Horovod has these four names here
from farandole.ray.elastic_adapter import ElasticParams as ElasticParams
from farandole.ray.elastic_adapter import RayHostDiscovery as RayHostDiscovery
from farandole.ray.elastic_adapter import TestDiscovery as TestDiscovery
from farandole.ray.runner import RayExecutor
from farandole.ray.settings import MiniSettings


class ElasticRayExecutor:
    """The older executor, which `RayExecutor(min_workers=...)` has replaced."""

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: set[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> MiniSettings:
        """`min_num_proc` and `max_num_proc`: the least and largest number of workers. **kwargs: more settings."""
        return MiniSettings(
            elastic=True,
            min_num_proc=min_num_proc if min_np is None else min_np,
            max_num_proc=max_num_proc if max_np is None else max_np,
            reset_limit=reset_limit,
            elastic_timeout=elastic_timeout,
            timeout_s=timeout_s,
            ssh_identity_file=ssh_identity_file,
            nics=nics,
            **kwargs,
        )

    def __init__(
        self,
        settings: Any,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float | None = None,
        env_vars: Mapping[str, Any] | None = None,
        override_discovery: bool = True,
    ) -> None:
        if gpus_per_slot is not None and gpus_per_slot < 1:
            raise ValueError(f"gpus_per_slot must be >= 1: Got {gpus_per_slot}.")
        self._env_vars = dict(env_vars or {})
        self._executor = RayExecutor(
            settings, min_workers=settings.min_num_proc or 1, max_workers=settings.max_num_proc,
            reset_limit=settings.reset_limit, cooldown_range=settings.cooldown_range,
            elastic_timeout=settings.elastic_timeout, cpus_per_worker=cpus_per_slot, use_gpu=use_gpu,
            gpus_per_worker=gpus_per_slot, override_discovery=override_discovery,
        )  # fmt: skip

    def start(self) -> None:
        """Call it before `run`."""
        self._executor.start(extra_env_vars=self._env_vars)

    def run(self, worker_fn: Callable[[], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None) -> list[Any]:
        """Calls `worker_fn()` on every worker. Returns the results, by rank."""
        return self._executor.run(worker_fn, callbacks=callbacks)

    def shutdown(self) -> None:
        """Ends the job that runs."""
        self._executor.shutdown()
