# Ranks that another program starts with the address of a RendezvousServer: the plan with their ranks, and their store.
# Touches the key-value store of rendezvous/key_value.py.
"""Keys of the store: "plan" names the newest plan, "slot N of PLAN" the numbers of rank N; rank 0 adds its endpoint."""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

from farandole.clusters.cluster_rank import ClusterError, ClusterRank, Environ, number, value
from farandole.clusters.endpoint import Endpoint, decode
from farandole.clusters.mpi import Ancestors
from farandole.rendezvous.key_value import KeyValueClient

ADDRESS, PORT, KEY = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", "_HOROVOD_SECRET_KEY"
TITLE = "a RendezvousServer"
ASK_SECONDS = 0.5  # for one question; the server keeps the request open for this time while it has no answer
PAUSE = 0.05  # before the next request, if the answer was another one


def detect(environ: Environ, host: str, ancestors: Ancestors) -> ClusterRank | None:
    """A rank with the address and the port of such a server. Our own launchers set the address alone."""
    if value(environ, PORT) is None:
        return None
    port = number(TITLE, environ, PORT)
    address = value(environ, ADDRESS)
    if address is None:
        raise ClusterError(f"{PORT} is set, but {ADDRESS} is not")
    read_key(environ)  # checks it before the server is asked
    rank, size = number(TITLE, environ, "HOROVOD_RANK"), number(TITLE, environ, "HOROVOD_SIZE")
    # The server says how many ranks this host has, and which of them this process is.
    return ClusterRank(
        "server", TITLE, rank, size, 0, None, host, f"{TITLE} {address}:{port}", store=f"{address}:{port}"
    )


def read_key(environ: Environ) -> bytes:
    """The key in base64, 32 bytes; ClusterError without one."""
    text = value(environ, KEY)
    if text is None:
        raise ClusterError(
            f"{ADDRESS} is set, but {KEY} is not: ranks join only where they can prove that they belong together. "
            f"Give each rank the value of {KEY} that the process with the RendezvousServer has"
        )
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != 32:
        raise ClusterError(f"{KEY}: expected 32 bytes in base64, as RendezvousServer makes them")
    return key


def words_of_plan(plan: int, slots: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """The server's table: (host name, rank, size, local rank, local size, cross rank, cross size) of each rank."""
    return {"plan": {"number": plan, "size": len(slots)}} | {f"slot {slot[1]} of {plan}": list(slot) for slot in slots}


def read_plan(found: ClusterRank, environ: Environ, deadline: float) -> tuple[ClusterRank, ServerStore, bytes]:
    """Waits for a plan with this number of ranks. Returns this rank's numbers, the plan's store, and the key."""
    host, _, port = found.store.rpartition(":")
    key = read_key(environ)
    client = KeyValueClient([(host, int(port))], key)
    problem = "it has no plan yet"
    while True:
        try:
            plan = client.wait("plan", ASK_SECONDS)
            if plan["size"] == found.size:
                slot = client.wait(f"slot {found.rank} of {plan['number']}", ASK_SECONDS)
                break
            problem = f"its plan is for {plan['size']} ranks"
        except TimeoutError:
            pass
        except OSError as error:
            problem = str(error)
        if time.monotonic() > deadline:
            raise ClusterError(
                f"rank {found.rank} of {found.size} cannot join through the RendezvousServer at {found.store}: "
                f"{problem}"
            )
        time.sleep(PAUSE)
    name, _, _, local_rank, local_size, _, _ = slot
    own_rank = dataclasses.replace(
        found,
        hostname=str(name),
        local_rank=int(local_rank),
        local_size=int(local_size),
        key=f"{found.key} {plan['number']}",
    )
    return own_rank, ServerStore(client, found.store, int(plan["number"])), key


class ServerStore:
    """The endpoint is in the server's store; it holds no secret, since all ranks have the key."""

    def __init__(self, client: KeyValueClient, address: str, plan: int) -> None:
        self.location = f"the RendezvousServer at {address}"
        self._client = client
        self._name = f"endpoint of {plan}"

    def publish(self, endpoint: Endpoint) -> None:
        self._client.put(self._name, json.loads(endpoint.encode()))

    def read(self) -> Endpoint | None:
        try:
            entry = self._client.wait(self._name, ASK_SECONDS)
        except TimeoutError:
            return None
        except OSError as error:
            raise ClusterError(f"{self.location} does not answer any more: {error}") from None
        found = None if entry is None else decode(json.dumps(entry).encode())
        return None if found is not None and found.owner.has_ended() else found

    def stop_reading(self) -> None:
        pass

    def withdraw(self) -> None:
        with contextlib.suppress(OSError):  # the server has ended, and the endpoint with it
            self._client.put(self._name, None)
