# Process sets: sets of ranks that run collectives together, and the table of the registered sets.
# Touches engine.
"""`ProcessSet` as in Horovod; each registered one is a group of the engine."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from ..engine.interface import Engine, Kind, Request


class ProcessSet:
    """An ordered set of ranks that run collectives among themselves.

    >>> ProcessSet([2, 0]).ranks
    [0, 2]
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        """`ranks_or_comm`: ranks in any order, or an MPI communicator, which cannot be registered here."""
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = None
        self.mpi_comm: Any = None
        self._own_rank: int | None = None  # this process, once registered
        if hasattr(ranks_or_comm, "Get_rank"):
            self.mpi_comm = ranks_or_comm
            return
        try:
            self.ranks = sorted(operator.index(rank) for rank in ranks_or_comm)
        except TypeError:
            raise ValueError(f"ProcessSet takes a list of ranks (whole numbers), not {ranks_or_comm!r}") from None

    def size(self) -> int | None:
        """Number of ranks in the set; None while it is not registered."""
        return None if self._own_rank is None or self.ranks is None else len(self.ranks)

    def included(self) -> bool | None:
        """Whether this process is in the set; None while the set is not registered."""
        return None if self._own_rank is None or self.ranks is None else self._own_rank in self.ranks

    def rank(self) -> int | None:
        """This process's index in the set; None while it is not registered, ValueError when it is not in the set."""
        if self._own_rank is None or self.ranks is None:
            return None
        if self._own_rank not in self.ranks:
            raise ValueError(f"rank {self._own_rank} is not in {self}")
        return self.ranks.index(self._own_rank)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__

    # Models and optimizers hold a set and are copied and pickled: a copy is the same set. A set from a file must be
    # registered again, except the global set.

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSet:
        return self

    def __copy__(self) -> ProcessSet:
        return self

    def __reduce__(self) -> Any:
        return "global_process_set" if self is global_process_set else (ProcessSet, (self.ranks,))

    def _register(self, number: int, own_rank: int) -> None:
        self.process_set_id = number
        self._own_rank = own_rank

    def _invalidate(self) -> None:
        self.process_set_id = None
        self._own_rank = None


# The default of every operation; its ranks are known from init to shutdown.
global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def expect_world(size: int, rank: int) -> None:
    """The numbers of the global set until this rank joins the others."""
    global_process_set.ranks = list(range(size))
    global_process_set._register(0, rank)


def forget_world() -> None:
    """There is no world any more."""
    global_process_set._invalidate()
    global_process_set.process_set_id = 0
    global_process_set.ranks = []


class GroupTable:
    """The process sets registered with one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._sets: dict[int, ProcessSet] = {0: global_process_set}
        expect_world(engine.size, engine.rank)

    def add(self, sets: Sequence[ProcessSet]) -> None:
        """Registers the sets on all ranks at once; blocks until all ranks have asked for the same."""
        if not sets:
            return
        with self._lock:
            self._check(sets)
            splits: list[int] = []
            for process_set in sets:
                ranks = process_set.ranks or []
                splits += [len(ranks), *ranks]
            [handle] = self._engine.submit([Request(Kind.ADD_GROUP, splits=splits)], prompt=True)
            first = self._engine.wait(handle).value
            for number, process_set in enumerate(sets, first):
                process_set._register(number, self._engine.rank)
                self._sets[number] = process_set

    def remove(self, process_set: ProcessSet) -> bool:
        """Removes the set on all ranks; False for the global set and for one that is not registered."""
        with self._lock:
            number = process_set.process_set_id
            if number is None or number == 0 or self._sets.get(number) is not process_set:
                return False
            [handle] = self._engine.submit([Request(Kind.REMOVE_GROUP, splits=[number])], prompt=True)
            self._engine.wait(handle)
            del self._sets[number]
            process_set._invalidate()
            return True

    def members(self, process_set: ProcessSet) -> tuple[int, list[int]]:
        """The engine's number of the group, and its ranks; ValueError unless it is registered and has this rank."""
        if not isinstance(process_set, ProcessSet):
            raise TypeError(f"process_set={process_set!r}: expected a ProcessSet, as add_process_set returns it")
        number = process_set.process_set_id
        ranks = process_set.ranks
        if process_set is global_process_set and ranks:
            return 0, ranks
        if number is None or ranks is None or self._sets.get(number) is not process_set:
            raise ValueError(f"{process_set} is not registered; use init(process_sets=...) or add_process_set")
        if self._engine.rank not in ranks:
            raise ValueError(f"rank {self._engine.rank} is not in {process_set} and cannot take part")
        return number, ranks

    def find(self, ranks: Sequence[int]) -> ProcessSet | None:
        """The registered set of these ranks."""
        return next((known for known in self._sets.values() if known.ranks == list(ranks)), None)

    def numbered(self, number: int) -> list[int]:
        """The ranks of the set with this process_set_id. Raises ValueError if there is none."""
        found = self._sets.get(number)
        if found is None or found.ranks is None:
            raise ValueError(f"there is no process set with process_set_id={number}")
        return found.ranks

    def ranks_by_id(self) -> dict[int, list[int]]:
        """The ranks of every registered set, by process_set_id."""
        return {number: list(known.ranks or ()) for number, known in sorted(self._sets.items())}

    def clear(self) -> None:
        """Invalidates every set's object at shutdown."""
        for process_set in self._sets.values():
            process_set._invalidate()
        forget_world()

    def _check(self, sets: Sequence[ProcessSet]) -> None:
        known = [process_set.ranks for process_set in self._sets.values()]
        for process_set in sets:
            ranks = process_set.ranks
            if ranks is None:
                raise NotImplementedError("process sets made from MPI communicators are not supported: give the ranks")
            if not ranks:
                raise ValueError("a process set needs at least one rank")
            if ranks[0] < 0 or ranks[-1] >= self._engine.size or len(set(ranks)) != len(ranks):
                raise ValueError(
                    f"process set {ranks}: ranks must be different and between 0 and {self._engine.size - 1}"
                )
            if ranks in known:
                raise ValueError(f"a process set with the ranks {ranks} is already registered")
            known.append(ranks)


def as_sets(process_sets: Iterable[Any]) -> list[ProcessSet]:
    """Process sets from a mixture of sets and lists of ranks."""
    return [item if isinstance(item, ProcessSet) else ProcessSet(item) for item in process_sets]
