# A small key-value store over TCP: one process sets a value, others wait for it. All know the same key.
# Touches the sockets of service.py.
"""`KeyValueServer` keeps values, `KeyValueClient` sets them and waits for them. The values are JSON and not
encrypted.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from farandole.rendezvous.service import CONNECT_S, Service, ask


class KeyValueServer:
    """Keeps the values; clients connect to `port`."""

    def __init__(self, key: bytes) -> None:
        self._values: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._service = Service(key, self._respond, "key-value")

    @property
    def port(self) -> int:
        """The port to which clients connect."""
        return self._service.port

    def __enter__(self) -> KeyValueServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes every connection."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._service.close()

    def replace(self, values: dict[str, Any]) -> None:
        """Replaces all values by these in one step."""
        with self._changed:
            self._values = dict(values)
            self._changed.notify_all()

    def _respond(self, question: bytes, _host: str) -> bytes:
        return json.dumps(self._answer_to(json.loads(question))).encode()

    def _answer_to(self, asked: dict[str, Any]) -> Any:
        with self._changed:
            if "put" in asked:
                self._values[str(asked["put"])] = asked["value"]
                self._changed.notify_all()
                return {"ok": True}
            name, deadline = str(asked["wait"]), time.monotonic() + float(asked["seconds"])
            while name not in self._values and not self._closed and time.monotonic() < deadline:
                self._changed.wait(max(0.0, deadline - time.monotonic()))
            return {"ok": name in self._values, "value": self._values.get(name)}


class KeyValueClient:
    """Sets values and waits for them. Each call makes its own connection."""

    def __init__(self, addresses: Sequence[tuple[str, int]], key: bytes) -> None:
        self._addresses = [(host, int(port)) for host, port in addresses]
        self._key = key

    def put(self, name: str, value: Any) -> None:
        """Sets the value of a name; an older value is replaced."""
        self._request({"put": name, "value": value}, CONNECT_S)

    def wait(self, name: str, seconds: float) -> Any:
        """The value of that name. Raises TimeoutError if no process has set it in time."""
        answer = self._request({"wait": name, "seconds": seconds}, seconds + CONNECT_S)
        if not answer["ok"]:
            raise TimeoutError(f"no process set {name!r} within {seconds:g} s")
        return answer["value"]

    def _request(self, question: dict[str, Any], seconds: float) -> Any:
        return json.loads(ask(self._addresses, self._key, json.dumps(question).encode(), seconds))
