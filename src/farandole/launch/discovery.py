# Where the hosts of an elastic job come from: a fixed list, a hostfile that may be edited, a script, somebody's code.
# Reads the hostfile; runs the script through spawn.py.
"""`Discovery.find()` gives the hosts and their slots of this moment; the job asks once a second, on a thread."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from farandole.launch import hosts, spawn
from farandole.launch.hosts import Host

SCRIPT_SECONDS = 30.0  # for the script to answer


class DiscoveryError(Exception):
    """The hosts cannot be found out now; the text says why."""


class Discovery(Protocol):
    """What an elastic job needs to know about hosts; integrations bring their own."""

    fixed: bool  # it gives the same hosts for ever

    def find(self) -> list[Host]:
        """The hosts of this moment, none at all included; DiscoveryError when that cannot be known."""
        ...

    def close(self) -> None:
        """Nobody asks any more. Safe from any thread; a `find` under way ends soon."""
        ...


class Fixed:
    """Hosts that were named once, as with -H."""

    fixed = True

    def __init__(self, found: Sequence[Host]) -> None:
        self._hosts = list(found)

    def find(self) -> list[Host]:
        """Those that were named."""
        return self._hosts

    def close(self) -> None:
        """There is nothing to end."""


class Hostfile:
    """A hostfile that people, or a cluster, may edit while the job runs."""

    fixed = False

    def __init__(self, path: str) -> None:
        self._path = path

    def find(self) -> list[Host]:
        """What stands in it now."""
        try:
            return hosts.read(Path(self._path).read_text(), self._path)
        except (OSError, UnicodeDecodeError) as error:
            raise DiscoveryError(f"cannot read --hostfile {self._path}: {getattr(error, 'strerror', error)}") from None
        except ValueError as error:
            raise DiscoveryError(str(error)) from None

    def close(self) -> None:
        """There is nothing to end."""


class Script:
    """A program that prints a line `host:slots` or `host` for each host."""

    fixed = False

    def __init__(self, command: str, slots: int | None = None) -> None:
        self._command = command if os.path.dirname(command) or not os.path.exists(command) else f"./{command}"
        self._slots = slots  # of a host without a number
        self._script = spawn.Script(self._command)

    def find(self) -> list[Host]:
        """Runs it."""
        try:
            code, out, err = self._script.run(SCRIPT_SECONDS)
        except OSError as error:  # a TimeoutError is one
            why = error.strerror or str(error)
            raise DiscoveryError(f"--host-discovery-script {self._command}: {why}") from None
        if code:
            last = err.strip().splitlines()[-1:] or ["it said nothing"]
            raise DiscoveryError(f"--host-discovery-script {self._command} ended with exit code {code}: {last[0]}")
        try:
            return parse(out, f"the output of {self._command}", self._slots)
        except ValueError as error:
            raise DiscoveryError(str(error)) from None

    def close(self) -> None:
        """Ends it if it runs."""
        self._script.close()


def parse(text: str, name: str, slots: int | None) -> list[Host]:
    """Lines `host:slots`, or `host` with `slots` of them; no line, or no slots: no host. ValueError names a wrong line.

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
