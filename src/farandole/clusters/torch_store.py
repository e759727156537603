# torchrun's key-value store as an endpoint store; the secret goes there only if a rank cannot see rank 0's home.
# Touches torch.distributed, which is loaded only here, and connects to torchrun's store; never binds a port.
"""Any process that reaches the store's port can read it, so ranks first check whether they see the file at home."""

from __future__ import annotations

import contextlib
import logging
import time
from datetime import timedelta
from typing import Any

from farandole.clusters.cluster_rank import ClusterError, ClusterRank
from farandole.clusters.endpoint import Endpoint, decode
from farandole.clusters.stores import EndpointStore, FileStore

HOME_SECONDS = 3.0  # if a file of rank 0 is not visible within this time, the home directory is not shared
PAUSE = 0.02

log = logging.getLogger("farandole.launch")


class TorchStore:
    """torchrun's store, together with the file in the home directory."""

    def __init__(self, found: ClusterRank, home: FileStore, deadline: float) -> None:
        from torch.distributed import PrefixStore, TCPStore

        host, _, port = found.store.rpartition(":")
        self.location = f"torchrun's store at {found.store}"
        self._found = found
        self._home = home
        self._deadline = deadline
        # torchrun runs the store: every rank is a client.
        store = TCPStore(host, int(port), is_master=False, timeout=self._timeout(), wait_for_workers=False)
        self._store: Any = PrefixStore(f"farandole/{found.name}", store)
        self._chosen: EndpointStore | None = None  # where the other ranks read the endpoint

    def publish(self, endpoint: Endpoint) -> None:
        if self._chosen is None:
            self._chosen = self._home if self._publish_at_home(endpoint) else self
        if self._chosen is self._home:
            self._home.publish(endpoint)
        else:
            self._store.set("endpoint", endpoint.encode())

    def read(self) -> Endpoint | None:
        if self._chosen is None and self._store.check(["nonce"]):
            nonce = self._store.get("nonce").decode()
            self._chosen = self._home if self._see(nonce) else self
            self._store.set(f"sees/{nonce}/{self._found.rank}", b"1" if self._chosen is self._home else b"0")
        if self._chosen is self._home:
            return self._home.read()
        return decode(self._store.get("endpoint")) if self._store.check(["endpoint"]) else None

    def stop_reading(self) -> None:
        pass

    def withdraw(self) -> None:
        self._home.withdraw()
        with contextlib.suppress(RuntimeError):  # torchrun may have ended
            for key in ("nonce", "endpoint"):
                self._store.delete_key(key)

    def _publish_at_home(self, endpoint: Endpoint) -> bool:
        """Whether all ranks see the file; otherwise warns, because the secret goes into the store."""
        if not endpoint.secret:
            return False
        try:
            self._home.publish(endpoint)
        except ClusterError as error:
            log.info("%s", error)
        self._store.set("nonce", endpoint.nonce.encode())
        keys = [f"sees/{endpoint.nonce}/{rank}" for rank in range(self._found.size) if rank != self._found.rank]
        try:
            self._store.wait(keys, self._timeout())
        except RuntimeError:
            missing = [key.rpartition("/")[2] for key in keys if not self._store.check([key])]
            raise ClusterError(
                f"these ranks did not call init in time: {', '.join(missing[:32])}; if they are only slow, raise "
                "FARANDOLE_START_TIMEOUT"
            ) from None
        if all(self._store.get(key) == b"1" for key in keys):
            return True
        self._home.withdraw()
        log.warning(
            "the job's secret is sent through %s, because the hosts share no home directory, and is as "
            "private as that store. "
            "FARANDOLE_SECRET_FILE (the same file on each host) or FARANDOLE_MEET_AT=dir:PATH (a directory that they "
            "share) is better",
            self.location,
        )
        return False

    def _see(self, nonce: str) -> bool:
        until = time.monotonic() + HOME_SECONDS
        while time.monotonic() < until:
            with contextlib.suppress(ClusterError):
                seen = self._home.read()
                if seen is not None and seen.nonce == nonce:
                    return True
            time.sleep(PAUSE)
        return False

    def _timeout(self) -> timedelta:
        return timedelta(seconds=max(1.0, self._deadline - time.monotonic()))
