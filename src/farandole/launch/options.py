# Parses the command line of `farandole run` and the configuration file. Each setting has one declaration for both.
# Reads the file that --config-file names; the environment is an argument.
"""`parse(words, environ)` returns `Options`. It raises Usage, whose text says what was wrong and how to correct it.

The settings of the job are those of config.SETTINGS. A flag has priority over the file, the file over variables, and
variables over defaults. Options that only the launcher needs are declared here.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farandole.base.config import OF_OUR_LAUNCHERS, SETTINGS
from farandole.base.setting import Setting, text_of

OURS, HOROVODS = "farandole run", "horovodrun"  # the names of the program
NOT_FOR_FLAGS = ("launcher", "meet_at", "secret_file", "job_size")  # for ranks that another launcher starts


class Usage(Exception):
    """The command line is wrong."""


@dataclass(frozen=True)
class Flag:
    """An option of the launcher itself."""

    name: str  # attribute of Options
    words: tuple[str, ...]
    help: str
    metavar: str = ""  # "": the option takes no value
    type: str = "str"
    count: int = 1  # the number of its values
    hidden: bool = False
    repeated: bool = False


FLAGS = (
    Flag("np", ("-np", "--num-proc"), "number of ranks", "N", "int"),
    Flag("hosts", ("-H", "--hosts"), "hosts and their slots: host1:4,host2:4", "HOSTS"),
    Flag("hostfile", ("-hostfile", "--hostfile"), "file with a line `host slots=n` for each host", "FILE"),
    Flag("config_file", ("--config-file",), "YAML file with settings; flags win over it", "FILE"),
    Flag("network_interfaces", ("--network-interfaces",), "use only these interfaces, e.g. eth0,eth1", "NAMES"),
    Flag("network_interface", ("--network-interface",), "one more of them", "NAME", hidden=True, repeated=True),
    Flag("ssh_port", ("-p", "--ssh-port"), "port of ssh on all hosts", "PORT", "int"),
    Flag("ssh_identity_file", ("-i", "--ssh-identity-file"), "private key for ssh", "FILE"),
    Flag("ssh_accept_new", ("--ssh-accept-new",), "accept the keys of hosts that ssh does not know yet"),
    Flag("remote_python", ("--remote-python",), "Python with farandole on other hosts (default: as here)", "PATH"),
    Flag("threads", ("--threads-per-rank",), "OMP_NUM_THREADS of each rank (default: cores / ranks)", "N", "int"),
    Flag("grace", ("--grace",), "seconds between Ctrl-C or SIGTERM and SIGKILL (10)", "S", "float"),
    Flag("output_filename", ("--output-filename",), "also write DIR/rank.N/stdout and stderr", "DIR"),
    Flag("log_dir", ("--log-dir",), "a new folder in DIR: logs of all ranks, settings, versions, timeline", "DIR"),
    Flag(
        "on_hang",
        ("--on-hang",),
        "what happens when ranks wait for one that does not come: report, dump (also the last operations), kill",
        "WHAT",
    ),
    Flag(
        "timestamps",
        ("--timestamps", "-prefix-timestamp", "--prefix-output-with-timestamp"),
        "a time in front of each line",
    ),
    Flag("raw", ("--raw",), "the ranks' output as it is, without [rank]<stream>: marks"),
    Flag("quiet", ("--quiet",), "the launcher prints nothing about a job without failures"),
    Flag("json", ("--json",), "write what the launcher knows at the end of the job", "FILE"),
    Flag("verbose", ("--verbose",), "say which process is which rank"),
    Flag("dry_run", ("--dry-run",), "say what would be started where, and start nothing"),
    Flag("print_config", ("--print-config",), "print each setting and where it comes from"),
    Flag("check_build", ("-cb", "--check-build"), "print what is inside, and who moves the bytes"),
    Flag("version", ("-v", "--version"), "print the version"),
    Flag("help", ("-h", "--help"), "print the flags that are used most"),
    Flag("help_all", ("--help-all",), "print all flags"),
    Flag("gloo", ("--gloo",), "start ranks with our own agents (the default)"),
    Flag("mpi", ("--mpi",), "start ranks with mpirun"),
    Flag("jsrun", ("--jsrun",), "start ranks with jsrun"),
    Flag("mpi_args", ("--mpi-args",), "more words for mpirun or jsrun", "WORDS"),
    Flag("binding_args", ("--binding-args",), "how mpirun binds ranks to cores", "WORDS"),
    Flag("tcp", ("--tcp",), "NCCL uses TCP alone as well (NCCL_IB_DISABLE=1); our own links always do"),
    Flag("disable_cache", ("--disable-cache",), "accepted; nothing is kept between runs"),
    Flag("min_np", ("--min-np", "--min-num-proc"), "elastic: fewest ranks", "N", "int"),
    Flag("max_np", ("--max-np", "--max-num-proc"), "elastic: most ranks", "N", "int"),
    Flag("slots_per_host", ("--slots-per-host", "--slots"), "elastic: slots of a found host", "N", "int"),
    Flag("reset_limit", ("--reset-limit",), "elastic: how often ranks may come and go", "N", "int"),
    Flag("cooldown", ("--blacklist-cooldown-range",), "elastic: seconds a failed host is out", "MIN MAX", "int", 2),
    Flag(
        "blacklist",
        ("--blacklist",),
        "elastic: what is left out after a failure, slot or host (host with a discovery script, else slot)",
        "WHAT",
    ),
    Flag("discovery", ("--host-discovery-script",), "elastic: program that prints the hosts", "PROGRAM"),
    Flag("drain_timeout", ("--drain-timeout",), "elastic: seconds to save when ranks have to go (30)", "S", "float"),
    Flag("survive_launcher", ("--survive-launcher",), "elastic: the job goes on when this process ends"),
)
_RANKS = "; did you mean -np, the number of all ranks?"
_HOSTS = "; did you mean -H host1:2,host2:2, the hosts with the number of ranks on each?"
_FOUND = "; leave it out: ranks find each other, and one command starts all of them"
OF_OTHER_LAUNCHERS = {  # what torchrun, accelerate and mpirun call it, with - for _
    **dict.fromkeys(("-n", "--np", "--nproc", "--nprocs", "--num-processes", "--nproc-per-node"), _RANKS),
    **dict.fromkeys(("--nnodes", "--num-machines", "--host", "-host", "--npernode", "--ppn"), _HOSTS),
    **dict.fromkeys(("--node-rank", "--machine-rank", "--master-addr", "--master-port", "--main-process-ip"), _FOUND),
    **dict.fromkeys(("--main-process-port", "--rdzv-endpoint", "--rdzv-backend", "--rdzv-id", "--standalone"), _FOUND),
}
# Flags that the file of --config-file may have, below `job:`, by the name that they have there.
IN_FILE = {
    **{name: name for name in ("np", "hosts", "hostfile", "network_interfaces", "ssh_port", "ssh_identity_file")},
    **{name: name for name in ("remote_python", "min_np", "max_np", "slots_per_host", "reset_limit")},
    "host_discovery_script": "discovery",
    "threads_per_rank": "threads",
}
WHERE = ("hosts", "hostfile", "discovery")  # one of them given as a flag replaces all of the file
ELASTIC = ("min_np", "max_np", "discovery")  # any of them makes a job elastic
FOR_ELASTIC = (
    "slots_per_host",
    "reset_limit",
    "cooldown",
    "blacklist",
    "drain_timeout",
    "survive_launcher",
)  # only elastic jobs have these options


@dataclass(frozen=True)
class Chosen:
    """The value of a setting and where it came from."""

    value: Any
    source: str

    def text(self) -> str:
        """The value as the text of a variable."""
        return text_of(self.value)


@dataclass
class Options:
    """A parsed command line: options of the launcher are attributes, settings of the job are in `settings`."""

    command: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)  # the given values of FLAGS
    settings: dict[str, Chosen] = field(default_factory=dict)
    program: str = OURS  # the name that was typed

    def __getattr__(self, name: str) -> Any:
        if name in {flag.name for flag in FLAGS}:
            return self.values.get(name)
        raise AttributeError(name)

    def variables(self) -> dict[str, str]:
        """The variables that ranks get for the settings of flags and of the file, with all their names."""
        # Ranks get our own value in these variables. They get the user's value in the main variable of the setting.
        covered = {f"variable {name}" for name in OF_OUR_LAUNCHERS}
        of_nccl = {"NCCL_IB_DISABLE": "1"} if self.tcp else {}  # for NCCL
        of_programs = {
            SETTINGS[name].variable: chosen.text() for name, chosen in self.settings.items() if chosen.source in covered
        }
        return (
            of_nccl
            | of_programs
            | {
                variable: chosen.text()
                for name, chosen in self.settings.items()
                if not chosen.source.startswith(("default", "variable")) and chosen.value is not None
                for variable in SETTINGS[name].variables
            }
        )


def job_settings() -> list[Setting]:
    return [one for one in SETTINGS.values() if one.scope == "job" and one.name not in NOT_FOR_FLAGS]


def table() -> dict[str, Flag | tuple[Setting, bool]]:
    """All option words. For a setting: False if the word switches it off, else True."""
    found: dict[str, Flag | tuple[Setting, bool]] = {}
    for setting in job_settings():
        for word in setting.flags:
            found[word] = (setting, True)
        if setting.base == "bool":
            for word in setting.off_flags:
                found[word] = (setting, False)
    for flag in FLAGS:
        for word in flag.words:
            found[word] = flag
    return found


def parse(words: Sequence[str], environ: Mapping[str, str], program: str = OURS) -> Options:
    """Reads the options before the command, the configuration file that they name, and the settings in `environ`."""
    options = Options(program=program)
    flags: dict[str, Chosen] = {}
    rest = _read_words(list(words), options, flags)
    options.command = rest[1:] if rest[:1] == ["--"] else rest
    controller = options.values.get("config_file")
    from_file = _read_file(controller, options) if controller is not None else {}
    for setting in job_settings():
        options.settings[setting.name] = (
            flags.get(setting.name) or from_file.get(setting.name) or _from_environment(setting, environ)
        )
    return options


def _read_words(words: list[str], options: Options, flags: dict[str, Chosen]) -> list[str]:
    """Reads options into `options` and `flags`. Returns the words that are left: the command."""
    known = table()
    while words and words[0].startswith("-") and words[0] != "--":
        word = words.pop(0)
        name, equals, value = word.partition("=")
        found = known.get(name)
        if found is None:
            meant = OF_OTHER_LAUNCHERS.get(name.replace("_", "-"), "")
            close = difflib.get_close_matches(name, known, n=1)
            raise Usage(f"unknown option {name}" + (meant or (f"; did you mean {close[0]}?" if close else "")))
        if isinstance(found, tuple):
            setting, on = found
            if setting.base == "bool":
                if equals:
                    raise Usage(f"{name} is a switch and takes no value")
                flags[setting.name] = Chosen(on, f"flag {name}")
            else:
                text = _take(name, "VALUE", equals, value, words)
                flags[setting.name] = Chosen(scaled(setting, text, name), f"flag {name}")
            continue
        if not found.metavar:
            if equals:
                raise Usage(f"{name} is a switch and takes no value")
            options.values[found.name] = True
            continue
        values = [_convert(found, name, _take(name, found.metavar, equals, value, words))]
        values += [_convert(found, name, _take(name, found.metavar, "", "", words)) for _ in range(found.count - 1)]
        if found.repeated:
            options.values.setdefault(found.name, []).extend(values)
        else:
            options.values[found.name] = values[0] if found.count == 1 else values
    return words


def _take(name: str, metavar: str, equals: str, value: str, words: list[str]) -> str:
    if equals:
        return value
    if not words:
        raise Usage(f"{name} needs a value: {name} {metavar}")
    return words.pop(0)


def _convert(flag: Flag, name: str, text: str) -> Any:
    try:
        value = {"int": int, "float": float, "str": str}[flag.type](text)
        if flag.type == "float" and not math.isfinite(value):
            raise ValueError
        return value
    except ValueError:
        kind = "a whole number" if flag.type == "int" else "a number"
        raise Usage(f"{name} {text}: expected {kind}") from None


def scaled(setting: Setting, text: str, name: str) -> Any:
    """A value from a flag or the file, in the unit of the variable."""
    try:
        if setting.scale != 1.0:
            number = float(text) * setting.scale
            value: Any = int(number) if setting.base == "int" else number
            setting.check(value, name)
            return value
        return setting.parse(text, name)
    except (ValueError, OverflowError) as error:
        problem = str(error) if str(error).startswith(name) else f"{name} {text}: expected a number"
        raise Usage(problem) from None


def _from_environment(setting: Setting, environ: Mapping[str, str]) -> Chosen:
    for variable in setting.variables:
        if environ.get(variable, "").strip():
            try:
                return Chosen(setting.parse(environ[variable], variable), f"variable {variable}")
            except ValueError as error:
                raise Usage(str(error)) from None
    return Chosen(setting.default, "default")


# The configuration file.


def _read_file(path: str, options: Options) -> dict[str, Chosen]:
    content = _load(path)
    keys = {setting.key: setting for setting in job_settings()}
    sections = {key.partition(".")[0] for key in keys}
    found: dict[str, Chosen] = {}
    if not isinstance(content, dict):
        raise Usage(f"{path}: expected sections like `params:` with settings below them")
    for section, entries in content.items():
        if section == "controller":
            _choose_controller(path, entries, options)
            continue
        if section not in (*sections, "job"):
            raise Usage(_unknown(path, "section", str(section), [*sections, "controller", "job"]))
        if not isinstance(entries, dict):
            raise Usage(f"{path}: {section}: expected settings below it")
        if section == "job":
            _read_job(path, entries, options)
            continue
        for key, value in entries.items():
            setting = keys.get(f"{section}.{key}")
            if setting is None:
                known = [name.partition(".")[2] for name in keys if name.startswith(f"{section}.")]
                raise Usage(_unknown(path, f"setting in {section}", str(key), known))
            if value is not None:
                found[setting.name] = Chosen(_file_value(setting, value, f"{path}: {section}.{key}"), f"file {path}")
    return found


def _read_job(path: str, entries: dict[Any, Any], options: Options) -> None:
    """Reads the flags below `job:` that the command line does not give."""
    given = set(options.values)
    if given.intersection(WHERE):
        given.update(WHERE)
    flags = {flag.name: flag for flag in FLAGS}
    for key, value in entries.items():
        if key not in IN_FILE:
            raise Usage(_unknown(path, "setting in job", str(key), list(IN_FILE)))
        flag = flags[IN_FILE[key]]
        if isinstance(value, dict | list | bool):
            kind = "a number" if flag.type == "int" else "text"
            raise Usage(f"{path}: job.{key}: {value!r}: expected {kind}")
        if value is not None and flag.name not in given:
            options.values[flag.name] = _convert(flag, f"{path}: job.{key}:", str(value))


def _load(path: str) -> Any:
    import yaml  # needed only for a file

    try:
        with open(path, encoding="utf-8") as file:
            return yaml.safe_load(file) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise Usage(f"cannot read --config-file {path}: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise Usage(f"{path}{where} is no YAML: {getattr(error, 'problem', None) or error}") from None


def _choose_controller(path: str, value: Any, options: Options) -> None:
    if value not in ("gloo", "mpi", "jsrun"):
        raise Usage(f"{path}: controller: {value!r}: expected gloo, mpi or jsrun")
    if not any(options.values.get(name) for name in ("gloo", "mpi", "jsrun")):
        options.values[str(value)] = True


def _file_value(setting: Setting, value: Any, where: str) -> Any:
    if setting.base == "bool":
        if not isinstance(value, bool):
            raise Usage(f"{where}: {value!r}: expected true or false")
        return value != setting.inverted
    if isinstance(value, dict | list | bool):
        raise Usage(f"{where}: {value!r}: expected {setting.expected}")
    return scaled(setting, str(value), where)


def _unknown(path: str, what: str, name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known))}"
    return f"{path}: unknown {what}: {name}; {hint}"
