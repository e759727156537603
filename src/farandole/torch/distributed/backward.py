# DDP's buckets: which allreduces are theirs, and how their failures become errors of the backward pass.
# Touches torch and work.
"""DDP asks for allreduces in C++, out of the backward pass, and does not look at the errors of their futures."""

from __future__ import annotations

import sys

import torch

from .work import Work

BACKWARD = {"torch.autograd.graph", "torch.autograd"}  # the module, by release, whose function runs a backward pass


def asked_by_backward() -> bool:
    """Whether the caller's caller is torch's backward pass itself: then the tensor is a bucket of DDP, new to users."""
    caller = sys._getframe(1).f_back  # none: a thread of torch's own, for a device
    return caller is None or caller.f_globals.get("__name__") in BACKWARD


class Backward:
    """The buckets of the backward pass that runs now."""

    def __init__(self) -> None:
        self._task = -1  # the pass, by its number
        self._buckets: list[Work] = []

    def await_at_end(self, work: Work) -> None:
        """Before DDP looks at its buckets: what went wrong is raised by `backward`, as what it is."""
        if torch._C._current_autograd_node() is None:
            return  # backward is over, and DDP is about to wait: its graph is static, and this its first pass
        work.awaited = True
        task = torch._C._current_graph_task_id()
        if task != self._task:
            for lost in self._buckets:  # of a pass that did not come to its end
                lost.give_up()
            self._task, self._buckets = task, []
            torch.autograd.Variable._execution_engine.queue_callback(self._deliver)
        self._buckets.append(work)

    def _deliver(self) -> None:
        works, self._buckets, self._task = self._buckets, [], -1
        for work in works:
            work.deliver()
