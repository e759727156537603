# The elastic driver at work: the hub that its messages go through, the loop that runs both, and who carries it out.
# Touches the hub of rendezvous/ and, where the caller has no loop, a thread; decides nothing itself.
"""`ElasticHub(driver, secret, addresses, launcher)` calls a method of `launcher` for each action of the driver.

`farandole run`, Spark, the Ray executor and Ray Train have launchers of their own; all else is the same for them.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

from farandole.base.version import package_version
from farandole.rendezvous.elastic.driver import ElasticDriver
from farandole.rendezvous.elastic.members import Drop, Kill, Over, Say, Start
from farandole.rendezvous.flow import Loop
from farandole.rendezvous.hub import Hub
from farandole.rendezvous.phases import Sends
from farandole.rendezvous.secret import Secret


class Launcher(Protocol):
    """Carries out what the driver decides. The methods are called on the loop's thread."""

    def start_worker(self, start: Start) -> None:
        """Starts a worker in a slot."""
        ...

    def kill_worker(self, worker: int) -> None:
        """Kills the process of a worker, if it still runs."""
        ...

    def say(self, text: str) -> None:
        """Tells the user."""
        ...

    def job_over(self, over: Over) -> None:
        """The job has ended."""
        ...


class ElasticHub:
    """Listens from construction on; answers between start() and close()."""

    def __init__(
        self,
        driver: ElasticDriver,
        secret: Secret,
        addresses: Sequence[str],
        launcher: Launcher,
        loop: Loop | None = None,
    ) -> None:
        """`loop`: its thread does the work, and the caller turns it; None: a thread of our own."""
        self.driver = driver
        self.secret = secret
        self.broken = ""  # the traceback of an error that ended our own thread
        self._launcher = launcher
        self._own_loop = Loop() if loop is None else None
        self._loop = self._own_loop or loop
        self._closing = False
        self._thread: threading.Thread | None = None
        size = driver.state.limits.np
        self._hub = Hub(secret, size, addresses, package_version(), driver, self._loop, self._act)

    @property
    def addresses(self) -> list[str]:
        """The addresses at which the hub listens."""
        return self._hub.addresses

    @property
    def refused(self) -> int:
        """How many connections did not authenticate."""
        return self._hub.refused

    def start(self, on_agent: Callable[[int], None] = lambda number: None) -> None:
        """Starts to answer. `on_agent(number)` is called when an agent connects to check the address."""
        self._hub.on_agent = on_agent
        self._hub.start()
        if self._own_loop is not None:
            self._thread = threading.Thread(target=self._run, name="farandole-elastic-hub", daemon=True)
            self._thread.start()

    def call(self, decide: Callable[[float], Sends]) -> None:
        """Calls `decide(now)` soon on the loop's thread and sends what it returns. Safe from any thread."""
        assert self._loop is not None
        self._loop.call(lambda: self.deliver(decide(time.monotonic())))

    def deliver(self, sends: Sends) -> None:
        """Sends the messages of the driver. Called on the loop's thread."""
        self._hub.deliver(sends)

    def hosts_found(self, found: Sequence[tuple[str, int]], in_use: Callable[[str], bool], by: str) -> list[str]:
        """Discovery (`by`) names these hosts and their slots. Called on the loop's thread.

        A host that it does not name any more is forgotten as soon as it is not in use. Returns these hosts.
        """
        hosts = self.driver.state.hosts
        self.deliver(self.driver.hosts_found(found, time.monotonic()))
        forgotten = []
        for name in [name for name, host in hosts.items() if not host.listed]:
            if not in_use(name):
                # Workers may wait to be started there.
                self.deliver(self.driver.host_lost(name, f"{by} does not list it any more", time.monotonic()))
                del hosts[name]
                forgotten.append(name)
        return forgotten

    def close(self) -> None:
        """Ends the hub. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        if self._own_loop is not None:
            self._own_loop.call(lambda: None)
        if self._thread is not None:
            self._thread.join()
        self._hub.close()
        if self._own_loop is not None:
            self._own_loop.close()

    def _run(self) -> None:
        assert self._own_loop is not None
        try:
            while not self._closing:
                self._own_loop.turn()
        except Exception:
            self.broken = traceback.format_exc()

    def _act(self) -> None:
        for action in self.driver.take_actions():
            if isinstance(action, Drop):
                self._hub.drop(action.member)
            elif isinstance(action, Start):
                self._launcher.start_worker(action)
            elif isinstance(action, Kill):
                self._launcher.kill_worker(action.worker)
            elif isinstance(action, Say):
                self._launcher.say(action.text)
            else:
                self._launcher.job_over(action)
