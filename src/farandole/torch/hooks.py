# The hooks that autograd calls when it has added to a parameter's gradient, and which parameters have one.
# Touches torch and slots.
"""Hooks of many small gradients cost more time than they save, so one shared hook can stand for all of them.

A parameter is in one of four states:

- hooked: its own hook reports its gradient;
- unhooked: a small parameter that no bucket has yet; the shared hook of `Hooks` replaces its hook;
- deferred: a parameter of a packed bucket; the shared hook of the bucket replaces its hook;
- frozen: it wants no gradient; `Hooks.attach` gives it a hook when it does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from .slots import FEW, PackedBucket, SharedHook, Slot


class Owner(Protocol):
    """What the hooks report to."""

    def arrived(self, slot: Slot) -> None:
        """The slot's gradient is complete."""


class Hooks:
    """The hooks of one `Gradients`. They do not keep it alive."""

    def __init__(self, owner: Owner) -> None:
        self.unhooked: list[Slot] = []
        self.shared: SharedHook | None = None  # that of the unhooked slots
        self._owner = weakref.ref(owner)
        self._frozen: list[Slot] = []
        self._handles: list[Any] = []
        weakref.finalize(owner, _remove, self._handles)

    def unhook(self, slots: list[Slot]) -> None:
        """From now on one shared hook replaces the hooks of these slots, unless they are few."""
        wanted = [slot for slot in slots if slot.param.requires_grad]
        self.unhooked = wanted if len(wanted) >= FEW else []
        self.shared = SharedHook(self.unhooked[::-1]) if self.unhooked else None

    def attach(self, slots: Iterable[Slot]) -> None:
        """Adds hooks to parameters that want gradients and have no hook: new ones, and ones that were frozen before."""
        self._frozen = []
        silent = {id(slot) for slot in self.unhooked if self.shared is None or slot is not self.shared.slot}
        for slot in slots:
            if slot.hook is not None or id(slot) in silent or _deferred(slot):
                continue
            if slot.param.requires_grad:
                slot.hook = slot.param.register_post_accumulate_grad_hook(_hook(self._owner, slot))
                self._handles.append(slot.hook)
            else:
                self._frozen.append(slot)

    def missing(self) -> bool:
        """Whether a frozen parameter wants a gradient now."""
        return any(slot.param.requires_grad for slot in self._frozen)


def _deferred(slot: Slot) -> bool:
    """Whether the slot needs no hook, because its packed bucket has a shared hook."""
    return isinstance(slot.bundle, PackedBucket) and slot.bundle.deferred and slot is not slot.bundle.shared_hook.slot


def _hook(reference: weakref.ref[Owner], slot: Slot) -> Callable[[torch.Tensor], None]:
    """The function that autograd calls after adding to the parameter's gradient. It keeps no optimizer alive."""

    def arrived(_: torch.Tensor) -> None:
        left = slot.delay = slot.delay - 1
        if left > 0:
            return
        bundle = slot.bundle
        if left == 0 and bundle is not None and 1 < bundle.missing < len(bundle.slots):
            # Neither the first nor the last of its bundle: there is nothing to do yet. Models have many of these.
            slot.pending = True
            bundle.missing -= 1
            return
        owner = reference()
        if owner is not None:
            owner.arrived(slot)

    return arrived


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
