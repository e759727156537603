# Slots of an elastic job: Spark jobs of one task each, started again when they end, and the executors they run on.
# Touches Spark through session.py, and a thread.
"""No task waits for another, so Spark may lose executors and start new ones while the ranks continue."""

from __future__ import annotations

import threading
import time
from typing import Any

from farandole.launch.discovery import Discovery
from farandole.launch.hosts import Host
from farandole.spark import session
from farandole.spark.registry import TaskRegistry
from farandole.spark.task import TaskSettings

CHECK_SECONDS = 0.5  # between two checks for ended slots
LONGEST_PAUSE = 30.0  # the longest pause before a slot that keeps ending is requested again
GOOD_SECONDS = 10.0  # after this time the earlier ends of a slot do not count


class Executors(Discovery):
    """The hosts of an elastic job on Spark: its executors, each with one slot per task."""

    def __init__(self, registry: TaskRegistry) -> None:
        self._registry = registry

    def find(self) -> list[Host]:
        """The present executors."""
        return [Host(name, len(found)) for name, found in self._registry.slots().items()]


class _Slot:
    """One task that is requested from Spark repeatedly."""

    def __init__(self, holding: session.SlotJob) -> None:
        self.holding = holding
        self.since = time.monotonic()
        self.failures = 0
        self.again = 0.0  # when it is requested again; 0: it runs or is requested


class SlotKeeper:
    """Requests slots from Spark repeatedly, until stop()."""

    def __init__(self, spark: Any, count: int, settings: TaskSettings) -> None:
        self.last = ""  # why the last ended slot has ended
        self._failed_slots: set[int] = set()  # slots whose task reported an error
        self._spark = spark
        self._settings = settings
        self._tag = session.new_tag()
        self._stopping = threading.Event()
        self._slots = [_Slot(self._ask()) for _ in range(count)]
        self._thread = threading.Thread(target=self._run, name="farandole-spark-slots", daemon=True)
        self._thread.start()

    def why(self) -> Exception | None:
        """An error if Spark can never start a slot, else None."""
        return RuntimeError(self.last) if len(self._failed_slots) == len(self._slots) else None

    def stop(self) -> None:
        """Requests no more slots."""
        self._stopping.set()
        self._thread.join()

    def close(self, held: int) -> None:
        """Waits for the Spark jobs that ran; cancels the others, which have not started."""
        self.stop()
        deadline = time.monotonic() + session.RELEASE_SECONDS
        left = [slot.holding for slot in self._slots]
        while len(left) > len(self._slots) - held and time.monotonic() < deadline:
            left[0].join(0.05)
            left = [one for one in left if not one.over]
            left = left[1:] + left[:1]
        if left:
            session.interrupt(self._spark, self._tag)
        deadline = time.monotonic() + session.CANCEL_SECONDS
        for one in left:
            one.join(deadline - time.monotonic())

    def _ask(self) -> session.SlotJob:
        return session.SlotJob(self._spark, 1, self._settings, barrier=False, tag=self._tag)

    def _run(self) -> None:
        while not self._stopping.wait(CHECK_SECONDS):
            now = time.monotonic()
            for number, slot in enumerate(self._slots):
                if slot.again and now >= slot.again:
                    slot.holding, slot.since, slot.again = self._ask(), now, 0.0
                elif not slot.again and slot.holding.over:
                    self._lost(number, slot, now)

    def _lost(self, number: int, slot: _Slot, now: float) -> None:
        slot.failures = 1 if now > slot.since + GOOD_SECONDS else slot.failures + 1
        slot.again = now + min(LONGEST_PAUSE, 2.0 ** (slot.failures - 2))
        if slot.holding.task_error or slot.holding.error is not None:
            self.last = str(slot.holding.why())
        if slot.holding.task_error:
            self._failed_slots.add(number)
