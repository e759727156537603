# Which of several addresses leads to the hub of this job: found by trying, not by guessing.
# Touches sockets through handshake.
"""An address counts only if whoever answers there proves the job's secret."""

from __future__ import annotations

import time
from collections.abc import Sequence

from farandole.rendezvous import sockets
from farandole.rendezvous.flow import Flow, Loop
from farandole.rendezvous.handshake import NOBODY, Greeting, Role, call
from farandole.rendezvous.secret import Secret


def reach(addresses: Sequence[str], secret: Secret, seconds: float) -> tuple[str | None, str]:
    """Tries all addresses at once: the first where the hub of this job answers, or None and why not."""
    loop = Loop()
    found: list[str] = []
    reasons: list[str] = []
    deadline = time.monotonic() + seconds

    def spawn(address: str) -> None:
        def done(result: bool | None, error: Exception | None) -> None:
            if result:
                found.append(address)
            else:
                reasons.append(f"{address}: {sockets.explain(error or EOFError())}")

        loop.spawn(knock(address, secret), deadline, done)

    try:
        for address in addresses:
            spawn(address)
        while not found and len(reasons) < len(addresses):
            loop.turn(deadline)
    finally:
        loop.close()
    return (found[0] if found else None), "; ".join(reasons)


def knock(address: str, secret: Secret, agent: int = 0) -> Flow[bool]:
    """True when the hub of this job answers there; an error otherwise. It hears which `agent` it is."""
    sock = yield from sockets.connect(address)
    try:
        yield from call(sock, secret, Greeting(Role.AGENT, agent, NOBODY), Role.HUB)
    finally:
        sock.close()
    return True
