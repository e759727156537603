# Checks for leaks: a test fails if it leaves a thread, child, descriptor, shared memory, temporary file or changed
# variable behind. Touches only the operating system's lists.
"""Fixtures of all tests."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
# The checkout, the harness of tests/ranks, and the modules beside this file.
sys.path[:0] = [str(HERE.parent / "src"), str(HERE / "ranks"), str(HERE)]

import alone  # noqa: E402
import waiting  # noqa: E402
from alone import pytest_addoption, pytest_sessionfinish  # noqa: E402, F401 (hooks)

SETTLE_S = 2.0  # anything that ends by itself within this time after a test is not a leak
PREFIX, OWNER = "farandole-tests-", "owner"
OWN_VARIABLES = ("PYTEST_CURRENT_TEST",)
# Variables of the shell that started the tests, which would set a rank, a setting or a rendezvous.
FOREIGN = re.compile(
    "(FARANDOLE|HOROVOD|OMPI|PMI|PMIX|MV2|HYDRA|PALS|JSM|FLUX|SLURM|SRUN|TORCHELASTIC|RAY|SPARK)_.*"
    "|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|JOB_COMPLETION_INDEX|LSB_JOBID|XDG_RUNTIME_DIR"
)
KEPT = ("FARANDOLE_LIBRARY",)  # tests can be run with another library
# pytest-timeout's watchdog, xdist's channel, Python's own helpers.
OWN_THREADS = ("MainThread", "pytest_timeout", "execnet", "asyncio", "QueueFeederThread", "Thread-pytest")
OWN_FILES = (".hypothesis", "/dev/urandom", ".pytest_cache", "/proc/", ".pyc", ".coverage")

# A shell starts background programs with SIGINT ignored. Every process that a test starts would inherit this and ignore
# Ctrl-C. SIGHUP is not changed: a run under nohup survives its terminal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for name in [name for name in os.environ if FOREIGN.fullmatch(name) and name not in KEPT]:
    del os.environ[name]


@dataclass
class Belongings:
    """What this process owns and what would outlive a test if it is not freed."""

    threads: set[str]
    children: set[str]
    descriptors: set[str]
    shared_memory: set[str]
    temporary_files: set[str]
    environment: set[str]

    @staticmethod
    def now() -> Belongings:
        return Belongings(
            threads={f"{t.name} ({t.ident})" for t in threading.enumerate() if not t.name.startswith(OWN_THREADS)}
            | native_threads(),
            children=children(),
            descriptors=descriptors(),
            shared_memory={name for name in listing("/dev/shm") if "farandole" in name},
            temporary_files=temporary_files(),
            environment={f"{k}={v}" for k, v in os.environ.items() if k not in OWN_VARIABLES},
        )

    def beyond(self, before: Belongings) -> dict[str, list[str]]:
        """What exists now and did not exist before; a removed or changed variable counts too."""
        more = {f.name: sorted(getattr(self, f.name) - getattr(before, f.name)) for f in fields(self)}
        more["environment"] = sorted(self.environment ^ before.environment)
        return {kind: items for kind, items in more.items() if items}


def listing(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


def temporary_files() -> set[str]:
    """What lies in the directory of temporary files. Python probes that directory with a file of eight characters that
    says "blat"; a process that is killed at this moment leaves the file, which cannot be prevented."""
    path = Path(tempfile.gettempdir())
    found = set()
    for name in listing(str(path)):
        if name.startswith(("pytest-of-", "farandole-hang-")):  # reports about hangs are for people to read later
            continue
        if re.fullmatch("[a-z0-9_]{8}", name):
            try:
                probe = path.joinpath(name).read_bytes() in (b"", b"blat")
            except OSError:  # a directory, or already removed
                probe = False
            if probe:
                continue
        found.add(name)
    return found


def native_threads() -> set[str]:
    """Threads of the core: Python does not know them, but they carry names."""
    found = set()
    for task in listing("/proc/self/task"):
        try:
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
        except OSError:
            continue
        if name.startswith("farandole"):
            found.add(f"native {name} ({task})")
    return found


def children() -> set[str]:
    """Child processes, including dead ones that are not reaped."""
    found = set()
    for pid in waiting.children_of(os.getpid()):
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
            found.add(f"{pid} {'dead' if state == 'Z' else 'alive'} {command}")
    return found


def descriptors() -> set[str]:
    found = set()
    for descriptor in listing("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if not any(ignored in target for ignored in OWN_FILES):
            found.add(f"{descriptor} -> {target}")
    return found


def sweep() -> None:
    """Removes the directories of runs that were killed."""
    for file in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{OWNER}"):
        with contextlib.suppress(OSError, ValueError):  # another user's, removed by another run, or not yet written
            space, owner = file.read_text().split()
            if space == os.readlink("/proc/self/ns/pid") and not waiting.lives(owner):
                shutil.rmtree(file.parent, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Only tests/unit and tests/ranks have quick tests. `--dist loadgroup` keeps the files elsewhere together."""
    for item in items:
        if not item.path.is_relative_to(HERE):  # a run inside a test
            continue
        folder = item.path.relative_to(HERE).parts[0]
        if folder not in ("unit", "ranks"):
            item.add_marker(pytest.mark.slow)
        if folder not in ("unit", "frameworks", "strangers"):  # the last two have groups of their own
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(scope="session", autouse=True)
def private_directories() -> Iterator[None]:
    """Gives this run its own directories: all files left there are ours; files of other programs are not checked."""
    before = dict(os.environ)
    sweep()
    path = tempfile.mkdtemp(prefix=PREFIX)  # a short name: Ray has sockets far below it
    Path(path, OWNER).write_text(f"{os.readlink('/proc/self/ns/pid')} {waiting.this_process()}")
    os.environ["TMPDIR"] = tempfile.tempdir = path
    os.environ["XDG_STATE_HOME"] = f"{path}/state"
    Path(path, "state").mkdir()  # launchers keep folders of running jobs there
    os.environ["XDG_CACHE_HOME"] = str(HERE.parent / "build" / "cache")  # kept: bindings compile once per framework
    yield
    tempfile.tempdir = None
    os.environ.clear()
    os.environ.update(before)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Compares what this process owns before and after the test."""
    before = Belongings.now()
    yield
    with contextlib.suppress(TimeoutError):
        waiting.until(lambda: not Belongings.now().beyond(before), SETTLE_S)
        return
    left = Belongings.now().beyond(before)
    pytest.fail("left behind: " + "; ".join(f"{kind}: {', '.join(items)}" for kind, items in left.items()))


BEGAN = pytest.StashKey[waiting.Moment]()
PROCESSORS = "seconds of processors"  # the property of a teardown's report
MAX_SHOWN = 10
COSTS = HERE.parent / "build" / "test-costs.txt"  # of the last large run


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[BEGAN] = waiting.Moment.now()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A test that was too slow because the machine was busy runs again."""
    marker = pyfuncitem.get_closest_marker("timeout")
    limit = pyfuncitem.config.getoption("timeout", None) or pyfuncitem.config.getini("timeout") or "inf"
    seconds = float(marker.args[0] if marker and marker.args else limit)
    pyfuncitem.obj = waiting.again_when_busy(pyfuncitem.obj, seconds)
    return (yield)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """A test that hangs ends the run and prints its stacks; on a busy machine its limit is longer."""
    began, over = waiting.Moment.now(), threading.Event()

    def watch() -> None:
        for turn in range(waiting.TRIES):
            if over.wait(settings.timeout):
                return
            line = f"not done after {(turn + 1) * settings.timeout:g} s; {(spent := began.since())}"
            if not spent.busy:
                break
            waiting.repeated.append(line)
        item.config.get_terminal_writer().line(f"\n{item.nodeid}: {line}")
        importlib.import_module("pytest_timeout").timeout_timer(item, settings)

    watcher = threading.Thread(target=watch, name=f"pytest_timeout {item.nodeid}", daemon=True)

    def cancel() -> None:
        over.set()
        watcher.join()

    item.cancel_timeout = cancel  # type: ignore[attr-defined]
    watcher.start()
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure says in one line whether the machine was busy; repeated tests are listed at the end."""
    item.user_properties += [("repeated", line) for line in waiting.repeated]
    waiting.repeated.clear()
    report = yield
    if report.when == "teardown" and BEGAN in item.stash:
        report.user_properties.append((PROCESSORS, item.stash[BEGAN].since().own))
    if report.failed and BEGAN in item.stash:
        spent = item.stash[BEGAN].since()
        report.sections.append(("time and processors", str(spent)))
        if spent.busy:
            report.user_properties.append((alone.BUSY, str(spent)))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    used = [
        (seconds, report.nodeid)
        for report in terminalreporter.stats.get("", [])
        if report.when == "teardown"
        for name, seconds in report.user_properties
        if name == PROCESSORS
    ]
    if sum(seconds for seconds, _ in used) > 60:
        terminalreporter.section(f"most seconds of processors, of {sum(seconds for seconds, _ in used):.0f} in all")
        COSTS.parent.mkdir(exist_ok=True)
        COSTS.write_text("".join(f"{seconds:8.2f} {test}\n" for seconds, test in sorted(used, reverse=True)))
        terminalreporter.line(f"(all of them: {COSTS.relative_to(HERE.parent)})")
        for seconds, test in sorted(used, reverse=True)[:MAX_SHOWN]:
            terminalreporter.line(f"{seconds:.1f} {test}")
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    again = [
        (report.nodeid, line)
        for report in reports
        if report.when == "call"
        for name, line in report.user_properties
        if name == "repeated"
    ]
    if again:
        terminalreporter.section(f"tried again or given more time, because the machine was busy: {len(again)}")
        for test, line in again:
            terminalreporter.line(f"{test}: {line}")
