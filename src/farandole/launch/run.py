# `farandole run`: makes a plan from parsed options, runs the job, and reports how it ended.
# Touches job.py, reporter.py, files of --log-dir, signals.
"""The steps between the command line and the job."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from farandole.base.version import package_version
from farandole.launch import discovery, environment, foreign, hosts, running, spawn, ssh
from farandole.launch.agent_connection import StartError, package_place
from farandole.launch.hangs import ON_HANG, OnHang
from farandole.launch.hosts import Host
from farandole.launch.job import Job
from farandole.launch.options import ELASTIC, FLAGS, FOR_ELASTIC, Options, Usage
from farandole.launch.plan import ElasticOptions, Plan
from farandole.launch.reporter import Reporter, say, tell
from farandole.launch.slots import rank_numbers
from farandole.rendezvous import interfaces
from farandole.rendezvous.elastic.policy import Limits, Times

GRACE_SECONDS = 10.0  # between Ctrl-C or SIGTERM and SIGKILL


def chosen_hosts(options: Options) -> list[Host]:
    """The hosts of -H or of the hostfile; without both, this host with a slot for each rank."""
    if options.hosts is not None and options.hostfile is not None:
        raise Usage("-H and --hostfile exclude each other")
    try:
        if options.hosts is not None:
            return hosts.parse(options.hosts)
        if options.hostfile is not None:
            return hosts.read(Path(options.hostfile).read_text(), options.hostfile)
    except (OSError, UnicodeDecodeError) as error:
        raise Usage(f"cannot read --hostfile {options.hostfile}: {getattr(error, 'strerror', error)}") from None
    except ValueError as error:
        raise Usage(str(error)) from None
    return [Host("localhost", options.np)]


def check(options: Options) -> None:
    """Raises Usage when options are wrong or exclude each other."""
    if options.np is None and elastic(options):
        options.values["np"] = options.min_np or options.max_np
    if options.np is None:
        raise Usage(f"how many ranks? Say it with -np, e.g. {options.program} -np 2 python train.py")
    if options.np < 1:
        raise Usage(f"-np {options.np}: a job has at least one rank")
    for name in FOR_ELASTIC:
        if getattr(options, name) is not None and not elastic(options):
            word = next(flag.words[0] for flag in FLAGS if flag.name == name)
            raise Usage(f"{word} is for elastic jobs; make it one with --min-np, --max-np or --host-discovery-script")
    if elastic(options) and (options.mpi or options.jsrun):
        raise Usage("elastic jobs are started by our own agents: leave --mpi and --jsrun out")
    if sum(bool(getattr(options, name)) for name in ("gloo", "mpi", "jsrun")) > 1:
        raise Usage("--gloo, --mpi and --jsrun exclude each other")
    if not options.command and not (options.print_config or options.dry_run):
        raise Usage(f"there is no command to run, e.g. {options.program} -np 2 python train.py")
    if options.blacklist not in (None, "slot", "host"):
        raise Usage(f"--blacklist {options.blacklist}: expected slot or host")
    if options.on_hang not in (None, *ON_HANG):
        raise Usage(f"--on-hang {options.on_hang}: expected one of {', '.join(ON_HANG)}")
    for name, least in (
        ("threads", 1), ("grace", 0), ("ssh_port", 1), ("drain_timeout", 0), ("slots_per_host", 1)
    ):  # fmt: skip
        value = getattr(options, name)
        if value is not None and value < least:
            raise Usage(f"--{name.replace('_', '-')} {value}: expected at least {least}")


def elastic(options: Options) -> bool:
    """Whether the job is elastic."""
    return any(getattr(options, name) is not None for name in ELASTIC)


def starts_here(plan: Plan, options: Options) -> bool:
    """Whether ranks will run on this host for sure. Then their command must exist here."""
    if not elastic(options):
        return "" in plan.hosts
    return options.discovery is None and any(interfaces.is_this_host(host.name) for host in chosen_hosts(options))


def make_elastic_options(options: Options) -> ElasticOptions | None:
    """The options of an elastic job; None when the job is not elastic."""
    if not elastic(options):
        return None
    if options.discovery is not None and (options.hosts is not None or options.hostfile is not None):
        raise Usage("--host-discovery-script, -H and --hostfile exclude each other")
    cooldown = tuple(options.cooldown) if options.cooldown is not None else None
    try:
        limits = Limits(
            np=options.np,
            min_np=options.np if options.min_np is None else options.min_np,
            max_np=options.max_np,
            reset_limit=options.reset_limit,
            cooldown=cooldown,
            elastic_timeout=float(options.settings["elastic_timeout"].value),
            drain_timeout=30.0 if options.drain_timeout is None else options.drain_timeout,
            leave_hosts_out=(options.blacklist or ("slot" if options.discovery is None else "host")) == "host",
        )
    except ValueError as error:
        raise Usage(str(error)) from None
    found: discovery.Discovery
    if options.discovery is not None:
        found = discovery.Script(options.discovery, options.slots_per_host)
    elif options.hostfile is not None and options.hosts is None:
        chosen_hosts(options)  # if the file is wrong already, this is an error now
        found = discovery.Hostfile(options.hostfile)
    else:
        found = discovery.FixedHosts(chosen_hosts(options))
    return ElasticOptions(limits, found, Times(float(options.settings["suspect_seconds"].value)))


def make_plan(options: Options, environ: dict[str, str]) -> Plan:
    """The plan of the job: what will run on which host."""
    try:
        # The elastic driver decides later where the ranks of an elastic job run, and may change it.
        names = [] if elastic(options) else hosts.assign(chosen_hosts(options), options.np)
    except ValueError as error:
        raise Usage(str(error)) from None
    local = {name: interfaces.is_this_host(name) for name in dict.fromkeys(names)}
    timeout = float(options.settings["start_timeout"].value)
    connector = ssh.SshOptions(
        python=options.remote_python or sys.executable,
        package=package_place(),
        port=options.ssh_port,
        identity=options.ssh_identity_file,
        accept_new=bool(options.ssh_accept_new),
        connect_seconds=max(1, round(timeout / 3)),
    )
    return Plan(
        command=options.command,
        numbers=rank_numbers(names),
        hosts=["" if local[name] else name for name in names],
        environ={**environ, **options.variables()},
        directory=_working_directory(),
        connector=connector,
        start_timeout=timeout,
        interfaces=wanted_interfaces(options),
        threads=options.threads,
        quiet=bool(options.quiet),
        survivor_grace=float(options.settings["survivor_grace_seconds"].value),
    )


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise StartError(
            "the working directory has been removed; cd to one that exists", topic="no-directory"
        ) from None


def wanted_interfaces(options: Options) -> tuple[str, ...]:
    """The interfaces from both options, --network-interfaces and --network-interface."""
    lists = [options.network_interfaces or "", *(options.network_interface or [])]
    return tuple(name for text in lists for name in text.split(",") if name)


def dry_run(plan: Plan, options: Options) -> str:
    """The text that --dry-run prints."""
    elastic_options = make_elastic_options(options)
    if elastic_options is not None:
        return _elastic_dry_run(plan, elastic_options)
    lines = [f"{len(plan.numbers)} ranks of: {' '.join(plan.command)}", f"in {plan.directory}", "", "rank  host"]
    for index, host in zip(plan.numbers, plan.hosts, strict=True):
        where = index.hostname if host else f"{index.hostname} (here)"
        lines.append(
            f"{index.rank:4d}  {where}: local rank {index.local_rank} of {index.local_size}, "
            f"cross rank {index.cross_rank} of {index.cross_size}"
        )
    remote = [host for host in dict.fromkeys(plan.hosts) if host]
    lines += ["", "ranks meet at: " + (_addresses(plan) if remote else "a unix socket in a private directory")]
    for host in remote:
        assert isinstance(plan.connector, ssh.SshOptions)
        lines.append(f"{host} is reached by: {' '.join(plan.connector.command(host)[:-1])} (an agent)")
    sample = environment.of_rank(plan.numbers[0], ("ADDRESS", 0))
    lines += ["", "variables of rank 0, in addition to those of this shell:"]
    lines += [f"  {name}={value}" for name, value in {**sample, **options.variables()}.items()]
    return "\n".join(lines) + "\n"


def _elastic_dry_run(plan: Plan, elastic_options: ElasticOptions) -> str:
    limits = elastic_options.limits
    try:
        found = elastic_options.discovery.find()
    except discovery.DiscoveryError as error:
        raise StartError(str(error), topic="no-hosts") from None
    most = "as many as there are slots" if limits.max_np is None else str(limits.max_np)
    lines = [
        f"an elastic job of: {' '.join(plan.command)}",
        f"in {plan.directory}",
        "",
        f"{limits.np} ranks to start with, at least {limits.min_np}, at most {most}",
        *(f"{host.name}: {host.slots} slots" for host in found),
    ]
    return "\n".join(lines) + "\n"


def _addresses(plan: Plan) -> str:
    try:
        return ", ".join(interfaces.candidates(plan.interfaces)) + " (the first that a host reaches)"
    except ValueError as error:
        raise Usage(str(error)) from None


def print_config(options: Options) -> str:
    """The text that --print-config prints."""
    width = max(map(len, options.settings))
    rows = [f"{name:<{width}}  {chosen.text():<12}  {chosen.source}" for name, chosen in options.settings.items()]
    return "\n".join(rows) + "\n"


def through_mpi(options: Options, environ: dict[str, str]) -> int:
    """`--mpi` and `--jsrun`: this process becomes mpirun or jsrun. Returns only for --dry-run or if it cannot."""
    program = "jsrun" if options.jsrun else "mpirun"
    if shutil.which(program) is None:
        say(f"{program} is not on the path; leave --{'jsrun' if options.jsrun else 'mpi'} out to use our own agents")
        return 127
    explicit = options.hosts is not None or options.hostfile is not None
    chosen = chosen_hosts(options) if explicit else []
    extra, binding = options.mpi_args or "", options.binding_args or ""
    variables = {**environ, **options.variables()}
    try:
        if options.jsrun:
            words = foreign.jsrun(options.np, chosen, options.command, extra, binding)
        else:
            kind = foreign.flavour(spawn.output_of(["mpirun", "--version"]))
            key = (options.ssh_port, options.ssh_identity_file)
            net = wanted_interfaces(options)
            root = os.geteuid() == 0
            words = foreign.mpirun(kind, options.np, chosen, options.command, variables, net, extra, binding, key, root)
    except ValueError as error:
        raise Usage(str(error)) from None
    if options.dry_run:
        print(" ".join(words))
        return 0
    return spawn.become_program(words, variables)


def write_log(folder: Path, plan: Plan, options: Options) -> None:
    """Writes the settings and facts of a run, for later."""
    (folder / "settings.txt").write_text(print_config(options))
    facts = {
        "farandole": package_version(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "command": list(plan.command),
        "directory": plan.directory,
        "hosts": [one.hostname for one in plan.numbers],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    (folder / "run.json").write_text(json.dumps(facts, indent=1) + "\n")


class _Signalled(BaseException):
    """A signal arrived that asks us to end. Like KeyboardInterrupt it is no Exception: no handler may catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Signals:
    """Raises _Signalled when a signal arrives. From `hold` to `release` the signal waits: the ranks run already, but
    nobody could pass the signal on to them yet."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: int | None = None

    def arrive(self, number: int, _frame: FrameType | None) -> None:
        if not self._held:
            raise _Signalled(number)
        self._waiting = number

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        self._held = False
        if self._waiting is not None:
            raise _Signalled(self._waiting)


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    signals = _Signals()
    asks = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # The program that started us, such as nohup or a shell script, may have set one of them to be ignored.
    before = {
        number: signal.signal(number, signals.arrive)
        for number in asks
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:  # running.py answers it when there is something to ask
        before[signal.SIGQUIT] = signal.signal(signal.SIGQUIT, lambda *_: None)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(plan: Plan, options: Options) -> int:
    """Starts the job and waits until it ends. Returns the exit code."""
    began = time.monotonic()
    elastic_options = make_elastic_options(options)
    reporter = Reporter(options, options.np)
    if reporter.log_directory is not None:
        write_log(reporter.log_directory, plan, options)
        timeline = str(reporter.log_directory / "timeline.json")
        if options.settings["timeline"].value is None:
            plan.environ["FARANDOLE_TIMELINE"] = timeline  # type: ignore[index]  # ours: make_plan made it
    try:
        with (
            _signals() as signals,
            Job(
                plan,
                reporter.sink,
                reporter.say,
                on_hang=OnHang(options.on_hang or ON_HANG[0], reporter.log_directory),
                elastic=elastic_options,
                on_started=signals.hold,
            ) as job,
            running.open_to_questions(job, options.command, tell),
        ):
            reporter.watch(job)
            if options.verbose:
                _tell_places(job, reporter.say)
            code = _wait(job, signals, reporter.say, GRACE_SECONDS if options.grace is None else options.grace)
            reporter.close()
            reporter.summary(job)
            reporter.account(job, code, time.monotonic() - began)
            return code
    except StartError as error:
        reporter.close()
        say(str(error))
        return error.code
    except _Signalled as stop:  # while the job was starting
        reporter.close()
        return 128 + stop.number


def _tell_places(job: Job, say: Callable[[str], None]) -> None:
    for rank, pid in enumerate(job.pids):
        say(f"rank {rank} is process {pid} on {job.host_of(rank)}")


def _wait(job: Job, signals: _Signals, say: Callable[[str], None], grace: float) -> int:
    """Waits until the job ends. The first signal is passed on to the ranks, a second signal kills them."""
    try:
        signals.release()
        return job.wait()
    except _Signalled as stop:
        number = stop.number
    name = signal.Signals(number).name
    try:
        job.stop(grace, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        say(f"{name}: the ranks have {grace:g} s to end; once more kills them")
        job.wait()
    except _Signalled:
        job.abandon()
    return 128 + number
