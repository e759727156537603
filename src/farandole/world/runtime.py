# This process in the job: init, shutdown, rank, size, process sets, timeline. Holds the one engine of the process.
# Touches config, engine, errors, groups, native, reference, observe, rendezvous and tuning.
"""`init()` joins the job and starts the engine in a new `World`; all other functions use this world."""

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

from ..base import ending, errors, tested
from ..base.config import Config, cache_directory, environment, given, tell_place, warn_of_ignored
from ..engine.interface import Engine, Outcome
from ..engine.native import NativeEngine, load, start_pulse
from ..rendezvous.elastic.policy import Times
from .groups import GroupTable, ProcessSet, as_sets, global_process_set
from .observe import log
from .observe.timeline import Timeline

if TYPE_CHECKING:
    from ..clusters import ClusterRank
    from ..clusters.join import ClusterSession
    from ..engine import bridge
    from ..rendezvous.messages import MembershipUpdate
    from ..rendezvous.session import Session
    from .tuning.live import Tuner

LEAVE_S = 2.0  # seconds that shutdown gives to bytes in flight
DRAIN_S = 30.0  # for saving when the launcher is gone; --drain-timeout may end it earlier
DYNAMIC = "dynamic"
SAVING_OFFSET = 8  # in the rank's status page; launch/watch.py reads it
LAUNCHER_GONE_OFFSET = 9  # in the agent's status page; launch/watch.py writes it
# for the agent to see that the launcher is gone, after a rank has seen it
LAUNCHER_GONE_S = 10.0
PLACE = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")  # these change with the generation
PYTHON_ENGINE = Path(__file__).parents[1] / "engine"
PYTHON_WIRE = ("interface.py", "reference.py", "specification.py")  # the files that define the messages of that engine

_log = logging.getLogger("farandole")


@dataclass
class Pending:
    """What a user's handle stands for: submitted requests, and how their outcomes become the result."""

    handles: list[int]
    finish: Callable[[list[Outcome]], Any]
    outcomes: list[Outcome] = field(default_factory=list)
    failure: Exception | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)  # several threads may wait for one handle

    def submitted(self) -> bool:
        """Whether the engine has the requests; a copy from the device may still be running."""
        return True


class World:
    """Everything that exists from init to shutdown."""

    def __init__(self, config: Config, engine: Engine, session: Session, cluster: ClusterSession | None = None) -> None:
        self.config = config
        self.engine = engine
        self.session = session
        self.cluster = cluster  # of a job that another launcher started
        self.groups = GroupTable(engine)
        self.timeline: Timeline | None = None
        self.tuner: Tuner | None = None  # on rank 0 of a job with autotune
        self.handles: dict[int, Pending] = {}
        self.repeats: dict[Any, Any] = {}  # operations that scripts call repeatedly (torch/repeats.py)
        self._numbers = itertools.count(1)

    def add_handle(self, pending: Pending) -> int:
        """Adds a handle for a user; handles count up from 1."""
        handle = next(self._numbers)
        self.handles[handle] = pending
        return handle

    def trace(self, path: str, mark_cycles: bool) -> None:
        """Writes the timeline to `path` from now on."""
        self.stop_trace()
        self.timeline = Timeline(self.engine, path, mark_cycles)

    def stop_trace(self) -> None:
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.stop()

    def tune(self) -> None:
        """Starts tuning as the settings say."""
        config, engine = self.config, self.engine
        if not (config.autotune or config.tune_at_init) or engine.size == 1:
            return
        if not engine.tuning():
            if engine.rank == 0:
                _log.warning("the Python reference engine has nothing to tune")
            return
        from .tuning import first, live, search  # imported only when tuning is on

        hosts = self.session.hosts
        choices = search.choices(config, len(set(hosts)), given())
        if config.tune_at_init:
            first.tune(engine, config, hosts, choices, cache_directory(config))
        if config.autotune and engine.rank == 0:
            self.tuner = live.Tuner(engine, config, choices)

    def close(self, again: int = 0) -> None:
        """Leaves the job and frees everything; in a forked child it only closes copies. `again`: as for a session."""
        self.stop_trace()
        if self.tuner is not None:
            self.tuner.stop()
        try:
            # Dead peers, or a fork, must not stop this process from leaving.
            with contextlib.suppress(errors.HorovodInternalError):
                self.engine.leave(LEAVE_S)
        finally:  # also if a signal handler raised
            self.session.close(again)
            if self.cluster is not None:
                self.cluster.close()
            self.engine.close()
            self.groups.clear()
            self.handles.clear()
            self.repeats.clear()


