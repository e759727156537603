# Network interfaces of the nodes, with the names of Horovod's module.
# Touches nothing; the ranks find working addresses themselves.
"""Ray's own modules import these names. Ranks of Farandole try each other's addresses themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farandole.ray.settings import names_of


def detect_nics(
    settings: Any, all_host_names: Sequence[str] = (), node_workers: Sequence[Any] | None = None
) -> set[str]:
    """The interfaces of the settings. An empty set: the ranks choose."""
    return set(names_of(getattr(settings, "nics", None)))


def _driver_fn(*arguments: Any) -> set[str]:
    """In Horovod's module `driver_service` this finds the interfaces that all nodes have. Here it is `detect_nics`."""
    return next((detect_nics(one) for one in arguments if hasattr(one, "nics")), set())


def nics_to_env_var(nics: set[str] | None) -> dict[str, str]:
    """The interfaces as variables for us and for other libraries; empty when the ranks choose."""
    names = ",".join(names_of(nics))
    if not names:
        return {}
    return {
        "FARANDOLE_NETWORK_INTERFACES": names,
        "HOROVOD_GLOO_IFACE": names.split(",")[0],
        "NCCL_SOCKET_IFNAME": names,
    }
