# What training has reached: committed now and then, restored after a loss, given to ranks that come.
# Touches checkpoint, mirror, ops, runtime and errors.
"""`State` is the interface, `ObjectState` holds plain objects; frameworks add their own handlers."""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable, Sequence
from enum import IntFlag
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import ops
from ..errors import HostsUpdatedInterrupt
from ..runtime import runtime
from . import checkpoint
from .mirror import Mirror, Sharded

logger = logging.getLogger("farandole")


class HostUpdateResult(IntFlag):
    """What has become of the hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


def agree_on_largest(values: Sequence[int], name: str) -> list[int]:
    """The largest of all ranks' numbers, place by place; a rank that is alone agrees with itself."""
    if not runtime.initialized or runtime.world.engine.size == 1:
        return list(values)
    return [int(value) for value in ops.allreduce(np.array(values, dtype=np.int64), op=ops.Max, name=name)]


class State:
    """State that survives the loss of ranks. Users take ObjectState or a framework's; this is what they have in common.

    `bcast_object(value)` gives every rank rank 0's value; `get_rank()` is this rank's number.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._messages: list[tuple[int, int]] = []
        self._messages_lock = threading.Lock()
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._save_callbacks: list[Callable[[], Any]] = []
        self._commits = 0

    @property
    def commits(self) -> int:
        """How many commits lie behind this state; the rank with most of them gives its state to the others."""
        return self._commits

    # --- what scripts call -------------------------------------------------------------------------------------------

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Functions that are called after every change of ranks, before training goes on."""
        self._reset_callbacks.extend(callbacks)

    def register_save_callback(self, callback: Callable[[], Any]) -> None:
        """A function that is called once on each rank, after a commit, when ranks are asked to leave (SIGTERM)."""
        self._save_callbacks.append(callback)
        runtime.tell_saving(True)

    def commit(self) -> None:
        """Keeps the state as it is now, to come back to after a loss; then looks for changes of hosts.

        All ranks call it at the same step. Raises HostsUpdatedInterrupt, on all of them, when hosts came or went.
        """
        self._keep()
        self._look_for_updates(kept=True)

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt, on all ranks alike, when hosts came or went; all ranks call it.

        The state is committed in that case: training goes on with it as it is.
        """
        self._look_for_updates(kept=False)

    # --- what the loop calls -----------------------------------------------------------------------------------------

    def on_reset(self) -> None:
        """After a change of ranks."""
        with self._messages_lock:
            self._messages.clear()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Somebody says that hosts came or went; taken up at the next commit or check."""
        with self._messages_lock:
            self._messages.append((int(timestamp), int(update_res)))

    def take_number(self, commits: int) -> None:
        """All ranks hold the same state now, and call it the same commit: that of the rank it came from."""
        self._commits = max(commits, 1)

    def _keep(self) -> None:
        self.save()
        self._commits += 1

    def _pending(self) -> tuple[int, int, bool]:
        with self._messages_lock:
            messages, self._messages = self._messages, []
        stamp, result, deadline = runtime.notifications.pending()
        for timestamp, update in messages:
            stamp, result = max(stamp, timestamp), result | update
        return stamp, result, deadline is not None

    def _look_for_updates(self, kept: bool) -> None:
        stamp, result, drain = self._pending()
        removed, added = bool(result & HostUpdateResult.removed), bool(result & HostUpdateResult.added)
        # Any rank that knows is enough: the others may hear of it only later.
        known = agree_on_largest([int(stamp > 0), stamp, removed, added, drain], "elastic.updates")
        if not known[0]:
            return
        if not kept:
            self._keep()
        if known[4]:
            self._save_before_leaving()
        raise HostsUpdatedInterrupt(skip_sync=bool(known[2]) and not known[3] and self._equal_without_sync())

    def _equal_without_sync(self) -> bool:
        """Whether ranks that stay need nothing from those that leave."""
        return True

    def _save_before_leaving(self) -> None:
        for callback in self._save_callbacks:
            try:
                callback()
            except Exception:
                logger.exception("the save callback %r failed; this rank leaves nevertheless", callback)
        runtime.tell_saved()

    # --- what each kind of state does --------------------------------------------------------------------------------

    def save(self) -> None:
        """Keeps a copy of the state in memory, on this rank alone."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to the last copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives every rank rank 0's state."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapts to a new set of ranks."""


