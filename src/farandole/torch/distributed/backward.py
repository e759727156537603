# Allreduces inside a backward pass whose futures somebody takes: DDP's buckets. Their failures are errors of that pass.
# Touches torch, private and work.
"""DDP takes the future of each bucket's allreduce inside the backward pass and waits for all of them at its end."""

from __future__ import annotations

import weakref

import torch

from ...private.torch_names import after_backward, backward_pass, in_backward_hook
from .work import Work


class Backward:
    """The buckets of the backward pass that runs now, and which memory buckets had in earlier ones."""

    def __init__(self) -> None:
        self._task = -1  # the pass, by its number
        self._buckets: list[Work] = []
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # of buckets, by address

    def was_bucket(self, tensor: torch.Tensor) -> bool:
        """Whether this very memory was a bucket before, so that it will be one again."""
        known = self._storages.get(tensor.untyped_storage().data_ptr())
        return known is not None and known() is tensor.untyped_storage()

    def watch(self, work: Work, tensor: torch.Tensor) -> None:
        """The work becomes a bucket when its future is taken before the backward pass of this moment is over."""
        task = backward_pass()
        if task == -1:
            return

        def taken(work: Work) -> None:
            if backward_pass() == task:
                work.for_cpp = True
                if tensor.is_cpu:
                    self._remember(tensor.untyped_storage())
                    self._await_at_end(work, task)

        work.on_future = taken

    def _remember(self, storage: torch.UntypedStorage) -> None:
        if len(self._storages) > 256:
            self._storages = {at: known for at, known in self._storages.items() if known() is not None}
        self._storages[storage.data_ptr()] = weakref.ref(storage)

    def _await_at_end(self, work: Work, task: int) -> None:
        """Before DDP looks at its buckets: what went wrong is raised by `backward`, as what it is."""
        if not in_backward_hook():
            return  # backward is over, and DDP is about to wait: its graph is static, and this its first pass
        if task != self._task:
            if not after_backward(self._deliver):
                return  # the watcher completes it
            for lost in self._buckets:  # of a pass that did not come to its end
                lost.give_up()
            self._task, self._buckets = task, []
        work.awaited = True
        self._buckets.append(work)

    def _deliver(self) -> None:
        works, self._buckets, self._task = self._buckets, [], -1
        for work in works:
            work.deliver()
