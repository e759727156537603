# What a forked child must let go of, such as connections whose end shows others the death of its parent.
# Touches the fork handlers of this process.
"""Data loaders fork after init."""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakSet


def abandoned_in_children() -> WeakSet[Any]:
    """A new set. A forked child calls `abandon()` of all objects that are in it then, and forgets them."""
    members: WeakSet[Any] = WeakSet()

    def abandon() -> None:
        for member in list(members):
            member.abandon()
        members.clear()

    os.register_at_fork(after_in_child=abandon)
    return members
