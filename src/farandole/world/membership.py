# This rank as a member of an elastic job: its heartbeat, the driver's updates, and whether it must save or leave.
# Touches config, engine, errors and the status pages that launch/watch.py reads and writes.
"""`Notifications` has the elastic driver's updates; `Membership` decides whether this rank may join again."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from ..base import errors
from ..base.config import Config
from ..engine.interface import Engine
from ..engine.library import start_heartbeat
from ..rendezvous.elastic.policy import Times

if TYPE_CHECKING:
    from ..engine import bridge
    from ..rendezvous.messages import MembershipUpdate

DRAIN_S = 30.0  # for saving when the launcher has ended; --drain-timeout may end it earlier
SAVING_OFFSET = 8  # in the rank's status page; launch/watch.py reads it
LAUNCHER_GONE_OFFSET = 9  # in the agent's status page; launch/watch.py writes it
LAUNCHER_GONE_S = 10.0  # for the agent to see that the launcher has ended, after a rank has seen it


class Notifications:
    """The last membership update of the elastic driver for this generation. The session's thread writes it."""

    def __init__(self) -> None:
        self.losses = 0  # ranks that were lost while this process was in the job
        self._pending: tuple[int, int, float | None] = (0, 0, None)

    def pending(self) -> tuple[int, int, float | None]:
        """(stamp, result, deadline). result: workers leave (1), join (2), or both (3); (0, 0, None): no update.

        `deadline` (time.monotonic) is set when leaving workers want to save first. Other ranks may not have the update
        yet, so all act when the largest stamp of all ranks is not 0. A new generation starts without an update.
        """
        return self._pending

    def count_loss(self) -> None:
        """Called by the session when a rank was lost."""
        self.losses += 1

    def add_update(self, message: MembershipUpdate) -> None:
        """Called by the session with an update."""
        _, result, deadline = self._pending
        if message.drain_ms:
            deadline = time.monotonic() + message.drain_ms / 1000
        self._pending = (message.stamp, result | message.result, deadline)

    def drain(self, seconds: float) -> None:
        """Asks all ranks to leave."""
        self._pending = (self._pending[0] + 1, self._pending[1] | 1, time.monotonic() + seconds)

    def clear(self) -> None:
        """A new generation begins."""
        self._pending = (0, 0, None)


class Membership:
    """What this process must do before it leaves an elastic job, and whether it may join again.

    In a job that is not elastic, it does nothing.
    """

    def __init__(self) -> None:
        self.notifications = Notifications()
        self.active = False  # this process is in a generation, and is not leaving it
        self._config: Config | None = None  # from init to shutdown
        self._heartbeat: bridge.Heartbeat | None = None
        self._saving = False  # something must be saved before this process leaves
        self._asked_to_leave = False  # by SIGTERM
        self._saved = False  # all ranks have saved since then

    @property
    def _elastic(self) -> bool:
        return self._config is not None and self._config.worker >= 0

    def opened(self, config: Config) -> None:
        """init has succeeded."""
        self._config = config
        self.active = True

    def closed(self) -> None:
        """shutdown has ended; the heartbeat stops."""
        self._config = None
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    def begin(self, config: Config) -> None:
        """This process tries to join a generation: its heartbeat starts."""
        self.notifications.clear()
        if config.pulse_fd is not None and self._heartbeat is None:
            beat = int(Times(config.suspect_seconds).heartbeat * 1000)
            self._heartbeat = start_heartbeat(config.pulse_fd, config.agent_pulse_fd, beat, config.library)
            os.pwrite(config.pulse_fd, bytes([self._saving]), SAVING_OFFSET)

    def guard(self, engine: Engine, config: Config) -> None:
        """From now on the heartbeat's thread revokes the generation when the agent is silent."""
        if self._heartbeat is not None:
            self._heartbeat.guard(engine, int(Times(config.suspect_seconds).revoke * 1000))

    def unguard(self) -> None:
        """The engine is about to be closed."""
        if self._heartbeat is not None:
            self._heartbeat.guard(None)

    def joined(self) -> None:
        """The generation has started for this rank."""
        self._saved = False
        if self._asked_to_leave:  # a rank was lost before all had saved
            self.notifications.drain(DRAIN_S)

    def how_to_leave(self) -> int:
        """What `World.close` tells the elastic driver about this rank at a reset."""
        if not self._saved:
            return 1
        return 2 if self._asked_to_leave else 3

    def check_may_join(self) -> None:
        """Raises Removed if there is no job for this process any more."""
        if self._launcher_gone():
            raise errors.Removed("the launcher has ended")
        if self._asked_to_leave and self._saved:
            raise errors.Removed("it was asked to leave (SIGTERM)")

    def set_saving(self, saving: bool) -> None:
        """Sets whether this rank must save before it leaves: when the launcher has ended, or at SIGTERM.

        SIGTERM then makes all ranks save at a step on which they agree, and this rank leaves.
        """
        self._saving = saving
        main = threading.current_thread() is threading.main_thread()
        if saving and main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and self._elastic:
            signal.signal(signal.SIGTERM, self._on_sigterm)
        if self._config is not None and (fd := self._config.pulse_fd) is not None:
            os.pwrite(fd, bytes([saving]), SAVING_OFFSET)

    def set_saved(self) -> None:
        """All ranks have saved: a rank that was asked to leave does so at the next reset."""
        self._saved = True

    def _on_sigterm(self, _number: int, _frame: Any) -> None:
        self._asked_to_leave = True
        self.notifications.drain(DRAIN_S)

    def hub_lost(self, engine: Engine, reason: str) -> None:
        """The connection to the launcher of an elastic job has ended.

        If the launcher has ended, ranks that must save do so at a step on which all agree. If it still runs, it has
        closed the connection, as it does with a silent rank; then this rank joins again.
        """
        deadline = time.monotonic() + LAUNCHER_GONE_S
        while self._saving and self.active and time.monotonic() < deadline:
            if self._launcher_gone():
                self.notifications.drain(DRAIN_S)
                return
            time.sleep(0.01)  # until the agent, another process, has seen it too
        engine.revoke(errors.ABORTED, -1, f"the connection to the launcher was lost: {reason}")

    def _launcher_gone(self) -> bool:
        """Whether this host's agent has seen the end of the launcher."""
        fd = self._config.agent_pulse_fd if self._config is not None else None
        return fd is not None and os.pread(fd, 1, LAUNCHER_GONE_OFFSET) == b"\1"

    def after_fork(self) -> None:
        """In a forked child: data loaders and pools end their children with SIGTERM, which must end them."""
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
