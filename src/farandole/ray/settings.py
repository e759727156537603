# The settings of executors on Ray, with Horovod's names.
# Touches the file of an ssh key, if the user gives the text of the key.
"""`RayExecutor.create_settings` returns `MiniSettings`. Any object with these attributes can be used."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from farandole.bindings.compat import Timeout, make_secret_key


@dataclass
class MiniSettings:
    """Time limits and network interfaces. The ssh settings have no effect: Ray starts the workers."""

    nics: set[str] | None = None
    verbose: int = 1
    key: Any = field(default_factory=make_secret_key, repr=False)
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    timeout_s: float = 300
    placement_group_timeout_s: float = 100
    elastic: bool = False
    # For elastic jobs.
    min_num_proc: int | None = None
    max_num_proc: int | None = None
    reset_limit: int | None = None
    cooldown_range: tuple[int, int] | None = None
    elastic_timeout: float = 600
    discovery: Any = None

    @property
    def start_timeout(self) -> Timeout:
        """A timeout that starts now."""
        return Timeout(self.timeout_s)


def write_key(ssh_identity_file: str | None, ssh_str: str | None) -> None:
    """Writes the text of a key to its file, unless the file exists."""
    if ssh_str and ssh_identity_file and not os.path.exists(ssh_identity_file):
        with os.fdopen(os.open(ssh_identity_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(ssh_str)


def names_of(nics: Iterable[str] | None) -> tuple[str, ...]:
    """The interfaces, sorted, so that the order is the same on all hosts."""
    return tuple(sorted(nics or ()))
