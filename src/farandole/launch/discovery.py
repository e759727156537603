# Finds the hosts of an elastic job: from a fixed list, a hostfile that may change, a script, or an object of the user.
# Reads the hostfile; runs the script through spawn.py; has a thread.
"""`Discovery.find()` returns the present hosts and their slots. The job calls it once a second, on a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from farandole.launch import hosts, spawn
from farandole.launch.hosts import Host

SEARCH_SECONDS = 1.0  # between two searches for hosts
SCRIPT_SECONDS = 30.0  # time limit of the script


class DiscoveryError(Exception):
    """The hosts cannot be found now; the text says why."""


class Discovery(Protocol):
    """Finds hosts for an elastic job. Integrations have their own classes."""

    fixed: bool = False  # the hosts never change

    def find(self) -> list[Host]:
        """The present hosts; there may be none. DiscoveryError when they cannot be found."""
        ...

    def close(self) -> None:
        """Called at the end of the job, from any thread. A `find` that runs then ends soon."""
        return  # most have nothing to close


class FixedHosts(Discovery):
    """A list of hosts that does not change, as with -H."""

    fixed = True

    def __init__(self, found: Sequence[Host]) -> None:
        self._hosts = list(found)

    def find(self) -> list[Host]:
        """The hosts of the list."""
        return self._hosts


class Hostfile(Discovery):
    """A hostfile that a user or a cluster may change while the job runs."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find(self) -> list[Host]:
        """The hosts that the file has now."""
        try:
            return hosts.read(Path(self._path).read_text(), self._path)
        except (OSError, UnicodeDecodeError) as error:
            raise DiscoveryError(f"cannot read --hostfile {self._path}: {getattr(error, 'strerror', error)}") from None
        except ValueError as error:
            raise DiscoveryError(str(error)) from None


class Script(Discovery):
    """A program that prints a line `host:slots` or `host` for each host."""

    def __init__(self, command: str, slots: int | None = None) -> None:
        self._command = command if os.path.dirname(command) or not os.path.exists(command) else f"./{command}"
        self._slots = slots  # for hosts that are printed without a number
        self._script = spawn.Script(self._command)

    def find(self) -> list[Host]:
        """Runs the program and reads its output."""
        try:
            code, out, err = self._script.run(SCRIPT_SECONDS)
        except OSError as error:  # TimeoutError is a subclass
            why = error.strerror or str(error)
            raise DiscoveryError(f"--host-discovery-script {self._command}: {why}") from None
        if code:
            last = err.strip().splitlines()[-1:] or ["it printed nothing"]
            raise DiscoveryError(f"--host-discovery-script {self._command} ended with exit code {code}: {last[0]}")
        try:
            return parse(out, f"the output of {self._command}", self._slots)
        except ValueError as error:
            raise DiscoveryError(str(error)) from None

    def close(self) -> None:
        """Ends the program if it runs."""
        self._script.close()


class UserDiscovery(Discovery):
    """A discovery object of the user, as in Horovod: it has the method `find_available_hosts_and_slots`."""

    def __init__(self, discovery: Any) -> None:
        self._discovery = discovery

    def find(self) -> list[Host]:
        """The hosts that the object returns now."""
        try:
            found = self._discovery.find_available_hosts_and_slots()
        except Exception as error:
            raise DiscoveryError(f"{type(self._discovery).__name__}: {error}") from None
        return [Host(str(name), int(slots)) for name, slots in found.items() if slots]


class DiscoveryThread:
    """Calls `found(hosts)` once a second, and `failed(text)` when hosts cannot be found for a new reason.

    It has its own thread, because a script or the lookup of a name may be slow; both functions are called on it.
    """

    def __init__(
        self, discovery: Discovery, found: Callable[[list[Host]], None], failed: Callable[[str], None]
    ) -> None:
        self._discovery = discovery
        self._found = found
        self._failed = failed
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="farandole-discovery", daemon=True)

    def start(self) -> None:
        """Starts the searches, unless the hosts never change."""
        if not self._discovery.fixed:
            self._thread.start()

    def stop(self) -> None:
        """Starts no more searches. Does not wait; safe from any thread."""
        self._stopping.set()

    def close(self) -> None:
        """Ends a search that runs, and waits for the thread. A second call does nothing."""
        self.stop()
        self._discovery.close()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        reported = ""
        while not self._stopping.wait(SEARCH_SECONDS):
            try:
                self._found(self._discovery.find())
                reported = ""
            except DiscoveryError as error:
                if str(error) != reported and not self._stopping.is_set():
                    reported = str(error)
                    self._failed(reported)


def parse(text: str, name: str, slots: int | None) -> list[Host]:
    """Hosts from lines `host:slots` or `host` (which has `slots`). Hosts with 0 slots are left out.

    The text may be empty. ValueError names a wrong line.

    >>> parse("a:2\\nb\\nc:0", "x", 4)
    [Host(name='a', slots=2), Host(name='b', slots=4)]
    """
    text = "\n".join("" if line.rstrip().endswith(":0") else line for line in text.splitlines())
    if not text.strip():
        return []
    found = hosts.read(text, name)
    if slots is None:
        return found
    bare = {line.strip() for line in text.splitlines()}
    return [Host(one.name, slots) if one.name in bare else one for one in found]
