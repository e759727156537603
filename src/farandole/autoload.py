# What torch runs at the end of its own import: a name for torch.distributed's backend, and Lightning's import awaited.
# Touches torch.distributed's registries and the import system; what is registered is loaded when it is used.
"""The entry point of `torch.backends`: it never raises, and FARANDOLE_AUTOLOAD=0 switches all of it off."""

import importlib
import os
import sys
import warnings
from functools import partial
from typing import Any

NAME, LIGHTNING = "farandole", ("lightning.", "pytorch_lightning.", "lightning_fabric.")


def patching_allowed() -> bool:
    """Whether anything of other packages may be replaced: docs/private-names.md says what that is."""
    return os.environ.get("FARANDOLE_AUTOLOAD", "1").strip().lower() not in ("0", "false", "no", "off")


def register() -> None:
    """For the entry point."""
    if patching_allowed():
        _quietly(announce)
        if "FARANDOLE_RENDEZVOUS" in os.environ:  # a rank of our launcher
            _quietly(_ours, "base.hints", "watch_torch")
        sys.meta_path.insert(0, Awaiting)
        if any(name.startswith(LIGHTNING) for name in sys.modules):
            Awaiting.find_spec(LIGHTNING[0])


def announce() -> None:
    """Registers the backend once and, if patching is allowed, the rendezvous of ranks without MASTER_ADDR."""
    dist = importlib.import_module("torch.distributed")
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        pairs = {} if hasattr(dist, "BackendBase") else {f"cpu:{NAME},cuda:{cuda}": cuda for cuda in ("nccl", "gloo")}
        for name, cuda in {NAME: "", **pairs}.items():
            make = partial(_ours, "torch.distributed.backend", "make", cuda)
            dist.Backend.register_backend(name, make, extended_api=True, devices=["cpu", "cuda"])
        schemes = vars(importlib.import_module("torch.distributed.rendezvous")).get("_rendezvous_handlers", {})
        if patching_allowed() and "env" in schemes:  # a private name: bindings/private/torch_names.py says why
            schemes["env"] = partial(_ours, "torch.distributed.rendezvous", "answer", schemes["env"])


def _ours(module: str, function: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(importlib.import_module(f"{__package__}.{module}"), function)(*args, **kwargs)


def _quietly(call: Any, *args: Any) -> Any:
    try:
        return call(*args)
    except Exception as error:
        return warnings.warn(f"torch or Lightning does not know farandole: {error}", stacklevel=3)


class Awaiting:
    """A finder for the import system. It finds nothing, but calls farandole.lightning when Lightning is imported."""

    @staticmethod
    def find_spec(*name: Any) -> Any:
        return _quietly(_ours, "lightning.registration", "take_over", *name) if name[0].startswith(LIGHTNING) else None
