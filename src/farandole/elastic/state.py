# The state of a training: users commit it, a loss restores it, and new ranks receive it.
# Touches the rooms base, operations and world; the files checkpoint and mirror.
"""`State` is the interface, `ObjectState` holds Python objects; frameworks have subclasses."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import queue
from collections.abc import Callable, Sequence
from enum import IntFlag
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.errors import HostsUpdatedInterrupt
from ..operations import ops
from ..world.runtime import runtime
from . import checkpoint
from .mirror import Mirror, Sharded

logger = logging.getLogger("farandole")


class HostUpdateResult(IntFlag):
    """How the hosts changed."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


def agree_on_largest(values: Sequence[int], name: str) -> list[int]:
    """For each position the largest number of all ranks. A single rank returns its own numbers."""
    if not runtime.initialized or runtime.world.engine.size == 1:
        return list(values)
    return [int(value) for value in ops.allreduce(np.array(values, dtype=np.int64), op=ops.Max, name=name)]


class Restorable:
    """What can be saved in memory, restored from there, and sent from rank 0 to the other ranks."""

    def save(self) -> None:
        """Keeps a copy in memory, on this rank only."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restores the last copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives every rank the contents that rank 0 has."""
        raise NotImplementedError


class State(Restorable):
    """The base class of state that survives the loss of ranks. Users use ObjectState or the class of a framework.

    `bcast_object(value)` returns the value of rank 0 on every rank; `get_rank()` returns this rank's number.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        # These have Horovod's names, because subclasses and tests of users read them.
        self._host_messages: queue.Queue[tuple[int, int]] = queue.Queue()
        self._last_updated_timestamp = 0
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._save_callbacks: list[Callable[[], Any]] = []
        self._commits = 0  # the number of commits so far; the rank with the most sends its state to the others

    # --- for scripts -------------------------------------------------------------------------------------------------

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Adds functions that are called after every change of ranks, before training continues."""
        self._reset_callbacks.extend(callbacks)

    def register_save_callback(self, callback: Callable[[], Any]) -> None:
        """Adds a function that each rank calls once, after a commit, when ranks must leave (SIGTERM)."""
        self._save_callbacks.append(callback)
        runtime.membership.set_saving(True)

    def commit(self) -> None:
        """Keeps the present state, which is restored after a loss. Then it checks whether hosts joined or left.

        All ranks call it at the same step. If hosts joined or left, it raises HostsUpdatedInterrupt on all ranks.
        """
        self._keep()
        self._look_for_updates(kept=True)

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt on all ranks if hosts joined or left. All ranks call it.

        In that case the state is committed first, so that training continues with the present state.
        """
        self._look_for_updates(kept=False)

    # --- for the loop ------------------------------------------------------------------------------------------------

    def on_reset(self) -> None:
        """Called after a change of ranks."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Called when hosts joined or left. The next commit or check uses this news."""
        self._host_messages.put((timestamp, update_res))

    def _take_number(self, commits: int) -> None:
        """Sets the number of commits: all ranks now have the same state, and the number of its source."""
        self._commits = max(commits, 1)

    def _keep(self) -> None:
        self.save()
        self._commits += 1

    def _pending(self) -> tuple[bool, int, int, bool]:
        """(whether there is news, the newest time stamp from users, how hosts changed, whether ranks must save)."""
        stamp, result, deadline = runtime.notifications.pending()
        newest = self._last_updated_timestamp
        with contextlib.suppress(queue.Empty):
            while True:
                timestamp, update = self._host_messages.get_nowait()
                if timestamp > self._last_updated_timestamp:  # earlier updates are done
                    newest, result = max(newest, int(timestamp)), result | int(update)
        return stamp > 0 or newest > self._last_updated_timestamp, newest, result, deadline is not None

    def _look_for_updates(self, kept: bool) -> None:
        news, newest, result, drain = self._pending()
        removed, added = bool(result & HostUpdateResult.removed), bool(result & HostUpdateResult.added)
        # The news of one rank is enough, because other ranks may get it later.
        known = agree_on_largest([news, newest, removed, added, drain], "elastic.updates")
        self._last_updated_timestamp = known[1]
        if not known[0]:
            return
        if not kept:
            self._keep()
        if known[4]:
            self._save_before_leaving()
        raise HostsUpdatedInterrupt(skip_sync=bool(known[2]) and not known[3] and self._equal_without_sync())

    def _equal_without_sync(self) -> bool:
        """Whether the ranks that stay need no data from the ranks that leave."""
        return True

    def _save_before_leaving(self) -> None:
        for callback in self._save_callbacks:
            try:
                callback()
            except Exception:
                logger.exception("the save callback %r failed; this rank still leaves", callback)
        runtime.membership.set_saved()

    # --- what each kind of state does --------------------------------------------------------------------------------

    def reset(self) -> None:
        """Adapts the state to a new set of ranks."""


