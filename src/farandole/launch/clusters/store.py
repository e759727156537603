# The board of torchrun: its key-value store, used for the secret only when a rank cannot see rank 0's home directory.
# Touches torch.distributed, which is loaded only here, and connects to torchrun's store; never binds a port.
"""Whoever reaches the store's port can read it: ranks first say whether they see the file at home."""

from __future__ import annotations

import contextlib
import logging
import time
from datetime import timedelta
from typing import Any

from farandole.launch.clusters.boards import Board, FileBoard
from farandole.launch.clusters.found import ClusterError, Found
from farandole.launch.clusters.invitation import Invitation, decode

HOME_SECONDS = 3.0  # a file that rank 0 has written is seen within this time, or the home is not shared
PAUSE = 0.02

log = logging.getLogger("farandole.launch")


class StoreBoard:
    """torchrun's store, and the file in the home directory beside it."""

    def __init__(self, found: Found, home: FileBoard, deadline: float) -> None:
        from torch.distributed import PrefixStore, TCPStore

        host, _, port = found.store.rpartition(":")
        self.place = f"torchrun's store at {found.store}"
        self._found = found
        self._home = home
        self._deadline = deadline
        # The store is torchrun's: this is a client, whatever our rank.
        store = TCPStore(host, int(port), is_master=False, timeout=self._patience(), wait_for_workers=False)
        self._store: Any = PrefixStore(f"farandole/{found.name}", store)
        self._way: Board | None = None  # for the others: where they see it

    def pin(self, invitation: Invitation) -> None:
        if self._way is None:
            self._way = self._home if self._pin_at_home(invitation) else self
        if self._way is self._home:
            self._home.pin(invitation)
        else:
            self._store.set("invitation", invitation.encode())

    def look(self) -> Invitation | None:
        if self._way is None and self._store.check(["nonce"]):
            nonce = self._store.get("nonce").decode()
            self._way = self._home if self._see(nonce) else self
            self._store.set(f"sees/{nonce}/{self._found.rank}", b"1" if self._way is self._home else b"0")
        if self._way is self._home:
            return self._home.look()
        return decode(self._store.get("invitation")) if self._store.check(["invitation"]) else None

    def met(self) -> None:
        pass

    def take_down(self) -> None:
        self._home.take_down()
        with contextlib.suppress(RuntimeError):  # torchrun may be gone already
            for key in ("nonce", "invitation"):
                self._store.delete_key(key)

    def _pin_at_home(self, invitation: Invitation) -> bool:
        """Whether all ranks see the file; else a warning, since the secret takes the other way."""
        if not invitation.secret:
            return False
        try:
            self._home.pin(invitation)
        except ClusterError as error:
            log.info("%s", error)
        self._store.set("nonce", invitation.nonce.encode())
        keys = [f"sees/{invitation.nonce}/{rank}" for rank in range(self._found.size) if rank != self._found.rank]
        try:
            self._store.wait(keys, self._patience())
        except RuntimeError:
            missing = [key.rpartition("/")[2] for key in keys if not self._store.check([key])]
            raise ClusterError(
                f"these ranks did not come to init in time: {', '.join(missing[:32])}; if they are only slow, raise "
                "FARANDOLE_START_TIMEOUT"
            ) from None
        if all(self._store.get(key) == b"1" for key in keys):
            return True
        self._home.take_down()
        log.warning(
            "the job's secret goes through %s and is only as private as that, since the hosts share no home directory; "
            "FARANDOLE_SECRET_FILE (the same file on each host) or FARANDOLE_MEET_AT=dir:PATH (a directory that they "
            "share) is better",
            self.place,
        )
        return False

    def _see(self, nonce: str) -> bool:
        until = time.monotonic() + HOME_SECONDS
        while time.monotonic() < until:
            with contextlib.suppress(ClusterError):
                seen = self._home.look()
                if seen is not None and seen.nonce == nonce:
                    return True
            time.sleep(PAUSE)
        return False

    def _patience(self) -> timedelta:
        return timedelta(seconds=max(1.0, self._deadline - time.monotonic()))
