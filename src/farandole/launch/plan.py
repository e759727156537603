# The plan of a job: what runs where, and the messages that bring it to an agent.
# Pure. Touches nothing.
"""`Plan` is everything about a job that is known before it starts; `ElasticOptions` makes a job elastic."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farandole.base.config import SETTINGS
from farandole.launch import environment, ssh
from farandole.launch.agent_connection import Bridge, StartError
from farandole.launch.discovery import Discovery
from farandole.launch.slots import RankNumbers
from farandole.rendezvous import agent_messages
from farandole.rendezvous.elastic.policy import Limits, Times
from farandole.rendezvous.secret import Secret

PART_BYTES = 256 << 10  # one message carries this much of the variables or of the command
LONGEST_ENTRY = 1000 << 10  # the longest variable or word of the command


@dataclass(frozen=True)
class Plan:
    """Everything about a job that is known before it starts."""

    command: Sequence[str]
    numbers: Sequence[RankNumbers]
    hosts: Sequence[str]  # where each rank runs; "" is this machine
    environ: Mapping[str, str]
    directory: str
    connector: ssh.SshOptions | Bridge  # how the agents are reached
    start_timeout: float = 30.0
    interfaces: tuple[str, ...] = ()
    threads: int | None = None  # OMP_NUM_THREADS of each rank
    quiet: bool = False  # the launcher prints nothing about a job without failures
    calls: bool = False  # each rank gets a channel, on which it receives functions to call
    stop_on_failure: bool = True
    survivor_grace: float = SETTINGS["survivor_grace_seconds"].default  # seconds before the other ranks get SIGTERM
    extra: Sequence[Mapping[str, str]] = field(default_factory=tuple)  # additional variables of each rank
    of_host: Callable[[str], Mapping[str, str]] = lambda host: {}  # additional variables of the ranks on one host
    secret: Secret | None = None  # the job's secret, if the agents know it already

    def command_messages(self, other_host: bool) -> Iterator[Any]:
        """The messages with which an agent gets the variables of the launcher and the command."""
        variables = environment.forwarded(self.environ, other_host)
        for part in _parts(_encode(variables), "an environment variable"):
            yield agent_messages.Environment(part)
        for part in _parts(map(os.fsencode, self.command), "a word of the command"):
            yield agent_messages.Command(part)

    def launch_message(
        self, rank: int, host: str, prepared: agent_messages.Prepared, more: Mapping[str, str]
    ) -> agent_messages.Launch:
        """The message with which an agent starts a rank. `more`: the variables of this rank."""
        variables = {**more, "FARANDOLE_RENDEZVOUS": prepared.address}
        if self.interfaces:
            variables["FARANDOLE_NETWORK_INTERFACES"] = ",".join(self.interfaces)
            if "NCCL_SOCKET_IFNAME" not in self.environ:
                variables["NCCL_SOCKET_IFNAME"] = ",".join(self.interfaces)
        variables.update(self.of_host(host))
        if self.extra:
            variables.update(self.extra[rank])
        return agent_messages.Launch(rank, os.fsencode(self.directory), _encode(variables), int(self.calls))

    def thread_variables(self, cores: int, ranks: int) -> tuple[dict[str, str], str]:
        """OMP_NUM_THREADS for each of `ranks` ranks on a host, and a note for the user when we chose the number."""
        if self.threads is not None:
            return {"OMP_NUM_THREADS": str(self.threads)}, ""
        if "OMP_NUM_THREADS" in self.environ:
            return {}, ""
        threads = max(1, cores // ranks)
        if self.quiet:
            return {"OMP_NUM_THREADS": str(threads)}, ""
        note = (
            f"each of {ranks} ranks computes with {threads} thread{'s' if threads > 1 else ''}, because there are "
            f"{cores} cores (OMP_NUM_THREADS; --threads-per-rank changes it)"
        )
        return {"OMP_NUM_THREADS": str(threads)}, note


@dataclass(frozen=True)
class ElasticOptions:
    """What makes a job elastic."""

    limits: Limits
    discovery: Discovery
    times: Times = field(default_factory=Times)


class NotStarted(StartError):
    """The command of a rank cannot be run on its host."""

    def __init__(self, host: str, report: agent_messages.NotStarted) -> None:
        super().__init__(cannot_run(host, report), 127, topic="no-program")
        self.number = report.number


def cannot_run(host: str, report: agent_messages.NotStarted) -> str:
    """Why a command cannot be run; `host`: "" for this machine."""
    where = f" on {host}" if host else ""
    return f"cannot run the command{where}: {report.text}"


def _encode(variables: Mapping[str, str]) -> tuple[bytes, ...]:
    """Variables as messages to agents carry them: NAME=VALUE in bytes."""
    return tuple(os.fsencode(f"{name}={value}") for name, value in variables.items())


def _parts(entries: Iterable[bytes], what: str) -> list[tuple[bytes, ...]]:
    """The entries in parts. Each part is small enough for one message."""
    parts: list[list[bytes]] = [[]]
    size = 0
    for entry in entries:
        if len(entry) > LONGEST_ENTRY:
            text = f"{what} has {len(entry)} bytes, the limit is {LONGEST_ENTRY}: {os.fsdecode(entry[:40])}..."
            raise StartError(text, 127, topic="too-large")
        if size + len(entry) > PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += len(entry)
    return [tuple(part) for part in parts]
