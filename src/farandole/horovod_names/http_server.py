# horovod.runner.http.http_server: the rendezvous of ranks that the master process of another system starts.
# Serves a key-value store (rendezvous/key_value.py); sets the variable with its key for processes started from here.
"""A master starts `RendezvousServer`, gives it the slots, and starts ranks with the address, the port and the key."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from typing import Any

from farandole.bindings.compat import make_secret_key
from farandole.clusters.server import read_key, words_of_plan
from farandole.horovod_names.hosts import SlotInfo
from farandole.horovod_names.secret import HOROVOD_SECRET_KEY
from farandole.rendezvous.key_value import KeyValueServer

OK, BAD_REQUEST, TIMEOUT = 200, 400, 408


class RendezvousHandler:
    """Horovod's server needs such a class. Here it is only a name: the key-value store answers clients with the key."""


class RendezvousServer:
    """The rendezvous server of a job. Its key is `_HOROVOD_SECRET_KEY` of this process; it is made if missing."""

    def __init__(self, verbose: int = 0) -> None:
        self._server: KeyValueServer | None = None
        self._plans = 0

    def start(self, handler_cls: type = RendezvousHandler) -> int:
        """Starts to answer. Returns the port."""
        if not issubclass(handler_cls, RendezvousHandler) or handler_cls.__dict__.keys() & {"do_GET", "do_PUT"}:
            raise ValueError(
                f"handler_cls={handler_cls.__name__}: handlers of HTTP are not served here. Ranks prove the key in "
                f"{HOROVOD_SECRET_KEY} and then get their numbers; for ranks that come and go there is `farandole run`"
            )
        if self._server is None:
            # In a variable, so that processes that this one starts inherit it, as in Horovod.
            key = base64.b64encode(make_secret_key()).decode()
            self._server = KeyValueServer(
                read_key({HOROVOD_SECRET_KEY: os.environ.setdefault(HOROVOD_SECRET_KEY, key)})
            )
        return self._server.port

    def init(self, host_alloc_plan: Sequence[SlotInfo]) -> None:
        """Uses these slots from now on. Ranks of an earlier plan cannot join any more."""
        if self._server is None:
            raise RuntimeError("the server has not been started: call start() first")
        self._plans += 1
        self._server.replace(words_of_plan(self._plans, [_numbers(one) for one in host_alloc_plan]))

    def stop(self) -> None:
        """Stops answering. Ranks that have joined continue."""
        if self._server is not None:
            self._server.close()
            self._server = None

    @property
    def port(self) -> Any:
        """The port at which it answers; None before start()."""
        return None if self._server is None else self._server.port


def _numbers(slot: SlotInfo) -> tuple[Any, ...]:
    return (
        *(slot.hostname, slot.rank, slot.size),
        *(slot.local_rank, slot.local_size, slot.cross_rank, slot.cross_size),
    )
