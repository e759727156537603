# The `farandole` command: run, trace, bench; and `horovodrun`, which is `farandole run`.
# Touches launch/local.py and tools/.
"""`farandole run -np 4 python train.py`."""

from __future__ import annotations

import argparse
import difflib
import functools
import runpy
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from farandole.launch import local
from farandole.version import package_version

USAGE = """usage: farandole COMMAND ...

  run -np N COMMAND...   start N ranks of a command on this host
  trace FILE             summarise a timeline
  bench ...              measure collectives on this machine
  doctor [-H HOSTS]      is this host fit? are these, and the network between them?
  env                    a block for bug reports
  --version              print the version
"""


class _Terminated(Exception):
    """SIGTERM, SIGHUP or SIGQUIT arrived."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if words else 2
    if words[0] == "--version":
        print(f"farandole {package_version()}")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        close = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"; did you mean `{close[0]}`?" if close else ""
        _say(f"unknown command {words[0]!r}{hint}")
        print(USAGE, end="", file=sys.stderr)
        return 2
    return command(words[1:])


def horovodrun(arguments: Sequence[str] | None = None) -> int:
    """`horovodrun -np 2 python train.py`; the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["-v"] or words[:1] == ["--version"]:
        return main(["--version"])
    return main(["run", *words])


def _say(line: str) -> None:
    print(f"farandole: {line}", file=sys.stderr, flush=True)


def _parse_run(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="farandole run", description="Starts N ranks of a command on this host.")
    parser.add_argument("-np", "--num-proc", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument(
        "--start-timeout", type=float, metavar="S", help="seconds that ranks wait for each other in init (30)"
    )
    parser.add_argument("--raw", action="store_true", help="the ranks' output as it is, without [rank]<stream>: marks")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what each rank runs")
    options = parser.parse_args(words)
    if options.command[:1] == ["--"]:
        del options.command[0]
    if options.num_proc < 1:
        parser.error(f"-np {options.num_proc}: a job has at least one rank")
    if not options.command:
        parser.error("there is no command to run, e.g. farandole run -np 2 python train.py")
    if options.command[0].startswith("-"):
        parser.error(f"unknown option {options.command[0]}")
    return options


def _run(words: Sequence[str]) -> int:
    options = _parse_run(words)
    name = options.command[0]
    if shutil.which(name) is None:
        hint = f"; did you mean `python {name}`?" if name.endswith(".py") else ""
        _say(f"cannot run {name!r}: there is no such program{hint}")
        return 127
    env = {} if options.start_timeout is None else {"FARANDOLE_START_TIMEOUT": str(options.start_timeout)}
    endings = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, _terminate) for number in endings}
    try:
        return _watch(options, env)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(options: argparse.Namespace, env: dict[str, str]) -> int:
    output = "raw" if options.raw else "marked"
    try:
        with local.start(options.command, options.num_proc, env=env, output=output, say=_say) as job:
            code = _wait(job)
            if job.failure is not None and job.failure[0] >= 0:
                rank, code = job.failure
                _say(f"rank {rank} (process {job.pids[rank]}) failed first: {local.describe(code)}")
            return code
    except OSError as error:
        _say(f"cannot start the job: {error}")
        return 126


def _wait(job: local.Job) -> int:
    """Waits for the end; a first Ctrl-C or SIGTERM asks the ranks to end, a second one kills them."""
    try:
        return job.wait()
    except (KeyboardInterrupt, _Terminated) as stop:
        job.stop()
        code = 128 + (signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM)
    try:
        job.wait()
    except (KeyboardInterrupt, _Terminated):
        job.stop(grace=0)
    return code


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise _Terminated


def _tool(name: str, words: Sequence[str]) -> int:
    """Runs a tool as `python -m farandole.tools.<name>` would."""
    before = sys.argv
    sys.argv = [f"farandole {name}", *words]
    try:
        runpy.run_module(f"farandole.tools.{name}", run_name="__main__", alter_sys=False)
        return 0
    except SystemExit as end:
        if isinstance(end.code, str):
            _say(end.code)
            return 1
        return end.code or 0
    finally:
        sys.argv = before


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": _run,
    "trace": functools.partial(_tool, "trace"),
    "bench": functools.partial(_tool, "bench"),
    "doctor": functools.partial(_tool, "doctor"),
    "env": functools.partial(_tool, "env"),
}
