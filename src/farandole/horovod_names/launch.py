# horovod.runner.launch: the functions of the launcher, for programs that call them.
# Touches the launcher's command line and its executor; exits only for a wrong command line.
"""`args = parse_args(); args.num_proc = 4; _run(args)`, and `_HorovodArgs` of horovod.runner."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from farandole.bindings.compat import env
from farandole.horovod_names.arguments import HorovodArgs, from_options, settings_of, words_of
from farandole.launch import blame, build, cli, executor, options, reporter

run_commandline = cli.run_commandline
SSH_ATTEMPTS = 1  # ssh is called once, and reports its own errors
OF_RUN = (  # arguments that `executor.run` has under the same name
    "num_proc", "min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range", "hosts", "hostfile",
    "host_discovery_script", "ssh_port", "ssh_identity_file", "output_filename", "use_mpi", "executable",
)  # fmt: skip
ELASTIC = ("min_num_proc", "max_num_proc", "host_discovery_script")


def parse_args() -> HorovodArgs:
    """Parses this process's command line. A wrong command line ends the process with code 2, as in argparse."""
    try:
        return from_options(options.parse(sys.argv[1:], os.environ, options.HOROVODS))
    except options.Usage as error:
        reporter.say(f"{error}\nTry `horovodrun --help`.")
        sys.exit(2)


def check_build(verbose: bool = False) -> None:
    """Prints which frameworks and libraries are available."""
    print(build.table(), end="")


def is_gloo_used(use_gloo: bool | None = None, use_mpi: bool | None = None, use_jsrun: bool | None = None) -> bool:
    """Whether our own agents start the ranks. This is the default."""
    return bool(use_gloo) or not (use_mpi or use_jsrun)


def run_controller(
    use_gloo: bool,
    gloo_run: Callable[[], Any],
    use_mpi: bool,
    mpi_run: Callable[[], Any],
    use_jsrun: bool,
    js_run: Callable[[], Any],
    verbosity: int | None = 0,
) -> None:
    """Calls the function of the chosen controller; `gloo_run` by default."""
    if is_gloo_used(use_gloo, use_mpi, use_jsrun):
        gloo_run()
    elif use_mpi:
        mpi_run()
    else:
        js_run()


def _is_elastic(args: Any) -> bool:
    """Whether the job is elastic."""
    return any(getattr(args, name, None) is not None for name in ELASTIC)


def _run(args: Any) -> Any:
    """Runs `args.command`, or runs `args.run_func` and returns its results; RuntimeError when it fails."""
    if getattr(args, "run_func", None) is not None:
        return _run_function(args)
    code = cli.horovodrun([*words_of(args), *(args.command or [])])
    if code:
        raise RuntimeError(f"{blame.EXITED} The exit code is {code}; stderr names the rank that failed first")
    return None


_run_static = _run_elastic = _run


def _launch_job(args: Any, settings: Any, nics: Any, command: list[str]) -> None:
    """Runs `command` instead of the command in `args`."""
    _run(_with(args, command=command, nics=nics or getattr(args, "nics", None)))


def _with(args: Any, **more: Any) -> HorovodArgs:
    changed = HorovodArgs()
    vars(changed).update({**vars(args), **more})
    return changed


def _run_function(args: Any) -> list[Any]:
    variables = {
        setting.variable: str(int(v) if isinstance(v, bool) else v) for setting, v in settings_of(args).items()
    }
    nics = getattr(args, "nics", None)
    with env(**variables):
        return executor.run(
            args.run_func,
            network_interfaces=sorted(nics) if isinstance(nics, (set, frozenset)) else nics,
            **{name: getattr(args, name) for name in OF_RUN},
        )


if __name__ == "__main__":
    sys.exit(run_commandline())
