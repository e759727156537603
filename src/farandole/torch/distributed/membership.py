# Gives a number in the engine to groups that only their members make.
# Touches torch; the rooms bindings.private, engine and world; the file collectives.
"""Every member calls `found`. The default group needs no number."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from ...bindings.private.torch_names import default_store
from ...engine.interface import Kind, Request
from ...world.world import World
from .collectives import Members

FIRST_NUMBER = 1 << 20  # of groups that their members make; the core uses smaller numbers
MAX_GROUPS = 1 << 16  # between one init_process_group and its destroy_process_group

# How often a default group was made in a world. Its store can be new or old; the engine must never see a number again.
_beginnings: WeakKeyDictionary[World, int] = WeakKeyDictionary()


def begin_anew(world: World) -> None:
    """Called when a default group is made."""
    _beginnings[world] = _beginnings.get(world, -1) + 1


def found(world: World, members: Members, store: Any) -> int:
    """Makes the group in the engine and gives its number: the first member chooses it, others read it in `store`."""
    beginning = _beginnings[world]
    key = f"farandole/number/{beginning}"
    if members.me == 0:
        count = int(default_store().add("farandole/groups", 1))
        number = FIRST_NUMBER + beginning * MAX_GROUPS + count
        store.set(key, str(number))
    else:
        number = int(store.get(key))
    request = Request(Kind.ADD_GROUP, splits=[members.size, *sorted(members.ranks)], tag=number)
    [handle] = world.engine.submit([request], prompt=True)
    world.engine.wait(handle)
    return number
