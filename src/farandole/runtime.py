# This process in the job: init, shutdown, rank, size, process sets, timeline. Holds the one engine of the process.
# Touches config, engine, errors, groups, native, reference, observe, rendezvous and tuning.
"""`init()` joins the job and starts the engine; everything else asks the world that it made."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import errors, tested
from .config import Config, cache_directory, environment, given, warn_of_ignored
from .elastic.policy import Times
from .engine import Engine, Outcome
from .groups import GroupTable, ProcessSet, as_sets, global_process_set
from .native import NativeEngine, load, start_pulse
from .observe import ending, log
from .observe.timeline import Timeline

if TYPE_CHECKING:
    from . import bridge
    from .launch.clusters import Found
    from .launch.clusters.meeting import Meeting
    from .rendezvous.messages import Updated
    from .rendezvous.session import Session
    from .tuning.live import Tuner

LINGER_S = 2.0  # what shutdown gives to bytes under way
DRAIN_S = 30.0  # for saving when the launcher is gone; its --drain-timeout may end it earlier
DYNAMIC = "dynamic"
SAVING_AT = 8  # of the memory file with signs of life: launch/watch.py reads it
ALONE_AT = 9  # of the agent's: launch/watch.py writes it
ALONE_S = 10.0  # for the agent, which may be kept from running, to see that the launcher is gone, once a rank has
PLACE = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")  # what changes with the generation
PYTHON_WIRE = ("engine.py", "reference.py", "specification.py")  # what makes and reads the messages of that engine

_log = logging.getLogger("farandole")


@dataclass
class Pending:
    """What stands behind a handle that users hold: requests under way, and how their outcomes become the result."""

    handles: list[int]
    finish: Callable[[list[Outcome]], Any]
    outcomes: list[Outcome] = field(default_factory=list)
    failure: Exception | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)  # several threads may wait for one handle

    def submitted(self) -> bool:
        """Whether the engine has the requests; a device's memory may still be on its way to the host."""
        return True


class World:
    """All that lives from init to shutdown."""

    def __init__(self, config: Config, engine: Engine, session: Session, meeting: Meeting | None = None) -> None:
        self.config = config
        self.engine = engine
        self.session = session
        self.meeting = meeting  # of a job that another launcher started
        self.groups = GroupTable(engine)
        self.timeline: Timeline | None = None
        self.tuner: Tuner | None = None  # on rank 0 of a job with autotune
        self.handles: dict[int, Pending] = {}
        self.repeats: dict[Any, Any] = {}  # operations that scripts call again and again (torch/repeats.py)
        self._numbers = itertools.count(1)

    def hold(self, pending: Pending) -> int:
        """A new handle for users; they count up from 1."""
        handle = next(self._numbers)
        self.handles[handle] = pending
        return handle

    def trace(self, path: str, mark_cycles: bool) -> None:
        """Writes the timeline to `path` from now on, instead of wherever it went before."""
        self.untrace()
        self.timeline = Timeline(self.engine, path, mark_cycles)

    def untrace(self) -> None:
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.stop()

    def tune(self) -> None:
        """Does what the settings say about tuning."""
        config, engine = self.config, self.engine
        if not (config.autotune or config.tune_at_init) or engine.size == 1:
            return
        if not engine.tuning():
            if engine.rank == 0:
                _log.warning("the Python reference engine has nothing to tune")
            return
        from .tuning import first, live, search  # only who tunes pays for it

        hosts = self.session.hosts
        choices = search.choices(config, len(set(hosts)), given())
        if config.tune_at_init:
            first.tune(engine, config, hosts, choices, cache_directory(config))
        if config.autotune and engine.rank == 0:
            self.tuner = live.Tuner(engine, config, choices)

    def close(self, again: int = 0) -> None:
        """Leaves the job and frees everything; in a forked child it only forgets. `again`: as for a session."""
        self.untrace()
        if self.tuner is not None:
            self.tuner.stop()
        # Peers that died, or a fork, must not keep this process from going.
        with contextlib.suppress(errors.HorovodInternalError):
            self.engine.leave(LINGER_S)
        self.session.close(again)
        if self.meeting is not None:
            self.meeting.close()
        self.engine.close()
        self.groups.clear()
        self.handles.clear()
        self.repeats.clear()


