# The `farandole` command: run, fit, why, stacks, attach, doctor and other tools; and `horovodrun`, its `run`.
# Touches launch/run.py, tools/ and the environment of this process.
"""`farandole run -np 4 python train.py`."""

from __future__ import annotations

import difflib
import functools
import os
import sys
from collections.abc import Callable, Sequence

from farandole.base.version import HOROVOD_VERSION, package_version

USAGE = """usage: farandole COMMAND ...

  run -np N COMMAND...   start N ranks of a command, here or on other hosts (horovodrun is the same)
  fit STACK.yaml         train what a file describes, with Lightning; --explain shows it
  why [JOB]              what the ranks of a running job wait for
  stacks [JOB]           the Python stacks of all its ranks, merged
  attach [NAME]          show a job again that was started with --survive-launcher
  check TRAIN.PY         run a few steps on 2 ranks and report mistakes of the script: begin with this
  config                 ask a few questions, test the answers and write the file for `run --config-file`
  new [KIND] DIR         a small project that trains, to begin with: torch, lightning, keras, jax, tensorflow
  doctor [-H HOSTS]      is this host fit, and what lies between hosts?
  env                    a block for bug reports
  trace FILE             summarise a timeline
  bench ...              measure collectives on this machine
  discover KIND          print the hosts of a cluster, for elastic jobs: slurm, k8s, hostfile, mpijob
  demo --kill            watch an elastic job lose a rank and get it back
  completion SHELL       a script for bash, zsh or fish that completes commands and flags
  --version              print the version
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if words else 2
    if words[0] == "--version":
        print(f"farandole {package_version()}")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        print(f"farandole: unknown command {words[0]!r}{_meant(words)}", file=sys.stderr)
        print("`farandole --help` lists all commands.", file=sys.stderr)
        return 2
    return command(words[1:])


def _meant(words: Sequence[str]) -> str:
    """What a user may have meant who typed an unknown command."""
    first = words[0]
    if first.startswith("-") or first in ("launch", "start", "exec", "horovodrun", "torchrun", "mpirun", "srun"):
        return "; did you mean `farandole run -np N COMMAND...`?"
    if first.endswith(".py"):
        return f"; did you mean `farandole run -np N python {first}`?"
    close = difflib.get_close_matches(first, COMMANDS, n=1)
    return f"; did you mean `{close[0]}`?" if close else ""


def horovodrun(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line of `horovodrun`, such as `-np 2 python train.py`. Returns the exit code."""
    from farandole.launch.options import HOROVODS

    return _run(list(sys.argv[1:] if arguments is None else arguments), HOROVODS)


run_commandline = horovodrun  # Horovod's name for it


def _run(words: Sequence[str], program: str = "farandole run") -> int:
    from farandole.launch import help, missing, run
    from farandole.launch import options as option
    from farandole.launch.agent_connection import StartError
    from farandole.launch.reporter import say

    _open_streams()
    try:
        options = option.parse(words, os.environ, program)
        if options.help or options.help_all:
            print(help.long(program) if options.help_all else help.short(program), end="")
            return 0
        if options.version:
            if program == option.OURS:
                return main(["--version"])
            print(HOROVOD_VERSION)  # alone, as Horovod prints it: programs compare it
            print(
                f"The command and the interface of Horovod {HOROVOD_VERSION}, by farandole {package_version()}",
                file=sys.stderr,
            )
            return 0
        if options.check_build:
            from farandole.launch import build

            print(build.table(), end="")
            return 0
        run.check(options)
        if options.print_config:
            print(run.print_config(options), end="")
            return 0
        if options.mpi or options.jsrun:
            return run.through_mpi(options, dict(os.environ))
        plan = run.make_plan(options, dict(os.environ))
        if options.dry_run:
            print(run.dry_run(plan, options), end="")
            return 0
        if run.starts_here(plan, options):
            if problem := missing.program(options.command[0]):
                say(f"{problem} [no-program]")
                return 127
            if problem := missing.script(options.command):
                say(f"{problem} [no-script]")
                return 2
        if options.survive_launcher:
            from farandole.launch import survive

            return survive.begin(lambda: run.run(plan, options), say)
        return run.run(plan, options)
    except option.Usage as error:
        say(f"{error}\nTry `{program} --help`. [usage]")
        return 2
    except StartError as error:
        say(str(error))
        return error.code


def _attach(words: Sequence[str]) -> int:
    from farandole.launch import survive
    from farandole.launch.reporter import say

    _open_streams()
    return survive.attach(list(words), say)


def _completion(words: Sequence[str]) -> int:
    from farandole.launch import completion

    if len(words) != 1 or words[0] not in completion.SHELLS:
        print(completion.HOW, end="")
        return 0 if words in ([], ["-h"], ["--help"]) else 2
    print(completion.script(words[0], [*COMMANDS, "--version", "--help"]), end="")
    return 0


def _ask(question: str, words: Sequence[str]) -> int:
    from farandole.launch import running
    from farandole.launch.reporter import say

    return running.ask(question, words, say)


def _open_streams() -> None:
    """Opens streams that a shell has closed (`>&-`). Otherwise the next file that we open would take their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
        if number and getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115


def _tool(name: str, words: Sequence[str], package: str = "farandole.tools") -> int:
    """Runs a tool as `python -m farandole.tools.<name>` would."""
    import runpy

    before = sys.argv
    sys.argv = [f"farandole {name}", *words]
    try:
        runpy.run_module(f"{package}.{name}", run_name="__main__", alter_sys=False)
        return 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(f"farandole: {end.code}", file=sys.stderr)
            return 1
        return end.code or 0
    finally:
        sys.argv = before


TOOLS = ("check", "config", "new", "doctor", "env", "trace", "bench", "discover", "demo")
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": _run,
    "attach": _attach,
    "completion": _completion,
    **{question: functools.partial(_ask, question) for question in ("why", "stacks")},
    "fit": functools.partial(_tool, "fit", package="farandole.lightning"),
    **{name: functools.partial(_tool, name) for name in TOOLS},
}
