# The rendezvous of an elastic job on Ray: the elastic driver, its hub, and the thread that runs both.
# Touches the hub of rendezvous/ and a thread; decides nothing itself.
"""`ElasticHub(limits, nics, act)` calls `act`, on the loop's thread, for each action that the driver decides."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

from farandole.base.version import package_version
from farandole.launch import environment
from farandole.launch.slots import Place
from farandole.ray.rendezvous import listen_at
from farandole.rendezvous.elastic.driver import ElasticDriver
from farandole.rendezvous.elastic.members import Act, Drop, Start
from farandole.rendezvous.elastic.policy import Limits
from farandole.rendezvous.flow import Loop
from farandole.rendezvous.hub import Hub
from farandole.rendezvous.rounds import Sends
from farandole.rendezvous.secret import Secret


class ElasticHub:
    """Listens from construction on; answers between start() and close()."""

    def __init__(self, limits: Limits, nics: Any, act: Callable[[Act], None]) -> None:
        self.driver = ElasticDriver(limits, package_version())
        self.secret = Secret.create()
        self.broken = ""  # the traceback of an error that ended the thread
        self._act = act
        self._loop = Loop()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._hub = Hub(
            self.secret, limits.np, listen_at(nics), package_version(), self.driver, self._loop, self._after
        )

    @property
    def addresses(self) -> list[str]:
        """The addresses at which the hub listens."""
        return self._hub.addresses

    def start(self) -> None:
        """Starts to answer."""
        self._hub.start()
        self._thread = threading.Thread(target=self._run, name="farandole-ray-meeting", daemon=True)
        self._thread.start()

    def call(self, act: Callable[[], None]) -> None:
        """Calls `act` soon on the loop's thread. Safe from any thread."""
        self._loop.call(act)

    def deliver(self, sends: Sends) -> None:
        """Sends the messages of the driver. Called on the loop's thread."""
        self._hub.deliver(sends)

    def variables(self, start: Start, node: str) -> dict[str, str]:
        """The variables that tell a worker its number. It gets its rank of a generation when it joins."""
        place = Place(*start.place, node)
        told = environment.of_place(place, ("", 0))
        # Without the address of rank 0, because rank 0 changes: torch.distributed uses our rendezvous.
        given = {name: value for name, value in told.items() if not name.startswith("MASTER_")}
        return {**given, "FARANDOLE_ELASTIC": "1", "HOROVOD_ELASTIC": "1", "FARANDOLE_WORKER": str(start.worker)}

    def close(self) -> None:
        """Ends the hub. A second call does nothing."""
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
        for act in self.driver.take_acts():
            if isinstance(act, Drop):
                self._hub.drop(act.member)
            else:
                self._act(act)