class Notifications:
    """What the coordinator of an elastic job last said about this generation. Filled by the session's thread."""

    def __init__(self) -> None:
        self.losses = 0  # ranks that were lost while this process was in the job
        self._pending: tuple[int, int, float | None] = (0, 0, None)

    def pending(self) -> tuple[int, int, float | None]:
        """(stamp, result, deadline): somebody wants to come (2) or has to go (1), or both (3); (0, 0, None): nobody.

        `deadline` (time.monotonic) is set when those who go want to save something first. Other ranks may not have
        heard it yet: all act when the largest stamp of all ranks is not 0. A new generation begins with nothing.
        """
        return self._pending

    def lose(self) -> None:
        """The session has heard that a rank was lost."""
        self.losses += 1

    def hear(self, message: Updated) -> None:
        """The session has heard it."""
        _, result, deadline = self._pending
        if message.drain_ms:
            deadline = time.monotonic() + message.drain_ms / 1000
        self._pending = (message.stamp, result | message.result, deadline)

    def drain(self, seconds: float) -> None:
        """All have to go."""
        self._pending = (self._pending[0] + 1, self._pending[1] | 1, time.monotonic() + seconds)

    def clear(self) -> None:
        """A new generation begins."""
        self._pending = (0, 0, None)


class Runtime:
    """Holds the world of this process, or none."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._world: World | None = None
        self._registered = False
        self._opened: tuple[Config, list[ProcessSet], Found | None] | None = None
        self.notifications = Notifications()
        self._pulse: bridge.Pulse | None = None  # of an elastic job
        self._saving = False  # there is something to save before this process goes
        self._asked = False  # by SIGTERM, to go
        self._saved = False  # since then
        self._parting = False  # the world is being closed

    @property
    def initialized(self) -> bool:
        return self._world is not None

    @property
    def world(self) -> World:
        """The current world; NotInitialized without one."""
        world = self._world
        if world is None:
            raise errors.NotInitialized
        return world

    def open(self, config: Config, process_sets: list[ProcessSet], found: Found | None = None) -> None:
        with self._lock:
            if self._world is not None:
                return
            log.configure(config)
            self._parting = False
            self._world = self._join(config, process_sets, found, 0)
            self._opened = (config, process_sets, found)
            if not self._registered:
                self._registered = True
                atexit.register(self.at_exit, config.report_fd, os.getpid())
            if self._world.engine.rank == 0:  # one rank is enough
                warn_of_ignored()
                tested.tell(tested.used())

    def close(self) -> None:
        with self._lock:
            if self._world is not None:
                self._unguard()
                self._parting = True
                self._world.close()
                self._world = None  # only now: a close that was interrupted can be called again
            self._opened = None
            if self._pulse is not None:
                self._pulse.stop()
                self._pulse = None

    def reset(self, commit: int = 0) -> None:
        """Leaves this generation and joins the next, in this process; blocks until there is one.

        `commit` says how far this rank's state has come: rank 0 of the next generation is one that has come furthest.
        Process sets that were given to init and still are a part of the world are there again; others are gone, with a
        process_set_id of None, and so is one that would be all of it: that is the global one. Raises Removed
        when an elastic job has no place for this process any more. In a job that is not elastic it is shutdown and
        init, and fails when a rank is gone for good.
        """
        with self._lock:
            if self._opened is None:
                raise errors.NotInitialized
            world, self._world = self._world, None
            if world is not None:
                self._unguard()
                world.close((2 if self._asked else 3) if self._saved else 1)
            if self._launcher_gone():
                raise errors.Removed("the launcher is gone")
            if self._asked and self._saved:
                raise errors.Removed("somebody asked it to go")
            self._world = self._join(*self._opened, commit)

    def _join(self, config: Config, process_sets: list[ProcessSet], found: Found | None, commit: int) -> World:
        while True:
            self.notifications.clear()
            world: World | None = None
            try:
                self._show_life(config)
                world = _connect(config, found, commit, self)
                if self._pulse is not None:
                    self._pulse.guard(world.engine, int(Times(config.suspect_seconds).revoke * 1000))
                world.groups.add([one for one in process_sets if config.worker < 0 or _fits(one, world.engine.size)])
                world.tune()
                _begin_timeline(world, config)
                self._saved = False
                if self._asked:  # somebody was lost before all had saved
                    self.notifications.drain(DRAIN_S)
                return world
            except BaseException as error:
                again = config.worker >= 0 and isinstance(error, errors.HorovodInternalError)
                if world is not None:
                    self._unguard()
                    world.close(int(again))
                # Somebody has died again meanwhile; the coordinator knows, and there will be one more generation.
                if not again or getattr(error, "final", False):
                    raise

    def _show_life(self, config: Config) -> None:
        if config.pulse_fd is not None and self._pulse is None:
            beat = int(Times(config.suspect_seconds).beat * 1000)
            self._pulse = start_pulse(config.pulse_fd, config.agent_pulse_fd, beat, config.library)
            os.pwrite(config.pulse_fd, bytes([self._saving]), SAVING_AT)

    def _unguard(self) -> None:
        if self._pulse is not None:
            self._pulse.guard(None)

    def tell_saving(self, saving: bool) -> None:
        """Whether this rank wants to save something before it goes: when the launcher is gone, or at SIGTERM.

        SIGTERM then makes all ranks save at a step that they agree on, and this one leave.
        """
        self._saving = saving
        main = threading.current_thread() is threading.main_thread()
        if saving and main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and self._elastic:
            signal.signal(signal.SIGTERM, self._ask)
        if self._opened is not None and (fd := self._opened[0].pulse_fd) is not None:
            os.pwrite(fd, bytes([saving]), SAVING_AT)

    def tell_saved(self) -> None:
        """All ranks have saved: one that was asked to go does so at the next reset."""
        self._saved = True

    @property
    def _elastic(self) -> bool:
        return self._opened is not None and self._opened[0].worker >= 0

    def _ask(self, _number: int, _frame: Any) -> None:
        self._asked = True
        self.notifications.drain(DRAIN_S)

    def hub_lost(self, engine: Engine, reason: str) -> None:
        """The connection to the launcher of an elastic job has ended.

        If the launcher is gone, ranks that have something to save do so at a step all agree on. If it is not, it has
        closed the connection, as it does with a rank that was silent: this rank comes again.
        """
        deadline = time.monotonic() + ALONE_S
        while self._saving and self._world is not None and not self._parting and time.monotonic() < deadline:
            if self._launcher_gone():
                self.notifications.drain(DRAIN_S)
                return
            time.sleep(0.01)  # the agent, another process, is about to see it too
        engine.revoke(errors.ABORTED, -1, f"the connection to the launcher was lost: {reason}")

    def _launcher_gone(self) -> bool:
        """Whether this host's agent has seen the end of the launcher."""
        fd = self._opened[0].agent_pulse_fd if self._opened is not None else None
        return fd is not None and os.pread(fd, 1, ALONE_AT) == b"\1"

    def at_exit(self, report_fd: int | None, pid: int) -> None:
        # First: leaving makes other ranks fail, and the launcher should know by then who fell by itself.
        if report_fd is not None and os.getpid() == pid:
            ending.tell(report_fd)
        self.close()

    def after_fork(self) -> None:
        # Another thread may have been in init or shutdown when this child was made.
        self._lock = threading.RLock()
        if signal.getsignal(signal.SIGTERM) == self._ask:  # data loaders and pools end their children by it
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _connect(config: Config, found: Found | None, commit: int, owner: Runtime) -> World:
    """Meets the other ranks and starts the engine; closes what it opened when something fails."""
    meeting: Meeting | None = None
    wire = _wire(config)
    if found is None:
        from .rendezvous.mesh import join  # `import farandole` stays quick

        session = join(config, commit=commit, wire=wire)
    else:
        from .launch.clusters.meeting import meet

        meeting = meet(config, found, environment(), wire)
        session = meeting.session
    engine: Engine | None = None
    try:
        config = dataclasses.replace(config if meeting is None else meeting.config, tcp_streams=session.streams)
        if session.place:
            place: dict[str, Any] = dict(zip(PLACE, session.place, strict=True))
            config = dataclasses.replace(config, **place)
        engine = _make_engine(config, session.rank, session.hosts, session.generation)
        session.hand_over(engine)
        lost = meeting.hub_lost if meeting is not None else None
        if session.place:
            lost = functools.partial(owner.hub_lost, engine)
        waited = functools.partial(engine.counter, "waited_ns")
        session.serve(engine, lost, owner.notifications.hear, owner.notifications.lose, waited)
        engine.start(config.start_timeout)
        return World(config, engine, session, meeting)
    except BaseException:
        if engine is not None:
            engine.close()
        session.close(int(config.worker >= 0))
        if meeting is not None:
            meeting.close()
        raise


