# Time in tests: waiting for events, checking time limits, measuring the load of the machine.
# Touches the clocks, and /proc for CPU time and for the children of this process.
"""`until(ready)` waits for an event; `in_time(took, limit, what)` checks a time limit.

A test that was too slow while other programs used the machine is repeated (tests/conftest.py uses `again_when_busy`).
Each such try is printed, and the last lines of the run count them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

TRIES = 3  # of a test, if each was too slow on a busy machine
PATIENT = 5.0  # a wait of at least this many seconds is extended on a busy machine
BUSY = 0.2  # the machine is busy if other programs used at least this part of its CPU time
STOLEN = 0.05  # the same for time that the host of a virtual machine gave to others
T = TypeVar("T")
repeated: list[str] = []  # tries of tests that were too slow on a busy machine; conftest.py prints them at the end


def until(
    ready: Callable[[], T],
    timeout: float = 60.0,
    what: str | Callable[[], object] = "it",
    alive: Callable[[], bool] = lambda: True,
    every: float = 0.005,
) -> T:
    """Waits until `ready()` returns something true, and returns it. Raises TimeoutError with `what` after `timeout`
    seconds, or if it cannot happen any more because `alive()` is false. A timeout of some seconds is longer while other
    programs use the machine, because the test does not check a time."""
    began, turn = Moment.now(), 1
    while not (found := ready()):
        living = alive()
        late = time.monotonic() - began.wall > turn * timeout
        if late and living and timeout >= PATIENT and turn < TRIES and (spent := began.since()).busy:
            turn += 1
            repeated.append(f"an event did not come within {timeout:g} s; {spent}")
        elif living and not late:
            time.sleep(every)  # sleep: between two checks; all other code that polls calls this function
        elif not (found := ready()):  # it may have become ready just before the end
            text = what if isinstance(what, str) else str(what())
            end = f"within {timeout:g} s" if living else "before the end"
            raise TimeoutError(f"did not come about {end}: {text}")
        else:
            break
    return found


def this_process() -> str:
    """The id of this process and its start time in ticks since boot: together they identify it uniquely."""
    return f"{os.getpid()}-{_started(os.getpid())}"


def lives(name: str) -> bool:
    """Whether the process with this id and start time still exists."""
    pid, _, started = name.partition("-")
    return _started(int(pid)) == started


def _started(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


class TooSlow(AssertionError):
    """The result was right, but too late."""


def in_time(took: float, limit: float, what: str) -> None:
    """Raises TooSlow if `took` seconds are more than `limit`."""
    if took > limit:
        raise TooSlow(f"{what} took {took:.3f} s; the limit is {limit:g} s")


@dataclass(frozen=True)
class Moment:
    """The time, and CPU seconds: of this process with its children (`own`), of all processes (`used`), and those that
    the host of a virtual machine gave to others (`stolen`)."""

    wall: float
    own: float
    used: float
    stolen: float

    @staticmethod
    def now() -> Moment:
        ticks = os.sysconf("SC_CLK_TCK")
        user, nice, system, _idle, _io, interrupts, softly, stolen = (
            int(word) / ticks for word in Path("/proc/stat").read_text().split()[1:9]
        )
        return Moment(time.monotonic(), _own_seconds(), user + nice + system + interrupts + softly, stolen)

    def since(self) -> Spent:
        now = Moment.now()
        own = max(0.0, now.own - self.own)
        others = max(0.0, now.used - self.used - own)
        return Spent(now.wall - self.wall, own, others, now.stolen - self.stolen, os.cpu_count() or 1)


@dataclass(frozen=True)
class Spent:
    """Time and CPU seconds between two moments."""

    wall: float
    own: float
    others: float
    stolen: float
    cores: int

    @property
    def busy(self) -> bool:
        """Whether other programs used so much CPU time that this explains the delay."""
        whole = self.wall * self.cores
        return self.others + self.stolen > BUSY * whole or self.stolen > STOLEN * whole

    def __str__(self) -> str:
        whole = max(1e-9, self.wall * self.cores)
        return (
            f"{self.wall:.2f} s, {self.own:.2f} CPU s in the test's processes; of the CPU time of {self.cores} cores "
            f"{self.others / whole:.0%} went to others and {self.stolen / whole:.0%} was stolen; load "
            + " ".join(f"{load:.1f}" for load in os.getloadavg())
        )


def _own_seconds() -> float:
    """The CPU time of this process, of children that it has reaped, and of all living descendants."""
    times = os.times()
    found = times.user + times.system + times.children_user + times.children_system
    ticks, below = os.sysconf("SC_CLK_TCK"), children_of(os.getpid())
    for pid in below:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found += sum(map(int, fields[11:15])) / ticks
            below += children_of(pid)
    return found


def children_of(pid: int) -> list[int]:
    """The child processes of `pid`, including dead ones that are not reaped. Most kernels list them; otherwise every
    process of the machine must be read, which takes longer than most tests."""
    found: list[int] = []
    if _kernel_lists_children():
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):  # the thread has ended
                    found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
        return found
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry))
    return found


@functools.cache
def _kernel_lists_children() -> bool:
    return Path(f"/proc/self/task/{os.getpid()}/children").exists()


def again_when_busy(test: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """The test, repeated if it was too slow on a busy machine and if `seconds` leave time for another try."""

    @functools.wraps(test)
    def tries(**fixtures: Any) -> Any:
        began = time.monotonic()
        for turn in range(TRIES):
            before = Moment.now()
            try:
                return test(**fixtures if turn == 0 else fresh(fixtures, turn))
            except TooSlow as error:
                spent = before.since()
                print(f"try {turn + 1}: {error}; {spent}", flush=True)
                late = time.monotonic() - began + 1.5 * spent.wall > seconds
                if turn == TRIES - 1 or late or not spent.busy:
                    raise
                repeated.append(f"{error}; {spent}")
        raise AssertionError("not reached")

    return tries


def fresh(fixtures: dict[str, Any], turn: int) -> dict[str, Any]:
    """The same fixtures, with another directory."""
    if "tmp_path" not in fixtures:
        return fixtures
    path = fixtures["tmp_path"] / f"again{turn}"
    path.mkdir()
    return {**fixtures, "tmp_path": path}
