# The connections to the agents of a job, by host.
# Touches processes and sockets through agent_connection.py.
"""`Agents` opens, ends and reaps connections, and sends signals to all ranks through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from farandole.launch import ssh
from farandole.launch.agent_connection import AgentConnection, Bridge
from farandole.rendezvous import agent_messages
from farandole.rendezvous.flow import Loop
from farandole.rendezvous.secret import Secret


class Agents:
    """`on_report(connection, report)` and `lost(connection, reason)` are called in the loop."""

    def __init__(
        self,
        loop: Loop,
        connector: ssh.SshOptions | Bridge,
        secret: Secret,
        on_report: Callable[[AgentConnection, Any], None],
        lost: Callable[[AgentConnection, str], None],
    ) -> None:
        self.loop = loop
        self.secret = secret
        self.connector = connector
        self.connections: dict[str, AgentConnection] = {}  # host -> its connection; "" is this machine
        self._on_report = on_report
        self._lost = lost
        self._dropped: list[AgentConnection] = []  # their processes are not reaped yet

    def connect(self, host: str, name: str) -> AgentConnection:
        """Starts the agent of a host ("" is this machine); `name` is its key in `connections`. May raise StartError."""
        connection = self.connections[name] = AgentConnection(
            self.loop, host, self.connector, self.secret, self._on_report, self._lost
        )
        return connection

    def drop(self, name: str) -> None:
        """Ends a connection. The process is reaped later, so that the launcher does not wait for it."""
        connection = self.connections.pop(name, None)
        if connection is not None:
            connection.cut()
            self._dropped.append(connection)

    def reap(self) -> None:
        """Closes the dropped connections whose process has ended; the others would block the loop."""
        for connection in [connection for connection in self._dropped if connection.over]:
            self._dropped.remove(connection)
            connection.close()

    def signal_all(self, number: int) -> None:
        """Sends a signal to all ranks."""
        for connection in self.connections.values():
            connection.send(agent_messages.Signal(agent_messages.ALL, number, 1))

    def cut_all(self) -> None:
        """Ends all connections; each agent then kills everything on its host. Safe from any thread."""
        for connection in [*self.connections.values(), *self._dropped]:
            connection.cut()

    def close(self) -> list[str]:
        """Waits until nothing is left on the hosts. Returns the names of hosts that did not answer."""
        lost = [connection.name for connection in self.connections.values() if not connection.close()]
        for connection in self._dropped:
            connection.close()
        self._dropped.clear()
        return lost