def _fits(process_set: ProcessSet, size: int) -> bool:
    ranks = process_set.ranks or []
    return len(ranks) < size and max(ranks, default=0) < size


def _begin_timeline(world: World, config: Config) -> None:
    if config.timeline and config.timeline.lower() != DYNAMIC and world.engine.rank == 0:
        # A later generation of an elastic job keeps what earlier ones have written.
        later = f".{world.session.generation}" if config.worker >= 0 and world.session.generation > 1 else ""
        world.trace(config.timeline + later, config.timeline_mark_cycles)


def _wire(config: Config) -> str:
    """What all ranks of a job must have in common: the core's number, or a hash of the engine in Python."""
    if config.engine != "python":
        return f"{load(config.library).wire:016x}"
    texts = [hashlib.sha256(Path(__file__).with_name(name).read_bytes()).digest() for name in PYTHON_WIRE]
    return f"python-{hashlib.sha256(b''.join(texts)).hexdigest()[:16]}"


def _make_engine(config: Config, rank: int, hosts: Sequence[int], generation: int) -> Engine:
    if config.engine == "python":
        from .reference import ReferenceEngine  # only who asks for it pays for it

        return ReferenceEngine(config, rank, hosts, generation)
    return NativeEngine(config, rank, hosts, generation)


runtime = Runtime()
os.register_at_fork(after_in_child=runtime.after_fork)


