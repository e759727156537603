# Horovod's data loaders: the base class, and loading ahead in a thread.
# Touches farandole.data and threads.
"""What the user sees is the same with and without the thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from farandole.data import AsyncDataLoaderMixin, BaseDataLoader


class Numbers(BaseDataLoader):
    def __init__(self, count: int, fails_at: int = -1) -> None:
        self.count, self.fails_at = count, fails_at

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[int]:
        for number in range(self.count):
            if number == self.fails_at:
                raise RuntimeError("no more")
            yield number

    def _process_batch(self, batch: Any) -> Any:
        return batch * 10


class Ahead(AsyncDataLoaderMixin, Numbers):
    pass


def loaders() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "farandole-loader"}


@pytest.mark.parametrize("ahead", [0, 1, 64])
def test_every_pass_gives_all_batches(ahead: int) -> None:
    loader = Ahead(ahead, False, 5)
    assert len(loader) == 5
    for _ in range(2):
        assert list(loader) == [0, 10, 20, 30, 40]
    for number in loader:
        if number == 20:
            break  # leaves early
    loader.close_async_loader()
    loader.close_async_loader()
    assert not loaders()
    assert list(loader) == list(Numbers(5)) and not loaders()


@pytest.mark.parametrize("ahead", [0, 2])
def test_errors_are_raised_in_the_operation_that_failed(ahead: int) -> None:
    seen = []
    with pytest.raises(RuntimeError, match="no more"):
        for number in Ahead(async_loader_queue_size=ahead, count=5, fails_at=3):
            seen.append(number)
    assert seen == [0, 10, 20] and not loaders()


def test_the_length_of_a_loader() -> None:
    with pytest.raises(NotImplementedError):
        len(BaseDataLoader())
    with pytest.raises(NotImplementedError):
        list(BaseDataLoader())
