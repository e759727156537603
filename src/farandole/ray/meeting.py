# The meeting point of an elastic job on Ray: the coordinator, its hub, and the one thread that turns them.
# Touches the hub of rendezvous/ and a thread; decides nothing itself.
"""`Meeting(limits, nics, act)`: `act` is called for each thing that the coordinator wants done, in the loop."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

from farandole.elastic.coordinator import Coordinator
from farandole.elastic.members import Act, Drop
from farandole.elastic.policy import Limits
from farandole.launch import environment
from farandole.launch.slots import Place
from farandole.ray.rendezvous import listen_at
from farandole.rendezvous.flow import Loop
from farandole.rendezvous.hub import Hub
from farandole.rendezvous.rounds import Sends
from farandole.rendezvous.secret import Secret
from farandole.version import package_version


class Meeting:
    """Listens from construction on, works between start() and close()."""

    def __init__(self, limits: Limits, nics: Any, act: Callable[[Act], None]) -> None:
        self.coordinator = Coordinator(limits, package_version())
        self.secret = Secret.create()
        self.broken = ""  # what the thread fell over
        self._limits = limits
        self._act = act
        self._loop = Loop()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._hub = Hub(
            self.secret, limits.np, listen_at(nics), package_version(), self.coordinator, self._loop, self._after
        )

    @property
    def addresses(self) -> list[str]:
        """Where the hub listens."""
        return self._hub.addresses

    def start(self) -> None:
        """Begins to answer."""
        self._hub.start()
        self._thread = threading.Thread(target=self._run, name="farandole-ray-meeting", daemon=True)
        self._thread.start()

    def call(self, act: Callable[[], None]) -> None:
        """Calls `act` in the loop, soon. Safe from any thread."""
        self._loop.call(act)

    def deliver(self, sends: Sends) -> None:
        """Sends what the coordinator has decided. In the loop."""
        self._hub.deliver(sends)

    def variables(self, worker: int, node: str, index: int, slots: int) -> dict[str, str]:
        """What tells a worker who it is; its rank it hears when it joins."""
        np = self._limits.np
        place = Place(min(worker, np - 1), np, index, max(slots, index + 1), 0, 1, node)
        told = environment.of_place(place, ("", 0))
        # Rank 0 changes: torch.distributed meets where the ranks do.
        given = {name: value for name, value in told.items() if not name.startswith("MASTER_")}
        return {**given, "FARANDOLE_ELASTIC": "1", "HOROVOD_ELASTIC": "1", "FARANDOLE_WORKER": str(worker)}

    def close(self) -> None:
        """Ends it. Calling it again does nothing."""
        if self._closing:
            return
        self._closing = True
        self._loop.call(lambda: None)
        if self._thread is not None:
            self._thread.join()
        self._hub.close()
        self._loop.close()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._loop.turn()
        except Exception:
            self.broken = traceback.format_exc()

    def _after(self) -> None:
        for act in self.coordinator.take_acts():
            if isinstance(act, Drop):
                self._hub.drop(act.member)
            else:
                self._act(act)