def _place(config: Config) -> tuple[Config, Found | None]:
    """Who this process is: our launcher has said so, another one left its signs, or it is alone."""
    if config.rendezvous is not None:
        return config, None
    from .launch.clusters import detect, settle

    found = detect(environment(), config.launcher)
    return (config, None) if found is None else (settle(config, found), found)


def _check_comm(comm: Any, config: Config) -> None:
    if comm is None:
        return
    if hasattr(comm, "Get_rank"):
        raise ValueError("init(comm=...) takes no MPI communicator; leave it out: under mpirun init() finds its place")
    ranks = ProcessSet(comm).ranks or []
    if config.rank not in ranks:
        raise ValueError(f"init(comm={ranks}): rank {config.rank} is not in it and so has no world to be in")
    if ranks != list(range(config.size)):
        raise ValueError(
            f"init(comm={ranks}): the world is all {config.size} ranks of the job; "
            f"for fewer use init(process_sets=[{ranks}]) and pass process_set= to the operations"
        )


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the job; without a launcher, a world of one. A second call does nothing.

    `comm`: None, or the list of all ranks. `process_sets`: ProcessSets (or lists of ranks) that all ranks give alike,
    or "dynamic", which allows add_process_set later.
    """
    if runtime.initialized:
        return
    config, found = _place(Config.from_environment())
    _check_comm(comm, config)
    sets: list[ProcessSet] = []
    if isinstance(process_sets, str):
        if process_sets.lower() != DYNAMIC:
            raise ValueError(f'process_sets={process_sets!r}: expected a list of process sets or "dynamic"')
        config = dataclasses.replace(config, dynamic_process_sets=True)
    elif process_sets is not None:
        sets = as_sets(process_sets)
    runtime.open(config, sets, found)


def shutdown() -> None:
    """Leaves the job; pending operations end with ShutDown, here and on the other ranks. init() may follow."""
    runtime.close()


def is_initialized() -> bool:
    """Whether init() has been called, and shutdown() not since."""
    return runtime.initialized


def rank() -> int:
    """This process's number in the job."""
    return runtime.world.engine.rank


