# Ranks with different numbers of batches: those that have no more take part with nothing, until all are done.
# Touches torch and the ranks' numbers of batches.
"""`evened(loader)` is the loader itself when all ranks have equally many batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..elastic.state import agree_on_largest
from ..runtime import runtime


class Evened:
    """A loader that goes on for as long as the longest one of all ranks; `idle`: the batch at hand is not there."""

    def __init__(self, loader: Any, longest: int) -> None:
        self.loader = loader
        self.longest = longest
        self.idle = False

    def __len__(self) -> int:
        return self.longest

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet, while a copy is made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        self.idle = False
        count, batch = 0, None
        for batch in self.loader:
            count += 1
            yield batch
        for _ in range(count, self.longest):
            self.idle = True
            yield batch
        self.idle = False


def evened(loader: Any) -> Any:
    """All ranks call it. Loaders without a length are left as they are: nobody can tell how long they are."""
    if not runtime.initialized or runtime.world.engine.size == 1:
        return loader
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        length = -1
    longest, most_negative, unknown = agree_on_largest([length, -length, length < 0], "lightning.batches")
    if unknown or longest == -most_negative:
        return loader
    if most_negative == 0:
        raise ValueError(f"a rank has no batch at all while another one has {longest}; each needs one at least")
    return Evened(loader, longest)
