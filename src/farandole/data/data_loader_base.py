# Horovod's data loaders: a base class, and a mixin that loads batches in advance in a thread.
# Touches threads; imports no framework.
"""Replaces `horovod.data.data_loader_base` in scripts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]


class BaseDataLoader:
    """A loader defines the number of its batches (`__len__`) and gives them (`_iterate`)."""

    def __len__(self) -> int:
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Changes a batch before the user gets it; runs in the user's thread."""
        return batch


class _End:
    """The last item of a pass: its end, or the error that ended it."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class AsyncDataLoaderMixin:
    """Loads batches in advance in a thread. It comes before the loader: `class Mine(AsyncDataLoaderMixin, Loader)`.

    With `async_loader_queue_size=0` there is no thread.
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._ahead: tuple[threading.Thread, threading.Event] | None = None
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """Ends the thread; a later pass starts a new one."""
        if self._ahead is None:
            return
        (thread, leave), self._ahead = self._ahead, None
        leave.set()
        if thread is not threading.current_thread():
            thread.join()

    def __iter__(self) -> Iterator[Any]:
        base: Any = super()
        if self.async_loader_queue_size <= 0:
            yield from base.__iter__()
            return
        self.close_async_loader()  # of a pass that was not finished
        batches: queue.Queue[Any] = queue.Queue(self.async_loader_queue_size)
        leave = threading.Event()
        thread = threading.Thread(target=_load, args=(self, batches, leave), name="farandole-loader", daemon=True)
        self._ahead = (thread, leave)
        thread.start()
        try:
            while not isinstance(batch := _get(batches, leave), _End):
                yield base._process_batch(batch)
            if batch.error is not None:
                raise batch.error
        finally:
            leave.set()
            thread.join()


def _load(loader: Any, batches: queue.Queue[Any], leave: threading.Event) -> None:
    error: BaseException | None = None
    try:
        for batch in loader._iterate():
            if not _put(batches, batch, leave):
                return
    except BaseException as found:
        error = found
    _put(batches, _End(error), leave)


def _get(batches: queue.Queue[Any], leave: threading.Event) -> Any:
    """The next batch; an end with an error if the loader was closed or another pass has begun."""
    while True:
        try:
            return batches.get(timeout=0.1)
        except queue.Empty:
            if leave.is_set():
                return _End(RuntimeError("the loader was closed, or iterated again, before this pass ended"))


def _put(batches: queue.Queue[Any], batch: Any, leave: threading.Event) -> bool:
    """Whether the batch was queued; False if the user has ended the pass."""
    while not leave.is_set():
        try:
            batches.put(batch, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False