class ObjectState(State):
    """State of plain objects, as attributes: `ObjectState(broadcast_object, rank, epoch=0, batch=0)`.

    Values of class Sharded are each rank's own; all others are the same on all ranks.
    """

    if TYPE_CHECKING:  # its attributes are what the script gave

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._sharded = {name: value for name, value in kwargs.items() if isinstance(value, Sharded)}
        self._names = [name for name in kwargs if name not in self._sharded]
        taken = sorted(name for name in kwargs if hasattr(type(self), name))
        if taken:
            raise ValueError(f"{', '.join(taken)}: {type(self).__name__} has these names already; take others")
        self._mirror = Mirror(self._sharded) if self._sharded else None
        self._saved: dict[str, Any] = {}
        self._writer = checkpoint.Writer()
        self._told = False
        self._uncopied: set[str] = set()  # names of values that cannot be copied
        for name, value in kwargs.items():
            setattr(self, name, value)
        ObjectState.save(self)

    # --- commits -----------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        number = self._commits + 1
        if self._mirror is not None:
            # Only when every rank has its part of this commit, and its copy elsewhere, does it count.
            self._mirror.prepare(number)
            self._mirror.agree(number)
        self.save()
        self._commits = number
        if not self._told:
            self._told = True
            logger.info("%s", self.describe_memory())

    def save(self) -> None:
        """Keeps a copy of the objects in memory, on this rank alone."""
        self._saved = {name: self._copied(name, getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Goes back to the last copy."""
        for name, value in self._saved.items():
            setattr(self, name, self._copied(name, value))
        if self._mirror is not None:
            self._mirror.restore()

    def sync(self) -> None:
        """Gives every rank rank 0's objects as they are now, and deals out what is sharded."""
        mine = self._commits, {name: getattr(self, name) for name in self._names}
        commits, values = self._bcast_object(mine)
        for name, value in values.items():
            setattr(self, name, value)
        self._take_over(commits)

    def _equal_without_sync(self) -> bool:
        return self._mirror is None  # what leaving ranks hold has to be dealt out anew

    def _take_over(self, commits: int) -> None:
        """The end of a sync: all ranks hold the same state, and call it the same commit."""
        if self._mirror is not None:
            self._mirror.recover()
            if self._mirror.agreed == 0:
                self._mirror.begin()
        self.save()
        self.take_number(commits)

    def _copied(self, name: str, value: Any) -> Any:
        """A copy; the value itself where there can be none, as of locks and files, which is said once."""
        try:
            return copy.deepcopy(value)
        except Exception as error:
            if name not in self._uncopied:
                self._uncopied.add(name)
                logger.warning(
                    "the elastic state's %s (%s) cannot be copied: after a loss it stays as it is then, and is not "
                    "rolled back to the last commit (%s: %s). Keep it outside of the state, or give it __deepcopy__",
                    name,
                    type(value).__name__,
                    type(error).__name__,
                    error,
                )
            return value

    # --- memory ------------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Bytes that being elastic costs on this rank: copies of replicated state, sharded parts with their copies."""
        sharded = self._mirror.bytes() if self._mirror is not None else 0
        return {"replicated": self._saved_bytes(), "sharded": sharded}

    def describe_memory(self) -> str:
        """One line about `memory()`."""
        parts = ", ".join(f"{count / 1e6:.1f} MB {kind}" for kind, count in self.memory().items())
        return f"a commit keeps {parts} in the memory of each rank"

    def _saved_bytes(self) -> int:
        return sum(value.nbytes for value in self._saved.values() if isinstance(value, np.ndarray))

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save_to(self, path: str, keep: int = 3, wait: bool = False) -> checkpoint.Writing:
        """Writes the last commit below `path`, in the background, and keeps the newest `keep` checkpoints.

        All ranks call it; rank 0 writes, and with sharded state each its part, so that `path` has to be shared. While
        one is being written the next is left out, unless `wait`: then it returns, or raises, when all is on disk.
        A failure is logged and training goes on.
        """
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint is kept")
        own = None if self._mirror is None else self._mirror.values()
        snapshot = checkpoint.Snapshot(self._commits, self._saved_tree(), own, self._pin())
        return checkpoint.save(self._writer, snapshot, os.path.abspath(path), keep, wait)

    def load_from(self, path: str) -> int:
        """Takes the newest good checkpoint below `path`; damaged ones are named in the log and left alone.

        Rank 0 reads, and the others get its state when `run` begins. Gives the number of the commit; 0: there is none.
        """
        if runtime.initialized and runtime.world.engine.rank != 0:
            return 0
        found = checkpoint.load(os.path.abspath(path))
        if found is None:
            return 0
        commit, tree, sharded = found
        known = {*self._saved_tree(), *self._sharded}
        strange = sorted(({*tree, *sharded}) - known)
        if strange:
            raise ValueError(f"the checkpoint below {path} has {', '.join(strange)}; this state has {sorted(known)}")
        self._load_tree(tree)
        if self._mirror is not None:
            self._mirror.adopt(commit, sharded)
        self.save()
        self._commits = commit
        return commit

    def _saved_tree(self) -> dict[str, Any]:
        """The last copy as a tree of plain values and tensors, by attribute."""
        return dict(self._saved)

    def _load_tree(self, tree: dict[str, Any]) -> None:
        """Takes the values of a checkpoint; attributes that it does not have stay."""
        for name, value in tree.items():
            setattr(self, name, value)

    def _pin(self) -> Callable[[], None]:
        """Keeps the tensors of the last copy from being overwritten by the next; gives what ends that."""
        return lambda: None