def size() -> int:
    """Number of processes in the job."""
    return runtime.world.engine.size


def local_rank() -> int:
    """This process's number on its host."""
    return runtime.world.config.local_rank


def local_size() -> int:
    """Number of processes on this host."""
    return runtime.world.config.local_size


def cross_rank() -> int:
    """This host's number among the hosts that have this local rank."""
    return runtime.world.config.cross_rank


def cross_size() -> int:
    """Number of hosts that have this local rank."""
    return runtime.world.config.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    world = runtime.world
    even = len(set(Counter(world.session.hosts).values())) == 1
    return even and world.config.local_size * world.config.cross_size == world.engine.size


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Writes this rank's events to `file_path` (Chrome trace) until stop_timeline; replaces a running timeline."""
    runtime.world.trace(file_path, mark_cycles)


def stop_timeline() -> None:
    """Ends the timeline of this rank; without one it does nothing."""
    runtime.world.untrace()


def add_process_set(process_set: Any) -> ProcessSet:
    """Registers a ProcessSet (or a list of ranks) on all ranks; all of them call this with the same ranks."""
    world = runtime.world
    if not world.config.dynamic_process_sets:
        raise ValueError(
            'process sets can only be added after init(process_sets="dynamic") or with FARANDOLE_DYNAMIC_PROCESS_SETS=1'
        )
    [new] = as_sets([process_set])
    world.groups.add([new])
    return new


def remove_process_set(process_set: ProcessSet) -> bool:
    """Takes a process set away on all ranks; False for the global one and for one that is not registered."""
    world = runtime.world
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    if not world.config.dynamic_process_sets:
        raise ValueError(
            'process sets can only be removed after init(process_sets="dynamic") or with '
            "FARANDOLE_DYNAMIC_PROCESS_SETS=1"
        )
    return world.groups.remove(process_set)


# What moves the bytes. Scripts ask this to choose a way that works; Gloo is the answer that keeps them on the CPU way
# without mpirun, which is the way Farandole's own links serve.


def mpi_enabled() -> bool:
    """False: MPI is never used."""
    return False


def mpi_built() -> bool:
    """False: MPI is never used."""
    return False


def mpi_threads_supported() -> bool:
    """ValueError, as in Horovod without MPI."""
    raise ValueError("MPI is not enabled: Farandole's own links move the bytes")


def gloo_enabled() -> bool:
    """True: Farandole's own links stand where Horovod has Gloo, so that scripts which ask go on."""
    return True


def gloo_built() -> bool:
    """True, for the same reason as gloo_enabled; no code of Gloo is inside."""
    return True


def nccl_built() -> int:
    """0: no NCCL."""
    return 0


def ddl_built() -> bool:
    """False: no DDL."""
    return False


def ccl_built() -> bool:
    """False: no oneCCL."""
    return False


def cuda_built() -> bool:
    """False: tensors are on the CPU."""
    return False


def rocm_built() -> bool:
    """False: tensors are on the CPU."""
    return False
