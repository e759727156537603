# What torch runs at the end of its own import: the backend `farandole` becomes known; Lightning's import is awaited.
# Touches torch.distributed's registries and looks into the library's file; the backend is loaded when a group is made.
"""The entry point of `torch.backends`: it never raises, and FARANDOLE_AUTOLOAD=0 switches it off."""

from __future__ import annotations

import importlib
import mmap
import os
import warnings
from typing import Any

from .version import package_version

NAME = "farandole"


def register() -> None:
    """For the entry point."""
    if os.environ.get("FARANDOLE_AUTOLOAD", "1").strip().lower() in ("0", "false", "no", "off"):
        return
    try:
        check(os.path.join(os.path.dirname(__file__), "_native", "libfarandole.so"))
        announce()
    except Exception as error:
        warnings.warn(f"farandole cannot be used as a backend of torch.distributed: {error}", stacklevel=2)
    try:
        from .lightning import registration

        registration.watch()
    except Exception as error:
        warnings.warn(f'farandole cannot be Lightning\'s strategy="farandole": {error}', stacklevel=2)


def check(library: str) -> None:
    """Raises when the library is missing or of another version; it is looked into, not loaded."""
    if not os.path.exists(library):
        raise FileNotFoundError(f"{library} does not exist; install the package again")
    expected = package_version()
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(f"farandole library {expected}\0".encode()) < 0:
            raise RuntimeError(f"{library} is not of version {expected}; install the package again")


def announce() -> None:
    """Registers the backend; again is once."""
    from torch import distributed as dist

    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    if not hasattr(dist, "BackendBase"):
        _announce_groups()
    # The function of this name hides the module.
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    original = handlers["env"]

    def meet(url: str, timeout: Any = dist.default_pg_timeout, **more: Any) -> Any:
        # torch's own variables come first; without them torch could only fail.
        if not all(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")):
            from .torch.distributed import rendezvous as ours

            if ours.launched():
                return ours.meet(timeout)
        return original(url, timeout=timeout, **more)

    handlers["env"] = meet


def _announce_groups() -> None:
    """What a group in Python needs besides, since it takes the place of torch's own."""
    from torch import distributed as dist

    # Torch would not put it beside another backend: so the combinations are backends of their own.
    names = [NAME]
    for far in ("nccl", "gloo"):
        for name in (f"cpu:{NAME},cuda:{far}", f"cuda:{far},cpu:{NAME}"):
            dist.Backend.register_backend(name, _compose(far), extended_api=True, devices=["cpu", "cuda"])
            names.append(name)
    # Since 2.15 torch attaches its flight recorder to each group whose backend does not record by itself, and fails
    # when the group is an object in Python.
    recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.update(names)


def _create(opts: Any, options: Any) -> Any:
    from .torch.distributed.backend import create, face

    return create(opts, face())


def _compose(far: str) -> Any:
    def create(opts: Any, options: Any) -> Any:
        from .torch.distributed.composed import create

        return create(far, opts, options)

    return create
