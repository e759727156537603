# A worker of `run` and `Executor`: waits for functions, calls them, and sends their results back.
# Touches the channel that its agent gave it.
"""`main()` runs in each rank. Modules and globals that a function changes stay changed until the job ends."""

from __future__ import annotations

import signal
import sys
import time

from farandole.base.config import Config
from farandole.base.errors import Removed
from farandole.launch import calls
from farandole.rendezvous import agent_messages, sockets
from farandole.rendezvous.channel import Channel
from farandole.rendezvous.flow import Loop
from farandole.rendezvous.handshake import NOBODY, Greeting, Role, call
from farandole.rendezvous.secret import Secret

GREETING_SECONDS = 60.0
MAX_UNSENT_BYTES = 1 << 20


class Worker:
    """Runs calls one after the other on the main thread, because frameworks expect to run there."""

    def __init__(self, config: Config) -> None:
        assert config.calls_fd is not None and config.secret_fd is not None
        self.rank = config.worker if config.worker >= 0 else config.rank  # the number that its agent uses for it
        self._loop = Loop()
        self._calls: list[tuple[int, bytes]] = []
        self._parts = calls.Assembly()
        self._over = False
        self._dismissed: int | None = None  # the exit code to end with
        self._reason = ""
        sock = sockets.inherited(config.calls_fd)
        me = Greeting(Role.WORKER, self.rank, NOBODY)
        flow = call(sock, Secret.read(config.secret_fd), me, Role.HUB)
        proven = self._loop.finish(flow, time.monotonic() + GREETING_SECONDS)
        self._channel = Channel(self._loop, sock, proven, self._on_call_piece, self._ended, codec=agent_messages)

    def run(self) -> None:
        """Runs calls until the agent closes the channel."""
        while not self._over:
            # Ctrl-C is for functions; between two functions this process ignores it.
            self._loop.turn()
            while self._calls:
                number, data = self._calls.pop(0)
                self._reply(number, *self._call(data))
            if self._dismissed is not None:
                sys.exit(self._dismissed)
        # At the end of a job this process is killed. The user reads this text only after another failure.
        sys.exit(f"farandole: the channel for calls has ended: {self._reason}")

    def _on_call_piece(self, piece: agent_messages.Call) -> None:
        self._channel.send(agent_messages.CallCredit(self.rank))
        data = self._parts.add(piece)
        if data is not None and piece.kind == agent_messages.END:
            self._dismissed = int(bool(data))
        elif data is not None:
            self._calls.append((piece.call, data))

    def _ended(self, reason: str) -> None:
        self._over = True
        self._reason = reason

    def _call(self, data: bytes) -> tuple[int, bytes]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            path, function, args, kwargs = calls.unpack(data)
            sys.path.extend(entry for entry in path if entry not in sys.path)
            value = calls.unpack(function)(*args, **kwargs)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return calls.RESULT, calls.pack(value)
        except Removed:
            raise  # an elastic job has no slot for this process any more
        except BaseException as error:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return calls.ERROR, calls.pack_error(error)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def _reply(self, number: int, kind: int, data: bytes) -> None:
        for piece in calls.cut(self.rank, number, kind, data):
            self._channel.send(piece)
            while self._channel.backlog > MAX_UNSENT_BYTES and not self._over:
                self._loop.turn()
        while self._channel.backlog and not self._over:
            self._loop.turn()


def main() -> None:
    """`python -c` runs this function in each rank of an executor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Worker(Config.from_environment()).run()
