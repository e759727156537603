# Jobs on this host, for tests, tools and measurements. Their output can be kept.
# Touches job.py and the environment that workers inherit.
"""`start(command, np)` returns a `Job`.

>>> import sys
>>> with start([sys.executable, "-c", "print('hello')"], np=2) as job:
...     job.wait(), job.stdout(0), job.stdout(1)
(0, 'hello\\n', 'hello\\n')
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from farandole.base.config import SETTINGS
from farandole.launch import ssh
from farandole.launch.job import Job as _Job
from farandole.launch.output import MemorySink, PrefixedLines, Raw, Sink, screens
from farandole.launch.plan import NotStarted, Plan
from farandole.launch.slots import rank_numbers

OUTPUTS = ("kept", "marked", "raw")


class Job(_Job):
    """A job on this host; with output="kept" the output of its ranks can be read."""

    def __init__(self, plan: Plan, sink: Sink, say: Callable[[str], None]) -> None:
        self._kept = sink
        super().__init__(plan, sink, say)

    def stdout(self, rank: int) -> str:
        """What a rank has printed so far to its standard output (output="kept")."""
        return self._text(rank, 0)

    def stderr(self, rank: int) -> str:
        """What a rank has printed so far to its standard error (output="kept")."""
        return self._text(rank, 1)

    def _text(self, rank: int, stream: int) -> str:
        if not isinstance(self._kept, MemorySink):
            raise ValueError('the output of this job is not "kept"')
        return self._kept.text(rank, stream)


def start(
    command: Sequence[str],
    np: int,
    hosts: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    output: str = "kept",
    stop_on_failure: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Job:
    """Starts `np` ranks of `command` on this host.

    `hosts` is the host name of each rank: ranks with different names use TCP. `env` is added to this process's
    environment. `output`: "kept" for Job.stdout(rank), "marked" for marked lines on our streams, "raw" for unchanged
    output. Without `stop_on_failure` the other ranks continue when one fails. `say` gets messages for the user.
    """
    if np < 1:
        raise ValueError(f"np={np}: a job has at least one rank")
    if not command:
        raise ValueError("there is no command to run")
    if output not in OUTPUTS:
        raise ValueError(f"output={output!r}: expected one of {', '.join(OUTPUTS)}")
    names = list(hosts) if hosts is not None else ["localhost"] * np
    if len(names) != np:
        raise ValueError(f"hosts has {len(names)} names for {np} ranks")
    environ = {**os.environ, **(env or {})}
    plan = Plan(
        command=command,
        numbers=rank_numbers(names),
        hosts=[""] * np,
        environ=environ,
        directory=os.getcwd(),
        connector=ssh.SshOptions(sys.executable, ""),
        stop_on_failure=stop_on_failure,
        survivor_grace=SETTINGS["survivor_grace_seconds"].read(environ),
    )
    try:
        return Job(plan, _sink(output, np), say)
    except NotStarted as error:
        raise OSError(error.number, str(error)) from None


def _sink(output: str, np: int) -> Sink:
    if output == "kept":
        return MemorySink(np)
    return PrefixedLines(np, screens()) if output == "marked" else Raw(screens())
