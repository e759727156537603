# What torch runs at the end of its own import: a name for torch.distributed's backend, and Lightning's import awaited.
# Touches torch.distributed's registries alone; what stands behind the names is loaded when a group is made.
"""The entry point of `torch.backends`: it never raises, and FARANDOLE_AUTOLOAD=0 switches all of it off."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

NAME = "farandole"


def register() -> None:
    """For the entry point."""
    if os.environ.get("FARANDOLE_AUTOLOAD", "1").strip().lower() in ("0", "false", "no", "off"):
        return
    try:
        announce()
        from .lightning import registration

        registration.watch()
    except Exception as error:
        warnings.warn(f"torch.distributed and Lightning do not know farandole: {error}", stacklevel=2)


def announce() -> None:
    """Registers the backend; again is once."""
    from torch import distributed as dist

    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    from .private import torch_names

    names: dict[str, Any] = {NAME: _create}
    if in_python := not hasattr(dist, "BackendBase"):  # torch puts no such group beside another: pairs have own names
        for far in ("nccl", "gloo"):
            pair = functools.partial(_create, far=far)
            names |= {f"cpu:{NAME},cuda:{far}": pair, f"cuda:{far},cpu:{NAME}": pair}
    for name, create in names.items():
        dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])
        if in_python:  # torch's recorder fails there; its own groups it records
            torch_names.leave_unrecorded(name)
    torch_names.answer_env_first(_meet)


def _meet(timeout: Any) -> Any:
    """Where torch's own variables are not set torch could only fail: there our launcher knows who is who."""
    if all(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")):
        return None
    from .torch.distributed import rendezvous

    return rendezvous.meet(timeout) if rendezvous.launched() else None


def _create(opts: Any, options: Any, far: str = "") -> Any:
    from .torch.distributed.backend import make

    return make(opts, options, far)
