# Every setting, declared once: type, default, unit, help, variables, flag and YAML key (setting.py). Frozen at init.
# The only file that reads the environment.
"""Settings of a job: `Config.from_environment()` reads them, `SETTINGS` describes them for flags, YAML and docs."""

from __future__ import annotations

import dataclasses
import difflib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .setting import PREFIX, Setting

KiB = 1 << 10
MiB = 1 << 20
# Our launchers set these two for each rank, because some scripts read them.
OF_OUR_LAUNCHERS = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}

# The variables of torch.distributed for a rank's numbers; our launchers set these as well.
TORCH_VARIABLES = {
    "rank": "RANK", "size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE",
}  # fmt: skip


def _setting(default: Any, help: str, *aliases: str, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "aliases": aliases, **more})


def _seconds(default: float, help: str, *aliases: str, **more: Any) -> Any:
    return _setting(default, help, *aliases, unit="seconds", minimum=0, **more)


def _ignored(default: Any, why: str, *aliases: str, **more: Any) -> Any:
    """A setting that scripts for Horovod may set, but that is ignored; `why` says the reason."""
    return _setting(default, f"accepted, but ignored: {why}", *aliases, no_effect=why, **more)


def _worker(default: Any, help: str, *aliases: str, **more: Any) -> Any:
    return _setting(default, help, *aliases, scope="worker", **more)


CPU_OPERATIONS = ("gloo", "mpi", "ccl")
LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
LAUNCHERS = (
    "auto", "none", "server", "torchrun", "openmpi", "mvapich2", "mpich", "pals", "jsrun", "flux", "slurm",
    "indexed-job",
)  # fmt: skip
ALGORITHMS = ("auto", "ring", "direct", "doubling", "tree")  # the order is that of the core