# Methods that the loop or scripts call on each state. Values must have other names; scripts may use any other name.
METHODS = frozenset(
    [
        "check_host_updates",
        "commit",
        "on_hosts_updated",
        "on_reset",
        "register_reset_callbacks",
        "reset",
        "restore",
        "save",
        "sync",
    ]
)


class ObjectState(State):
    """State with objects as attributes: `ObjectState(broadcast_object, rank, epoch=0, batch=0)`.

    Values of class Sharded are different on each rank; all other values are the same on all ranks.
    """

    if TYPE_CHECKING:  # its attributes are the values of the script

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._sharded = {name: value for name, value in kwargs.items() if isinstance(value, Sharded)}
        self._names = [name for name in kwargs if name not in self._sharded]
        taken = sorted(METHODS.intersection(kwargs))
        if taken:
            raise ValueError(f"{', '.join(taken)}: methods of {type(self).__name__} have these names; use other names")
        self._mirror = Mirror(self._sharded) if self._sharded else None
        self._saved_state: dict[str, Any] = {}  # Horovod's name, which subclasses use
        self._writer = checkpoint.Writer()
        self._memory_logged = False
        self._uncopied: set[str] = set()  # names of values that cannot be copied
        for name, value in kwargs.items():
            setattr(self, name, value)
        ObjectState.save(self)

    # --- commits -----------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        number = self._commits + 1
        if self._mirror is not None:
            # The commit is valid only when every rank has its own part and the copy of another part.
            self._mirror.prepare(number)
            self._mirror.agree(number)
        self.save()
        self._commits = number
        if not self._memory_logged:
            self._memory_logged = True
            logger.info("%s", self._describe_memory())

    def save(self) -> None:
        """Keeps a copy of the objects in memory, on this rank only."""
        self._saved_state = {name: self._copied(name, getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Restores the last copy."""
        for name, value in self._saved_state.items():
            setattr(self, name, self._copied(name, value))
        if self._mirror is not None:
            self._mirror.restore()

    def sync(self) -> None:
        """Sends the present objects of rank 0 to every rank, and distributes sharded values."""
        own_state = self._commits, {name: getattr(self, name) for name in self._names}
        commits, values = self._bcast_object(own_state)
        for name, value in values.items():
            setattr(self, name, value)
        self._take_over(commits)

    def _equal_without_sync(self) -> bool:
        return self._mirror is None  # the shards of leaving ranks must be distributed again

    def _take_over(self, commits: int) -> None:
        """The last step of a sync: all ranks have the same state, and `commits` is its number."""
        if self._mirror is not None:
            self._mirror.recover()
            if self._mirror.agreed == 0:
                self._mirror.begin()
        self.save()
        self._take_number(commits)

    def _copied(self, name: str, value: Any) -> Any:
        """A copy. If a value cannot be copied (such as a lock or a file), the value itself, with one warning."""
        try:
            return copy.deepcopy(value)
        except Exception as error:
            if name not in self._uncopied:
                self._uncopied.add(name)
                logger.warning(
                    "the elastic state's %s (%s) cannot be copied: after a loss it keeps its value of that "
                    "moment, and is not "
                    "rolled back to the last commit (%s: %s). Keep it outside of the state, or give it __deepcopy__",
                    name,
                    type(value).__name__,
                    type(error).__name__,
                    error,
                )
            return value

    # --- memory ------------------------------------------------------------------------------------------------------

    def _memory(self) -> dict[str, int]:
        sharded = self._mirror.bytes() if self._mirror is not None else 0
        return {"replicated": self._saved_bytes(), "sharded": sharded}

    def _describe_memory(self) -> str:
        parts = ", ".join(f"{count / 1e6:.1f} MB {kind}" for kind, count in self._memory().items())
        return f"a commit keeps {parts} in the memory of each rank"

    def _saved_bytes(self) -> int:
        return sum(value.nbytes for value in self._saved_state.values() if isinstance(value, np.ndarray))

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _save_to(self, path: str, keep: int, wait: bool) -> checkpoint.Writing:
        if keep < 1:
            raise ValueError(f"keep={keep}: expected at least 1")
        own = None if self._mirror is None else self._mirror.values()
        snapshot = checkpoint.Snapshot(self._commits, self._saved_tree(), own, self._pin())
        return checkpoint.save(self._writer, snapshot, os.path.abspath(path), keep, wait)

    def _load_from(self, path: str) -> int:
        if runtime.initialized and runtime.rank != 0:
            return 0
        found = checkpoint.load(os.path.abspath(path))
        if found is None:
            return 0
        commit, tree, sharded = found
        known = {*self._saved_tree(), *self._sharded}
        unknown = sorted(({*tree, *sharded}) - known)
        if unknown:
            raise ValueError(f"the checkpoint below {path} has {', '.join(unknown)}; this state has {sorted(known)}")
        self._load_tree(tree)
        if self._mirror is not None:
            self._mirror.adopt(commit, sharded)
        self.save()
        self._commits = commit
        return commit

    def _saved_tree(self) -> dict[str, Any]:
        """The last copy, by attribute, as a tree of plain values and tensors."""
        return dict(self._saved_state)

    def _load_tree(self, tree: dict[str, Any]) -> None:
        """Takes the values of a checkpoint. Attributes that are not in it do not change."""
        for name, value in tree.items():
            setattr(self, name, value)

    def _pin(self) -> Callable[[], None]:
        """Protects the tensors of the last copy from being overwritten. Returns a function that ends this."""
        return lambda: None


# These are functions, because scripts may use any attribute name except Horovod's methods.


def commits(state: State) -> int:
    """The number of commits of a state so far. The rank with the most commits sends its state to the others."""
    return state._commits


def memory(state: ObjectState) -> dict[str, int]:
    """The bytes that commits use on this rank: copies of replicated state, and sharded parts with their copies."""
    return state._memory()


def describe_memory(state: ObjectState) -> str:
    """`memory(state)` as one line of text."""
    return state._describe_memory()


def save_to(state: ObjectState, path: str, keep: int = 3, wait: bool = False) -> checkpoint.Writing:
    """Writes the last commit below `path` in the background, and keeps the newest `keep` checkpoints.

    All ranks call it. Rank 0 writes; with sharded state each rank writes its part, so all hosts must share `path`.
    If the last checkpoint is still being written, this one is skipped. With `wait` it is not skipped, and the call
    returns, or raises, when all is on disk. Without `wait` an error is logged and training continues.
    """
    return state._save_to(path, keep, wait)


def load_from(state: ObjectState, path: str) -> int:
    """Loads the newest good checkpoint below `path`. Damaged checkpoints are reported in the log and not changed.

    Rank 0 reads; the others get its state when `run` begins. Returns the number of the commit; 0: no checkpoint.
    """
    return state._load_from(path)