class Notifications:
    """The last membership update of the elastic driver for this generation. The session's thread writes it."""

    def __init__(self) -> None:
        self.losses = 0  # ranks that were lost while this process was in the job
        self._pending: tuple[int, int, float | None] = (0, 0, None)

    def pending(self) -> tuple[int, int, float | None]:
        """(stamp, result, deadline). result: workers leave (1), join (2), or both (3); (0, 0, None): no update.

        `deadline` (time.monotonic) is set when leaving workers want to save first. Other ranks may not have the update
        yet, so all act when the largest stamp of all ranks is not 0. A new generation starts without an update.
        """
        return self._pending

    def count_loss(self) -> None:
        """Called by the session when a rank was lost."""
        self.losses += 1

    def hear(self, message: MembershipUpdate) -> None:
        """Called by the session with an update."""
        _, result, deadline = self._pending
        if message.drain_ms:
            deadline = time.monotonic() + message.drain_ms / 1000
        self._pending = (message.stamp, result | message.result, deadline)

    def drain(self, seconds: float) -> None:
        """Asks all ranks to leave."""
        self._pending = (self._pending[0] + 1, self._pending[1] | 1, time.monotonic() + seconds)

    def clear(self) -> None:
        """A new generation begins."""
        self._pending = (0, 0, None)


