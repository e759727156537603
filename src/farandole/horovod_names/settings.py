# horovod.runner.common.util.settings and horovod.runner.elastic.settings: the settings of a job as plain objects.
# Touches nothing.
"""Programs make these objects and pass them to executors, or read their attributes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(eq=False, repr=False)
class BaseSettings:
    """The settings of all kinds of jobs."""

    num_proc: int | None = None
    verbose: int = 0
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    extra_mpi_args: str | None = None
    tcp_flag: bool | None = None
    binding_args: str | None = None
    key: bytes | None = None  # the secret
    start_timeout: Any = None  # a Timeout
    output_filename: str | None = None
    run_func_mode: bool | None = None
    nics: set[str] | None = None
    elastic: bool = False
    prefix_output_with_timestamp: bool = False


class Settings(BaseSettings):
    """The settings of a job with fixed hosts: "host:slots,host:slots"."""

    def __init__(self, hosts: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hosts = hosts


class ElasticSettings(BaseSettings):
    """The settings of an elastic job, whose hosts come from `discovery`."""

    def __init__(
        self,
        discovery: Any,
        min_num_proc: int,
        max_num_proc: int | None,
        elastic_timeout: float,
        reset_limit: int | None,
        cooldown_range: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(elastic=True, **kwargs)
        self.discovery = discovery
        self.min_num_proc, self.max_num_proc = min_num_proc, max_num_proc
        self.elastic_timeout = elastic_timeout
        self.reset_limit = reset_limit
        self.cooldown_range = cooldown_range
        # Executors read these attributes too.
        self.timeout_s = self.start_timeout.remaining() if self.start_timeout is not None else 30
        self.placement_group_timeout_s = 100
