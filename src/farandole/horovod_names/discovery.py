# horovod.runner.elastic.discovery: finds the present hosts, and knows which hosts have failed.
# Runs the discovery script through launch/discovery.py.
"""Users can give a class with `find_available_hosts_and_slots` to the elastic executors (`settings.discovery`)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence

from farandole.launch import discovery
from farandole.rendezvous.elastic import policy

DEFAULT_COOLDOWN_LOWER_LIMIT_SECONDS, DEFAULT_COOLDOWN_UPPER_LIMIT_SECONDS = policy.COOLDOWN_BOUNDS


class HostDiscovery:
    """The interface that an elastic job calls once a second."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The present hosts with their numbers of slots."""
        raise NotImplementedError


class HostDiscoveryScript(HostDiscovery):
    """A program that prints `host:slots`, or `host` with `slots` of them, on each line."""

    def __init__(self, discovery_script: str, slots: int | None) -> None:
        self._script = discovery.Script(discovery_script, slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Runs the program; RuntimeError when it fails."""
        try:
            return {one.name: one.slots for one in self._script.find()}
        except discovery.DiscoveryError as error:
            raise RuntimeError(str(error)) from None


class FixedHosts(HostDiscovery):
    """Hosts that the user's program sets."""

    def __init__(self, host_slots: Mapping[str, int]) -> None:
        self._host_slots = dict(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The hosts that were set last."""
        return dict(self._host_slots)

    def set(self, host_slots: Mapping[str, int]) -> None:
        """Sets the hosts."""
        self._host_slots = dict(host_slots)


class HostState:
    """The state of one host: whether it is excluded, since when, and for how long."""

    def __init__(self, cooldown_range: Sequence[int] | None = None) -> None:
        self._event = threading.Event()
        self._range = None if cooldown_range is None else (cooldown_range[0], cooldown_range[1])
        if self._range is not None:
            policy.check_cooldown(*self._range)
        self._failures = 0
        self._until: float | None = None  # the end of its cool-down
        self._out = False

    def get_event(self) -> threading.Event:
        """An event that is set when the host is excluded. After that, a new event."""
        if self._event.is_set():
            self._event = threading.Event()
        return self._event

    def set_event(self) -> None:
        """Sets the event."""
        self._event.set()

    def blacklist(self) -> None:
        """Excludes the host: forever, or for a time that grows with each failure."""
        self._out = True
        self._failures += 1
        if self._range is not None:
            seconds = policy.cooldown(self._range, self._failures - 1, random.random())
            self._until = time.monotonic() + seconds
        self.set_event()

    def whitelist(self) -> None:
        """Allows the host again."""
        self._out, self._until = False, None

    def is_blacklisted(self) -> bool:
        """Whether the host is excluded."""
        return self._out

    def is_resurrected(self) -> bool:
        """Whether it is excluded and its time has ended."""
        return self._out and self._until is not None and time.monotonic() >= self._until


class DiscoveredHosts:
    """The hosts at one moment, in the order in which ranks are assigned: older hosts come first."""

    def __init__(self, host_slots: Mapping[str, int], host_assignment_order: Sequence[str]) -> None:
        self._host_slots = dict(host_slots)
        self._order = list(host_assignment_order)

    @property
    def host_slots(self) -> dict[str, int]:
        """The number of slots of each host."""
        return self._host_slots

    @property
    def available_hosts(self) -> set[str]:
        """The names of the hosts."""
        return set(self._order)

    @property
    def host_assignment_order(self) -> list[str]:
        """The names of the hosts in their order."""
        return self._order

    def get_slots(self, host: str) -> int:
        """The number of slots of a host; 0 if the host does not exist."""
        return self._host_slots.get(host, 0)

    def count_available_slots(self) -> int:
        """The number of slots of all hosts."""
        return sum(map(self.get_slots, self._order))

    def update(self, hosts_state: Mapping[str, HostState]) -> DiscoveredHosts:
        """Removes excluded hosts."""
        out = {host for host, state in hosts_state.items() if state.is_blacklisted()}
        self._order = [host for host in self._order if host not in out]
        return self


class HostManager:
    """Keeps the hosts that a discovery found, and the hosts that failed."""

    def __init__(self, discovery: HostDiscovery, cooldown_range: Sequence[int] | None = None) -> None:
        self._discovery = discovery
        self._range = cooldown_range
        self._current = DiscoveredHosts({}, [])
        self._states: dict[str, HostState] = {}
        self._lock = threading.Lock()

    def _state(self, host: str) -> HostState:
        return self._states.setdefault(host, HostState(self._range))

    def update_available_hosts(self) -> int:
        """Calls the discovery. Returns 0 without changes, 1 if hosts or slots were removed, 2 if added, 3 for both."""
        found = self._discovery.find_available_hosts_and_slots()
        with self._lock:
            result = 0
            for host, state in self._states.items():
                if state.is_resurrected() and host in found:
                    state.whitelist()
                    result |= policy.ADDED
            before = {host: self._current.get_slots(host) for host in self._current.available_hosts}
            usable = {host: slots for host, slots in found.items() if not self._state(host).is_blacklisted()}
            if any(slots > usable.get(host, 0) for host, slots in before.items()):
                result |= policy.REMOVED
            if any(slots > before.get(host, 0) for host, slots in usable.items()):
                result |= policy.ADDED
            order = self.order_available_hosts(set(usable), self._current.host_assignment_order)
            self._current = DiscoveredHosts(found, order)
            return result

    @property
    def current_hosts(self) -> DiscoveredHosts:
        """The hosts that were found last, without excluded ones."""
        with self._lock:
            return self._current.update(self._states)

    def blacklist(self, host: str) -> None:
        """Excludes a host that failed."""
        with self._lock:
            self._state(host).blacklist()

    def is_blacklisted(self, host: str) -> bool:
        """Whether a host is excluded."""
        with self._lock:
            return self._state(host).is_blacklisted()

    def get_host_event(self, host: str) -> threading.Event:
        """An event that is set when the host is excluded."""
        with self._lock:
            return self._state(host).get_event()

    @staticmethod
    def order_available_hosts(available_hosts: set[str], prev_host_assignment_order: Sequence[str]) -> list[str]:
        """The earlier hosts in their order, then the new hosts.

        >>> HostManager.order_available_hosts({"a", "b", "c"}, ["c", "x", "a"])
        ['c', 'a', 'b']
        """
        known = [host for host in prev_host_assignment_order if host in available_hosts]
        return known + sorted(available_hosts.difference(known))
