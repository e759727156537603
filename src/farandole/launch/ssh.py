# How the launcher reaches other hosts: the command line of ssh, and the meaning of its failures.
# Pure. Touches nothing.
"""ssh gets a list of arguments, never a line for a local shell. It checks known hosts and never asks the user."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

# A host name, an address, a name from ~/.ssh/config; with or without a user. Nothing that ssh could take for an option.
HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_:%\[\]][A-Za-z0-9_.:%\[\]-]*")

REMEDIES = (
    ("could not resolve hostname", "there is no such host; check the name in -H or the hostfile"),
    ("connection refused", "no ssh server listens there; start sshd or give its port with --ssh-port"),
    ("connection timed out", "the host does not answer; is it up, and is a firewall in between?"),
    ("operation timed out", "the host does not answer; is it up, and is a firewall in between?"),
    ("no route to host", "this machine has no route to the host"),
    ("network is unreachable", "this machine has no route to the host"),
    ("host key verification failed", "log in once by hand to accept the host's key, or use --ssh-accept-new"),
    ("remote host identification has changed", "its key has changed; see the lines above"),
    ("permission denied", "log in without a password must work: set up a key (ssh-copy-id), or give it with -i"),
    ("too many authentication failures", "give the one right key with -i"),
    ("no module named", "install farandole there, in the Python that --remote-python names"),
    ("needs python", "name a newer interpreter there with --remote-python"),
    ("not found", "name the interpreter on that host with --remote-python"),
    ("no such file", "name the interpreter on that host with --remote-python"),
)


@dataclass(frozen=True)
class SshOptions:
    """The options that are the same for every host."""

    python: str  # the interpreter on that host
    package: str  # the directory of the package here; used there too if it exists there
    port: int | None = None
    identity: str | None = None
    accept_new: bool = False
    connect_seconds: int = 10

    def command(self, host: str) -> list[str]:
        """The command that starts an agent on a host. ValueError for an invalid host name."""
        check(host)
        words = ["ssh", "-T", "-x", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={self.connect_seconds}"]
        # A host that vanished must not block the launcher forever.
        words += ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4", "-o", "LogLevel=ERROR"]
        if self.accept_new:
            words += ["-o", "StrictHostKeyChecking=accept-new"]
        if self.port is not None:
            words += ["-p", str(self.port)]
        if self.identity is not None:
            words += ["-i", self.identity]
        return [*words, "--", host, self.remote()]

    def remote(self) -> str:
        """The line for the login shell there."""
        start = (
            "import sys; "
            "sys.version_info < (3, 11) and sys.exit('farandole needs Python 3.11 or newer, this is ' + sys.version); "
        ) + start_code(self.package, "farandole.launch.agent")
        return f"exec {shlex.quote(self.python)} -c {shlex.quote(start)}"

    def explain(self, host: str, code: int | None, error_output: str) -> str:
        """Why there is no agent on a host, from the exit code and output of ssh."""
        lines = [line for line in error_output.splitlines() if line.strip()]
        last = lines[-1].strip() if lines else f"ssh ended with code {code}"
        for sign, remedy in REMEDIES:
            for line in lines:
                if sign in line.lower():
                    return f"cannot start ranks on {host}: {line.strip()}\n  {remedy}"
        if code == 127:
            return f"cannot start ranks on {host}: {last}\n  name the interpreter on that host with --remote-python"
        return f"cannot start ranks on {host}: {last}"


def start_code(package: str, module: str) -> str:
    """Python that runs `main()` of a module: of the package in this folder if it is there, else of the installed one.

    >>> start_code("/src", "farandole.tools.probe").partition("; from ")[2]
    'farandole.tools.probe import main; sys.exit(main())'
    """
    # One line: not every login shell takes a quoted word of several.
    return (
        f"import os, sys; os.path.isdir({package + '/farandole'!r}) and sys.path.insert(0, {package!r}); "
        f"from {module} import main; sys.exit(main())"
    )


def check(host: str) -> None:
    """Raises ValueError unless this is a host name.

    >>> check("node-1"); check("me@10.0.0.1")
    >>> check("-oProxyCommand=x")
    Traceback (most recent call last):
    ...
    ValueError: '-oProxyCommand=x' is not a host name
    """
    if not HOST.fullmatch(host) or len(host) > 255:
        raise ValueError(f"{host!r} is not a host name")
