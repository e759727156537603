# Finds allreduces of DDP's buckets: their futures are taken inside a backward pass, which raises their errors.
# Touches torch; the room bindings.private; the file work.
"""DDP takes the future of each bucket's allreduce inside the backward pass and waits for all futures at its end."""

from __future__ import annotations

import weakref

import torch

from ...bindings.private.torch_names import after_backward, backward_pass, in_backward_hook
from .work import Work


class Backward:
    """The buckets of the backward pass that runs now, and the memory of buckets in earlier passes."""

    def __init__(self) -> None:
        self._task = -1  # the number of the pass
        self._buckets: list[Work] = []
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # memory of buckets, by address

    def was_bucket(self, tensor: torch.Tensor) -> bool:
        """Whether exactly this memory was a bucket before; then it will be one again."""
        known = self._storages.get(tensor.untyped_storage().data_ptr())
        return known is not None and known() is tensor.untyped_storage()

    def watch(self, work: Work, tensor: torch.Tensor) -> None:
        """The work is a bucket if its future is taken before the current backward pass ends."""
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
        """Waits before DDP reads its buckets, so that `backward` raises an error unchanged."""
        if not in_backward_hook():
            return  # backward has ended and DDP is about to wait: a static graph in its first pass
        if task != self._task:
            if not after_backward(self._deliver):
                return  # the watcher completes the future
            for lost in self._buckets:  # they belong to a pass that did not end
                lost.give_up()
            self._task, self._buckets = task, []
        work.awaited = True
        self._buckets.append(work)

    def _deliver(self) -> None:
        works, self._buckets, self._task = self._buckets, [], -1
        for work in works:
            work.deliver()
