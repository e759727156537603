# horovod.runner.common.util.settings and horovod.runner.elastic.settings: the settings of a job as plain objects.
# Touches nothing.
"""Programs make these objects and pass them to executors, or read their attributes."""

from __future__ import annotations

from typing import Any


class BaseSettings:
    """The settings of all kinds of jobs."""

    def __init__(
        self,
        num_proc: int | None = None,
        verbose: int = 0,
        ssh_port: int | None = None,
        ssh_identity_file: str | None = None,
        extra_mpi_args: str | None = None,
        tcp_flag: bool | None = None,
        binding_args: str | None = None,
        key: bytes | None = None,
        start_timeout: Any = None,
        output_filename: str | None = None,
        run_func_mode: bool | None = None,
        nics: set[str] | None = None,
        elastic: bool = False,
        prefix_output_with_timestamp: bool = False,
    ) -> None:
        """`start_timeout` is a Timeout; `key` is the secret."""
        self.num_proc = num_proc
        self.verbose = verbose
        self.ssh_port = ssh_port
        self.ssh_identity_file = ssh_identity_file
        self.extra_mpi_args = extra_mpi_args
        self.tcp_flag = tcp_flag
        self.binding_args = binding_args
        self.key = key
        self.start_timeout = start_timeout
        self.output_filename = output_filename
        self.run_func_mode = run_func_mode
        self.nics = nics
        self.elastic = elastic
        self.prefix_output_with_timestamp = prefix_output_with_timestamp


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
        self.min_num_proc = min_num_proc
        self.max_num_proc = max_num_proc
        self.elastic_timeout = elastic_timeout
        self.reset_limit = reset_limit
        self.cooldown_range = cooldown_range
        # Executors read these attributes too.
        self.timeout_s = self.start_timeout.remaining() if self.start_timeout is not None else 30
        self.placement_group_timeout_s = 100
