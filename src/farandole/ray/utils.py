# Interfaces of the nodes, by the names of Horovod's module.
# Touches nothing; the ranks find out by which of their addresses they reach each other.
"""What Ray's own modules import; Farandole's ranks try each other's addresses themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farandole.ray.settings import names_of


def detect_nics(settings: Any, all_host_names: Sequence[str] = (), node_workers: Sequence[Any] = ()) -> set[str]:
    """Those that the settings name; an empty set leaves it to the ranks."""
    return set(names_of(getattr(settings, "nics", None)))


def nics_to_env_var(nics: set[str] | None) -> dict[str, str]:
    """As variables, ours and those of others; none when the ranks shall find out."""
    names = ",".join(names_of(nics))
    if not names:
        return {}
    return {
        "FARANDOLE_NETWORK_INTERFACES": names,
        "HOROVOD_GLOO_IFACE": names.split(",")[0],
        "NCCL_SOCKET_IFNAME": names,
    }
