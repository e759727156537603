# horovod.runner.common.util.network: a service that answers requests with Python objects.
# Touches the sockets of rendezvous/service.py; reads objects only after the sender has proven the key.
"""Subclasses of `BasicService` override `_handle`; subclasses of `BasicClient` call `_send`."""

from __future__ import annotations

from typing import Any

from farandole.launch import calls
from farandole.rendezvous import interfaces
from farandole.rendezvous.service import Service, ask

MAX_BYTES = 1 << 30
SECONDS = 3600.0  # time limit for an answer: a service may wait for an event before it answers


class PingRequest:
    """Asks whether a service answers."""


class NoValidAddressesFound(Exception):
    """No address of a service answers."""


class PingResponse:
    """The answer to a ping, with the address of the client as the service sees it."""

    def __init__(self, service_name: str, source_address: str) -> None:
        self.service_name = service_name
        self.source_address = source_address


class AckResponse:
    """The service has received the request."""


class AckStreamResponse:
    """The service has received the request. In Horovod the bytes of a stream follow."""


class BasicService:
    """Answers on all addresses of this host, until shutdown()."""

    def __init__(self, service_name: str, key: bytes, nics: Any = None) -> None:
        self._service_name = service_name
        self._nics = set(nics or ())
        self._service = Service(key, self._answer, "service", MAX_BYTES)

    def _answer(self, question: bytes, host: str) -> bytes:
        return calls.pack(self._handle(calls.unpack(question), (host, 0)))

    def _handle(self, req: Any, client_address: tuple[str, int]) -> Any:
        """The answer to a request. Subclasses answer more requests."""
        if isinstance(req, PingRequest):
            return PingResponse(self._service_name, client_address[0])
        raise ValueError(f"{self._service_name} does not know a {type(req).__name__}")

    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """Its addresses, by interface."""
        found: dict[str, list[tuple[str, int]]] = {}
        for one in interfaces.interfaces():
            if ":" not in one.address and (not self._nics or one.name in self._nics):
                found.setdefault(one.name, []).append((one.address, self._service.port))
        if not found:
            raise NoValidAddressesFound(f"this host has no address on the interfaces {sorted(self._nics)}")
        return found

    def get_port(self) -> int:
        """The port, which is the same for all addresses."""
        return self._service.port

    def shutdown(self) -> None:
        """Stops answering."""
        self._service.close()


class BasicClient:
    """Sends requests to a service, at the first of its addresses that answers."""

    def __init__(
        self,
        service_name: str,
        addresses: dict[str, list[tuple[str, int]]],
        key: bytes,
        verbose: int = 0,
        match_intf: bool = False,
        probe_timeout: float = 20,
        attempts: int = 3,
    ) -> None:
        self._service_name = service_name
        self._key = key
        self._attempts = attempts
        self._addresses = {
            name: good
            for name, found in addresses.items()
            if (good := [address for address in found if self._answers(address, probe_timeout)])
        }
        if not self._addresses:
            raise NoValidAddressesFound(
                f"Horovod was unable to connect to {service_name} on any of the following addresses: {addresses}. "
                "They cannot be reached from here, or the key is another one"
            )

    def _answers(self, address: tuple[str, int], seconds: float) -> bool:
        try:
            found = calls.unpack(ask([address], self._key, calls.pack(PingRequest()), seconds, MAX_BYTES))
        except OSError:
            return False
        return isinstance(found, PingResponse) and found.service_name == self._service_name

    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """The addresses that answer, by interface."""
        return self._addresses

    def _send(self, req: Any, stream: Any = None) -> Any:
        """Sends a request and returns the answer."""
        addresses = [address for found in self._addresses.values() for address in found]
        for left in reversed(range(self._attempts)):
            try:
                return calls.unpack(ask(addresses, self._key, calls.pack(req), SECONDS, MAX_BYTES))
            except OSError:
                if not left:
                    raise
        raise AssertionError  # attempts is at least 1
