# For ranks with different numbers of batches: ranks without batches take part with weight 0 until all are done.
# Touches torch and the ranks' numbers of batches.
"""`padded(loader)` returns the loader itself when all ranks have the same number of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..elastic.state import agree_on_largest
from ..world.runtime import runtime


class PaddedLoader:
    """A loader with as many batches as the longest loader of all ranks. `idle`: this batch repeats the last one."""

    def __init__(self, loader: Any, longest: int) -> None:
        self.loader = loader
        self.longest = longest
        self.idle = False

    def __len__(self) -> int:
        return self.longest

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # it is missing while a copy is made
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


def padded(loader: Any) -> Any:
    """Pads a loader. All ranks call it. Loaders without a length are returned unchanged."""
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
        raise ValueError(f"a rank has no batch at all while another one has {longest}; each rank needs at least one")
    return PaddedLoader(loader, longest)