@dataclass(frozen=True)
class Config:
    """The settings of this process, frozen. Each field is a setting; its metadata is the declaration."""

    # Who this process is. The launcher sets these; bare `python train.py` is a world of one.
    rank: int = _worker(0, "this process's number in the job", "HOROVOD_RANK", minimum=0)
    size: int = _worker(1, "number of processes in the job", "HOROVOD_SIZE", minimum=1)
    local_rank: int = _worker(0, "this process's number on its host", "HOROVOD_LOCAL_RANK", minimum=0)
    local_size: int = _worker(1, "number of processes on this host", "HOROVOD_LOCAL_SIZE", minimum=1)
    cross_rank: int = _worker(0, "this host's number among those with this local rank", "HOROVOD_CROSS_RANK", minimum=0)
    cross_size: int = _worker(1, "number of hosts that have this local rank", "HOROVOD_CROSS_SIZE", minimum=1)
    hostname: str = _worker("localhost", "the host's entry in the launcher's list", "HOROVOD_HOSTNAME")
    rendezvous: str | None = _worker(None, "where the ranks meet: unix:PATH or tcp:HOST:PORT")
    secret_fd: int | None = _worker(None, "descriptor of the memory file with the job's secret", minimum=0)
    report_fd: int | None = _worker(None, "descriptor for telling the agent why this rank failed", minimum=0)
    report_pipe: int = _worker(0, "the number of the pipe behind that descriptor", minimum=0)
    calls_fd: int | None = _worker(None, "descriptor over which an executor's functions come", minimum=0)
    network_interfaces: str | None = _worker(None, "interfaces on which this rank may listen, with commas; none: all")
    private_directory: str | None = _worker(None, "a directory for sockets that the agent removes")
    launcher: str = _setting(
        "auto", "who started this process, when it was not `farandole run`; none: a job of one", choices=LAUNCHERS
    )
    meet_at: str | None = _setting(
        None, "where ranks meet under another launcher: tcp:HOST:PORT of rank 0, or dir:/PATH that all hosts share"
    )
    secret_file: str | None = _setting(
        None, "file with the secret of a job under another launcher: 32 bytes or 64 hexadecimal digits, mode 0600"
    )
    job_size: int | None = _setting(
        None, "number of pods of a Kubernetes indexed job; makes JOB_COMPLETION_INDEX the rank", minimum=1
    )
    elastic: bool = _worker(False, "ranks may come and go", "HOROVOD_ELASTIC")
    pulse_fd: int | None = _worker(None, "descriptor of this rank's status page with its heartbeats", minimum=0)
    agent_pulse_fd: int | None = _worker(None, "descriptor of its agent's status page", minimum=0)
    record_fd: int | None = _worker(
        None, "descriptor of the memory file for the last operations, which the agent reads", minimum=0
    )
    stacks_fd: int | None = _worker(None, "descriptor of the memory file to which stacks are written", minimum=0)
    worker: int = _worker(-1, "this process's number in the life of an elastic job", minimum=-1)
    newcomer: bool = _worker(False, "the job was training when this process was started: init() stops nobody")

    autoload: bool = _setting(
        True,
        "0: nothing of other packages is replaced, but for what a distributed optimizer needs of GradScaler, and "
        "torch's import does not make the backend known; docs/private-names.md lists what there is",
    )

    hints: bool = _setting(
        True, "warn about a script whose ranks train alone, without init() or without reducing gradients"
    )

    tracebacks: str = _setting(
        "short",
        "what a failing rank prints: short leaves out Farandole's own frames, and the tracebacks of ranks that fail "
        "because another one ended",
        choices=("short", "full"),
    )

    check_parameters: bool = _setting(
        True, "torch: warn when the parameters differ between ranks, at the first step and once in 1000 steps"
    )

    # Speed.
    engine: str = _setting(
        "native",
        "the engine that runs the operations; python is the slow specification",
        choices=("native", "python"),
    )
    fusion_threshold: int = _setting(
        128 * MiB,
        "tensors are reduced together up to this size; 0 reduces each tensor alone",
        "HOROVOD_FUSION_THRESHOLD",
        unit="bytes",
        minimum=0,
        flag="--fusion-threshold-mb",
        yaml="params.fusion_threshold_mb",
        scale=MiB,
    )
    cycle_time: float = _ignored(
        1.0,
        "there is no cycle: requests start when they are ready",
        "HOROVOD_CYCLE_TIME",
        unit="milliseconds",
        minimum=0,
        flag="--cycle-time-ms",
        yaml="params.cycle_time_ms",
    )
    cache_capacity: int = _setting(
        1024,
        "the largest number of tensors of a repeated step that is planned ahead; 0 negotiates every step",
        "HOROVOD_CACHE_CAPACITY",
        minimum=0,
        yaml="params.cache_capacity",
    )
    disable_group_fusion: bool = _setting(
        False, "a group of tensors is not fused with other tensors", "HOROVOD_DISABLE_GROUP_FUSION"
    )
    allreduce_algorithm: str = _setting("auto", "the algorithm of allreduce between hosts", choices=ALGORITHMS)
    hierarchical_allreduce: bool = _ignored(
        False,
        "reductions are always done inside the host first",
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
        yaml="params.hierarchical_allreduce",
    )
    hierarchical_allgather: bool = _ignored(
        False,
        "gathers always use shared memory inside the host",
        "HOROVOD_HIERARCHICAL_ALLGATHER",
        yaml="params.hierarchical_allgather",
    )
    torus_allreduce: bool = _ignored(
        False,
        "reductions are always done inside the host first",
        "HOROVOD_TORUS_ALLREDUCE",
        yaml="params.torus_allreduce",
    )
    flush_us: int = _setting(
        20_000, "the longest a request waits for the rest of its planned bucket", unit="microseconds", minimum=0
    )
    # Longer than a time slice of the scheduler: the peer may wait for its core that long, and sleeping too costs more.
    spin_us: int = _setting(10_000, "how long a waiting thread polls before it sleeps", unit="microseconds", minimum=0)
    slot_bytes: int = _setting(64 * KiB, "one slot of a ring in shared memory", unit="bytes", minimum=4096)
    slots: int = _setting(4, "slots of a ring in shared memory", minimum=2, flag="--ring-slots")
    chunk_bytes: int = _setting(256 * KiB, "one message between hosts", unit="bytes", minimum=4096)
    tcp_streams: int = _setting(
        2, "connections between two ranks of different hosts; rank 0 decides", minimum=1, maximum=16
    )
    links: str = _setting("auto", "tcp forbids shared memory inside the host", choices=("auto", "tcp"))
    autotune: bool = _setting(
        False,
        "find the fastest fusion_threshold, flush_us, spin_us, chunk_bytes and streams while the job trains",
        "HOROVOD_AUTOTUNE",
        yaml="autotune.enabled",
    )
    autotune_log: str | None = _setting(
        None,
        "rank 0 writes a CSV of the samples to this path; the last row is what the job keeps",
        "HOROVOD_AUTOTUNE_LOG",
        flag="--autotune-log-file",
        yaml="autotune.log_file",
    )
    autotune_warmup_samples: int = _setting(
        3,
        "samples of autotune that do not count, at the beginning",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
        minimum=0,
        yaml="autotune.warmup_samples",
    )
    autotune_steps_per_sample: int = _setting(
        10,
        "steps of one sample of autotune",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
        minimum=0,
        yaml="autotune.steps_per_sample",
    )
    autotune_bayes_opt_max_samples: int = _setting(
        20,
        "samples of autotune before the best is compared with the defaults; less than 2 tunes nothing",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        minimum=0,
        yaml="autotune.bayes_opt_max_samples",
    )
    autotune_gaussian_process_noise: float = _setting(
        0.8,
        "the noise of one sample of autotune: with 0 it trusts each sample, with 1 hardly",
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        minimum=0,
        maximum=1,
        yaml="autotune.gaussian_process_noise",
    )
    tune_at_init: bool = _setting(
        False,
        "tune for up to a second at init, once for each number of hosts and ranks; later jobs read the result",
    )
    cache_directory: str | None = _setting(
        None,
        "where the results of tune_at_init, the compiled operations of TensorFlow and JAX and the compiled kernels for "
        "GPUs are stored; none: farandole in the user's cache directory",
    )
    tensorflow_ops: str = _setting(
        "auto",
        "how collectives run in TensorFlow's graphs: as operations that are compiled once per version, or as callbacks "
        "of Python; auto: compiled where all ranks can",
        choices=("auto", "compiled", "callback"),
    )
    jax_ops: str = _setting(
        "auto",
        "how collectives run in compiled functions of JAX: as calls of XLA that are compiled once per version, or as "
        "callbacks of Python; auto: compiled where all ranks can",
        choices=("auto", "compiled", "callback"),
    )

    # GPUs. A copy of these libraries that the process has loaded already is used in any case.
    gpu: str = _setting(
        "auto",
        "how CUDA tensors travel; auto: reduced on the GPU, or by NCCL, where all ranks can; host: through host memory",
        choices=("auto", "host"),
    )
    nccl: str = _setting(
        "auto",
        "NCCL for CUDA tensors of ranks that have a GPU each; auto: between hosts, and on one host whose ranks cannot "
        "open each other's GPU memory; on: also where they can; off: never",
        choices=("auto", "on", "off"),
    )
    cuda_library: str | None = _setting(None, "the file of CUDA's driver; none: the loader finds libcuda.so.1")
    nvrtc_library: str | None = _setting(
        None, "the file of CUDA's run-time compiler; none: libnvrtc of Python's packages, else of the system"
    )
    nccl_library: str | None = _setting(
        None, "the file of NCCL or RCCL; none: libnccl.so.2 of Python's packages, else of the system"
    )

    # Elastic training.
    virtual_size: int = _setting(
        0,
        "parts of a step, a power of two; their gradients are added in an order that does not depend on the number of "
        "ranks; 0: each rank is one part",
        minimum=0,
        maximum=1 << 20,
        yaml="elastic.virtual_size",
    )

    # Groups.
    dynamic_process_sets: bool = _setting(
        False, "process sets may be added and removed after init", "HOROVOD_DYNAMIC_PROCESS_SETS"
    )

    # Times.
    start_timeout: float = _seconds(30.0, "how long init waits for all ranks", "HOROVOD_START_TIMEOUT")
    survivor_grace_seconds: float = _seconds(
        1.0,
        "after a rank has failed, or was lost with its agent, the others have this time to end before they get "
        "SIGTERM; in an elastic job they have as long as they need",
    )
    suspect_seconds: float = _setting(
        2.0,
        "elastic: a silent rank or host is reported after this time, and evicted after 2.5 times this time",
        unit="seconds",
        minimum=0.5,
        maximum=3600,
    )
    stall_note_seconds: float = _seconds(
        5.0, "when it is told which rank has not submitted a tensor that others wait for; 0: never"
    )
    stall_check_disable: bool = _setting(
        False,
        "no stall reports at all",
        "HOROVOD_STALL_CHECK_DISABLE",
        flag="--no-stall-check",
        yaml="stall_check.enabled",
        inverted=True,
    )
    stall_check_time_seconds: float = _seconds(
        60.0,
        "when stalled tensors are reported in full, and how often the report is repeated",
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        flag="--stall-check-warning-time-seconds",
        yaml="stall_check.warning_time_seconds",
    )
    stall_shutdown_time_seconds: float = _seconds(
        0.0,
        "end the job when a tensor has been stalled this long; 0 never; ignored below the warning time",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        flag="--stall-check-shutdown-time-seconds",
        yaml="stall_check.shutdown_time_seconds",
    )

    # The timeline and the log.
    timeline: str | None = _setting(
        None,
        "rank 0 writes a Chrome trace to this path from the start; DYNAMIC: only when start_timeline is called",
        "HOROVOD_TIMELINE",
        flag="--timeline-filename",
        yaml="timeline.filename",
    )
    timeline_mark_cycles: bool = _setting(
        False,
        "mark in the timeline where each bucket starts",
        "HOROVOD_TIMELINE_MARK_CYCLES",
        yaml="timeline.mark_cycles",
    )
    log_level: str = _setting(
        "warning", "what is logged", "HOROVOD_LOG_LEVEL", choices=LOG_LEVELS, yaml="logging.level", forgiving=True
    )
    log_hide_time: bool = _setting(
        False,
        "log lines without a time",
        "HOROVOD_LOG_HIDE_TIME",
        flag="--log-without-timestamp",
        synonyms=("--log-hide-timestamp",),
        opposites=("--log-with-timestamp", "--no-log-hide-timestamp"),
        yaml="logging.with_timestamp",
        inverted=True,
    )

    # For scripts and command lines of Horovod; each help text says what is done instead.
    gloo_timeout_seconds: float = _seconds(
        60.0,
        "a peer on another host that is silent for this long is lost; less than 60 counts as 60",
        "HOROVOD_GLOO_TIMEOUT_SECONDS",
        yaml="library_options.gloo_timeout_seconds",
    )
    num_nccl_streams: int = _ignored(
        1,
        "each rank has one stream for NCCL",
        "HOROVOD_NUM_NCCL_STREAMS",
        minimum=0,
        yaml="library_options.num_nccl_streams",
    )
    thread_affinity: str | None = _ignored(
        None,
        "there is one thread, and the kernel places it",
        "HOROVOD_THREAD_AFFINITY",
        yaml="library_options.thread_affinity",
    )
    mpi_threads_disable: bool = _ignored(
        False,
        "MPI moves no bytes",
        "HOROVOD_MPI_THREADS_DISABLE",
        yaml="library_options.mpi_threads_disable",
    )
    controller: str = _ignored(
        "gloo", "ranks always meet over our own links", "HOROVOD_CONTROLLER", choices=("gloo", "mpi")
    )
    cpu_operations: str = _ignored(
        "gloo", "bytes always move over our own links", "HOROVOD_CPU_OPERATIONS", choices=CPU_OPERATIONS
    )
    gloo_iface: str | None = _setting(
        None,
        "interfaces that rank 0 listens on under another launcher; `farandole run` has --network-interfaces",
        "HOROVOD_GLOO_IFACE",
    )
    batch_d2d_memcopies: bool = _ignored(True, "copies are batched anyway", "HOROVOD_BATCH_D2D_MEMCOPIES")
    enable_async_completion: bool = _ignored(
        False, "handles complete as soon as they can", "HOROVOD_ENABLE_ASYNC_COMPLETION"
    )
    enable_xla_ops: bool = _ignored(False, "there are no XLA operations", "HOROVOD_ENABLE_XLA_OPS")
    adasum_mpi_chunk_size: int = _ignored(
        1 << 30, "MPI moves no bytes", "HOROVOD_ADASUM_MPI_CHUNK_SIZE", unit="bytes", minimum=0
    )
    ccl_cache: bool = _ignored(False, "oneCCL is not used", "HOROVOD_CCL_CACHE")
    disable_nvtx_ranges: bool = _ignored(False, "there are no NVTX ranges", "HOROVOD_DISABLE_NVTX_RANGES")
    elastic_timeout: float = _seconds(
        600.0,
        "how long an elastic job waits for --min-np ranks (at the start: -np) before it gives up",
        "HOROVOD_ELASTIC_TIMEOUT",
    )
    spark_start_timeout: float = _seconds(
        600.0, "how long a job on Spark waits for its tasks to start", "HOROVOD_SPARK_START_TIMEOUT"
    )
    spark_use_local_rank_gpu_index: bool = _setting(
        False,
        "ranks on Spark see all GPUs of their host, not those that Spark gave to the tasks",
        "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX",
    )
    library: str | None = _setting(None, "path of another native library (the one with failpoints)", scope="test")

    def __post_init__(self) -> None:
        for setting in SETTINGS.values():
            setting.check(getattr(self, setting.name), setting.name)
        for number, count in (("rank", "size"), ("local_rank", "local_size"), ("cross_rank", "cross_size")):
            if getattr(self, number) >= getattr(self, count):
                raise ValueError(
                    f"{number}={getattr(self, number)} must be smaller than {count}={getattr(self, count)}"
                    f" ({SETTINGS[number].variable}, {SETTINGS[count].variable})"
                )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Reads every setting from `environ` (None: this process's environment).

        >>> Config.from_environment({"HOROVOD_FUSION_THRESHOLD": "0"}).fusion_threshold
        0
        """
        environ = os.environ if environ is None else environ
        _warn_of_unknown(environ)
        return cls(**{setting.name: setting.read(environ) for setting in SETTINGS.values()})


def names_of_set(environ: Mapping[str, str] | None = None) -> list[str]:
    """The settings that `environ` (None: this process's environment) sets."""
    environ = os.environ if environ is None else environ
    found = [
        setting for setting in SETTINGS.values() if any(environ.get(each, "").strip() for each in setting.variables)
    ]
    return [setting.name for setting in found]


def cache_directory(config: Config, environ: Mapping[str, str] | None = None) -> str:
    """Where results that later jobs can use are kept."""
    environ = os.environ if environ is None else environ
    if config.cache_directory is not None:
        return config.cache_directory
    home = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path there is ignored.
    return os.path.join(home if home.startswith("/") else os.path.expanduser("~/.cache"), "farandole")


def environment() -> dict[str, str]:
    """This process's environment, for code that detects other launchers."""
    return dict(os.environ)


def update_rank_variables(numbers: Mapping[str, int]) -> None:
    """Updates this process's variables when a generation of an elastic job begins, because scripts read them."""
    found = {variable: str(number) for name, number in numbers.items() for variable in SETTINGS[name].variables}
    found |= {variable: str(numbers[name]) for name, variable in TORCH_VARIABLES.items()}
    os.environ.update((name, text) for name, text in found.items() if name in os.environ)


SETTINGS: dict[str, Setting] = {
    field.name: Setting(name=field.name, type=str(field.type), default=field.default, **field.metadata)
    for field in dataclasses.fields(Config)
}


_warned: set[str] = set()  # variables about which this process has warned


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    known = {setting.variable for setting in SETTINGS.values()}
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known:
            close = difflib.get_close_matches(variable, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            _warn_once(variable, f"{variable} is no setting of Farandole and has no effect{hint}")


def warn_of_ignored(environ: Mapping[str, str] | None = None) -> None:
    """Warns about settings in `environ` that are ignored. Called on rank 0 alone."""
    environ = os.environ if environ is None else environ
    ours = OF_OUR_LAUNCHERS if environ.get(SETTINGS["rendezvous"].variable) else {}
    for setting in SETTINGS.values():
        set_names = [each for each in setting.variables if environ.get(each, "").strip()]
        variable = next((each for each in set_names if ours.get(each) != environ[each]), None)
        if setting.no_effect and variable is not None:
            _warn_once(variable, f"{variable}={environ[variable]} has no effect: {setting.no_effect}")


def _warn_once(variable: str, text: str) -> None:
    """Warns once per process; Python's own rule is once per calling line."""
    if variable not in _warned:
        _warned.add(variable)
        warnings.warn(text, stacklevel=4)