class Runtime:
    """Holds the world of this process, if there is one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._world: World | None = None
        self._registered = False
        self._opened: tuple[Config, list[ProcessSet], ClusterRank | None] | None = None
        self.notifications = Notifications()
        self._pulse: bridge.Pulse | None = None  # of an elastic job
        self._saving = False  # something must be saved before this process leaves
        self._asked_to_leave = False  # by SIGTERM
        self._saved = False  # all ranks have saved since then
        self._closing = False  # the world is being closed

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

    def open(self, config: Config, process_sets: list[ProcessSet], found: ClusterRank | None = None) -> None:
        with self._lock:
            if self._world is not None:
                return
            log.configure(config)
            self._closing = False
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
                self._stop_guard()
                self._closing = True
                self._world.close()
                self._world = None  # only now, so that an interrupted close can be repeated
            self._opened = None
            if self._pulse is not None:
                self._pulse.stop()
                self._pulse = None

    def reset(self, commit: int = 0) -> None:
        """Leaves this generation and joins the next, in this process; blocks until it starts.

        `commit` is the number of this rank's last commit: rank 0 of the next generation has the largest one. Process
        sets that were given to init and are still a part of the world are registered again. Other sets, and a set that
        would contain all ranks, are removed; their process_set_id is None. Raises Removed when an elastic job has no
        slot for this process. In a job that is not elastic it is shutdown and init, and fails when a rank is lost.
        """
        with self._lock:
            if self._opened is None:
                raise errors.NotInitialized
            world, self._world = self._world, None
            if world is not None:
                self._stop_guard()
                world.close((2 if self._asked_to_leave else 3) if self._saved else 1)
            if self._launcher_gone():
                raise errors.Removed("the launcher is gone")
            if self._asked_to_leave and self._saved:
                raise errors.Removed("it was asked to leave (SIGTERM)")
            self._world = self._join(*self._opened, commit)

    def _join(self, config: Config, process_sets: list[ProcessSet], found: ClusterRank | None, commit: int) -> World:
        while True:
            self.notifications.clear()
            world: World | None = None
            try:
                self._start_heartbeat(config)
                world = _connect(config, found, commit, self)
                if self._pulse is not None:
                    self._pulse.guard(world.engine, int(Times(config.suspect_seconds).revoke * 1000))
                world.groups.add([one for one in process_sets if config.worker < 0 or _fits(one, world.engine.size)])
                world.tune()
                _begin_timeline(world, config)
                self._saved = False
                if world.session.place:
                    tell_place(dict(zip(PLACE, world.session.place, strict=True)))
                if self._asked_to_leave:  # somebody was lost before all had saved
                    self.notifications.drain(DRAIN_S)
                return world
            except BaseException as error:
                again = config.worker >= 0 and isinstance(error, errors.HorovodInternalError)
                if world is not None:
                    self._stop_guard()
                    world.close(int(again))
                # Another rank died meanwhile. The elastic driver knows, and there will be another generation.
                if not again or getattr(error, "final", False):
                    raise

    def _start_heartbeat(self, config: Config) -> None:
        if config.pulse_fd is not None and self._pulse is None:
            beat = int(Times(config.suspect_seconds).beat * 1000)
            self._pulse = start_pulse(config.pulse_fd, config.agent_pulse_fd, beat, config.library)
            os.pwrite(config.pulse_fd, bytes([self._saving]), SAVING_OFFSET)

    def _stop_guard(self) -> None:
        if self._pulse is not None:
            self._pulse.guard(None)

    def set_saving(self, saving: bool) -> None:
        """Sets whether this rank must save before it leaves: when the launcher is gone, or at SIGTERM.

        SIGTERM then makes all ranks save at a step on which they agree, and this rank leaves.
        """
        self._saving = saving
        main = threading.current_thread() is threading.main_thread()
        if saving and main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and self._elastic:
            signal.signal(signal.SIGTERM, self._on_sigterm)
        if self._opened is not None and (fd := self._opened[0].pulse_fd) is not None:
            os.pwrite(fd, bytes([saving]), SAVING_OFFSET)

    def set_saved(self) -> None:
        """All ranks have saved: a rank that was asked to leave does so at the next reset."""
        self._saved = True

    @property
    def _elastic(self) -> bool:
        return self._opened is not None and self._opened[0].worker >= 0

    def _on_sigterm(self, _number: int, _frame: Any) -> None:
        self._asked_to_leave = True
        self.notifications.drain(DRAIN_S)

    def hub_lost(self, engine: Engine, reason: str) -> None:
        """The connection to the launcher of an elastic job has ended.

        If the launcher is gone, ranks that must save do so at a step on which all agree. If it still runs, it has
        closed
        the connection, as it does with a silent rank; then this rank joins again.
        """
        deadline = time.monotonic() + LAUNCHER_GONE_S
        while self._saving and self._world is not None and not self._closing and time.monotonic() < deadline:
            if self._launcher_gone():
                self.notifications.drain(DRAIN_S)
                return
            time.sleep(0.01)  # until the agent, another process, has seen it too
        engine.revoke(errors.ABORTED, -1, f"the connection to the launcher was lost: {reason}")

    def _launcher_gone(self) -> bool:
        """Whether this host's agent has seen the end of the launcher."""
        fd = self._opened[0].agent_pulse_fd if self._opened is not None else None
        return fd is not None and os.pread(fd, 1, LAUNCHER_GONE_OFFSET) == b"\1"

    def at_exit(self, report_fd: int | None, pid: int) -> None:
        # First, because leaving makes other ranks fail, and by then the launcher must know the root cause.
        if report_fd is not None and os.getpid() == pid:
            ending.tell(report_fd)
        self.close()

    def after_fork(self) -> None:
        # Another thread may have been in init or shutdown during the fork.
        self._lock = threading.RLock()
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:  # data loaders and pools end their children with it
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _connect(config: Config, found: ClusterRank | None, commit: int, owner: Runtime) -> World:
    """Joins the other ranks and starts the engine; closes what it opened if something fails."""
    cluster: ClusterSession | None = None
    wire = _wire_version(config)
    if found is None:
        from ..rendezvous.mesh import join  # keeps `import farandole` fast

        session = join(config, commit=commit, wire=wire)
    else:
        from ..clusters.join import join_cluster

        cluster = join_cluster(config, found, environment(), wire)
        session = cluster.session
    engine: Engine | None = None
    try:
        config = dataclasses.replace(config if cluster is None else cluster.config, tcp_streams=session.streams)
        if session.place:
            place: dict[str, Any] = dict(zip(PLACE, session.place, strict=True))
            config = dataclasses.replace(config, **place)
        engine = _make_engine(config, session.rank, session.hosts, session.generation)
        session.hand_over(engine)
        lost = cluster.hub_lost if cluster is not None else None
        if session.place:
            lost = functools.partial(owner.hub_lost, engine)
        waited = functools.partial(engine.counter, "waited_ns")
        session.serve(engine, lost, owner.notifications.hear, owner.notifications.count_loss, waited)
        engine.start(config.start_timeout)
        return World(config, engine, session, cluster)
    except BaseException:
        if engine is not None:
            engine.close()
        session.close(int(config.worker >= 0))
        if cluster is not None:
            cluster.close()
        raise


