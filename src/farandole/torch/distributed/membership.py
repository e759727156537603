# How groups that their members alone make get their number in the engine.
# Touches torch, engine and runtime.
"""`found` is called by every member; the default group needs no number of its own."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from ...engine import Kind, Request
from ...private.torch_names import default_store
from ...runtime import World
from .collectives import Members

FIRST_NUMBER = 1 << 20  # of groups that their members make; the core has those below for itself
MOST_GROUPS = 1 << 16  # between init_process_group and destroy_process_group

# How often torch.distributed has begun in a world: its store may be a new one or the old one, the engine never forgets.
_beginnings: WeakKeyDictionary[World, int] = WeakKeyDictionary()


def begin_anew(world: World) -> None:
    """A default group is made."""
    _beginnings[world] = _beginnings.get(world, -1) + 1


def found(world: World, members: Members, store: Any) -> int:
    """Makes the group in the engine and gives its number: the first member draws it, the others read it in `store`."""
    beginning = _beginnings[world]
    key = f"farandole/number/{beginning}"
    if members.me == 0:
        count = int(default_store().add("farandole/groups", 1))
        number = FIRST_NUMBER + beginning * MOST_GROUPS + count
        store.set(key, str(number))
    else:
        number = int(store.get(key))
    request = Request(Kind.ADD_GROUP, splits=[members.size, *sorted(members.ranks)], tag=number)
    [handle] = world.engine.submit([request], prompt=True)
    world.engine.wait(handle)
    return number
