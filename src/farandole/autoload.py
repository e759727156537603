# What torch runs at the end of its own import: the backend `farandole` becomes known, and nothing else is loaded.
# Touches torch.distributed's registry alone; the backend itself is loaded when a group is made.
"""The entry point of `torch.backends`: it never raises, and FARANDOLE_AUTOLOAD=0 switches it off."""

from __future__ import annotations

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
    except Exception as error:
        warnings.warn(f"farandole cannot be used as a backend of torch.distributed: {error}", stacklevel=2)


def announce() -> None:
    """Registers the backend; again is once."""
    from torch import distributed as dist

    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(opts: Any, options: Any) -> Any:
    from .torch.distributed.backend import create

    return create(opts, options)