def _fits(process_set: ProcessSet, size: int) -> bool:
    ranks = process_set.ranks or []
    return len(ranks) < size and max(ranks, default=0) < size


def _begin_timeline(world: World, config: Config) -> None:
    if config.timeline and config.timeline.lower() != DYNAMIC and world.engine.rank == 0:
        # A later generation must not overwrite the timeline of an earlier one.
        later = f".{world.session.generation}" if config.worker >= 0 and world.session.generation > 1 else ""
        world.trace(config.timeline + later, config.timeline_mark_cycles)


def _wire_version(config: Config) -> str:
    """The protocol version that all ranks must share: the core's number, or a hash of the Python engine."""
    if config.engine != "python":
        return f"{load(config.library).wire:016x}"
    texts = [hashlib.sha256((PYTHON_ENGINE / name).read_bytes()).digest() for name in PYTHON_WIRE]
    return f"python-{hashlib.sha256(b''.join(texts)).hexdigest()[:16]}"


def _make_engine(config: Config, rank: int, hosts: Sequence[int], generation: int) -> Engine:
    if config.engine == "python":
        from ..engine.reference import ReferenceEngine  # imported only when it is selected

        return ReferenceEngine(config, rank, hosts, generation)
    return NativeEngine(config, rank, hosts, generation)


runtime = Runtime()
os.register_at_fork(after_in_child=runtime.after_fork)


def _place(config: Config) -> tuple[Config, ClusterRank | None]:
    """The rank of this process: from `farandole run`, from another launcher's variables, or a world of one."""
    if config.rendezvous is not None:
        return config, None
    from ..clusters import detect, settle

    found = detect(environment(), config.launcher)
    return (config, None) if found is None else (settle(config, found), found)


def _check_comm(comm: Any, config: Config) -> None:
    if comm is None:
        return
    if hasattr(comm, "Get_rank"):
        raise ValueError("init(comm=...) takes no MPI communicator; leave it out: under mpirun init() finds its place")
    ranks = ProcessSet(comm).ranks or []
    if config.rank not in ranks:
        raise ValueError(f"init(comm={ranks}): rank {config.rank} is not in this list; all ranks of the job must be")
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
    """This process's number on its host; in an elastic job that of its slot, which stays."""
    return runtime.world.config.local_rank


def local_size() -> int:
    """Number of processes on this host; in an elastic job one more than the largest local rank there."""
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
    # Local ranks of an elastic job have gaps where a rank was lost.
    whole = bool(world.session.place) or world.config.local_size * world.config.cross_size == world.engine.size
    return even and whole


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Writes this rank's events to `file_path` (Chrome trace) until stop_timeline; replaces a running timeline."""
    runtime.world.trace(file_path, mark_cycles)


def stop_timeline() -> None:
    """Ends the timeline of this rank; without one it does nothing."""
    runtime.world.stop_trace()


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


# Which transport is used. Scripts ask this to choose a code path. With Gloo they choose the CPU path without mpirun,
# which Farandole's own links serve.


def mpi_enabled() -> bool:
    """False: MPI is never used."""
    return False


def mpi_built() -> bool:
    """False: MPI is never used."""
    return False


def mpi_threads_supported() -> bool:
    """ValueError, as in Horovod without MPI."""
    raise ValueError("Horovod MPI is not enabled; Farandole's own links move the bytes")


def gloo_enabled() -> bool:
    """True, so that scripts choose their CPU path: Farandole's own links replace Gloo."""
    return True


def gloo_built() -> bool:
    """True, for the same reason as gloo_enabled; no code of Gloo is inside."""
    return True


def nccl_built() -> int:
    """0, also where NCCL is installed: no operation uses it yet. `farandole doctor` says which NCCL is here."""
    return 0


def ddl_built() -> bool:
    """False: no DDL."""
    return False


def ccl_built() -> bool:
    """False: no oneCCL."""
    return False


def cuda_built() -> bool:
    """False, also where a GPU is: CUDA tensors go through host memory. `farandole doctor` names the GPUs."""
    return False


def rocm_built() -> bool:
    """False: tensors are on the CPU."""
    return False
