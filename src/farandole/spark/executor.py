# `SparkExecutor`: persistent workers in the slots of a Spark application, with the interface of launch/executor.py.
# Touches Spark through session.py, the tasks through registry.py; launch/ runs the job itself.
"""A Spark job holds the slots. Its tasks start agents of the launcher, and the agents run the ranks."""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farandole.base import tested
from farandole.base.config import SETTINGS, Config
from farandole.launch import executor, ssh
from farandole.launch.agent_connection import package_place
from farandole.launch.output import PrefixedLines, Sink, Target, Tee, time_of_day
from farandole.launch.plan import ElasticOptions, Plan
from farandole.launch.slots import rank_numbers
from farandole.rendezvous import interfaces
from farandole.rendezvous.elastic.policy import Limits
from farandole.rendezvous.secret import Secret
from farandole.spark import session
from farandole.spark.elastic import Executors, SlotKeeper
from farandole.spark.registry import TaskRegistry
from farandole.spark.task import PYTHON, TaskSettings
from farandole.spark.task_messages import TaskReady

REACH_SECONDS = 30.0  # a task must reach this process within this time


class _Stream:
    """A text or binary stream of the caller."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: bytes) -> int:
        raw = isinstance(self._stream, io.RawIOBase | io.BufferedIOBase)
        self._stream.write(data if raw else data.decode(errors="replace"))
        return len(data)

    def flush(self) -> None:
        if hasattr(self._stream, "flush"):
            self._stream.flush()


class Slots:
    """The tasks of a job and their registry: the common part of fixed and elastic jobs on Spark."""

    def __init__(
        self,
        spark: Any,
        most: int,
        env: Mapping[str, str],
        executable: str | None,
        nics: tuple[str, ...],
        seconds: float,
    ) -> None:
        self.spark = spark
        self.secret = Secret.create()
        alone = session.is_local(spark) and not session.is_remote(spark)
        # Local mode uses only this machine, which may have no network.
        self.interfaces = nics or (() if not alone and interfaces.candidates() else ("lo",))
        self.registry = TaskRegistry(
            self.secret, [f"tcp:{one}" for one in interfaces.candidates(self.interfaces)], most
        )
        ignore = SETTINGS["spark_use_local_rank_gpu_index"]
        self._ignore_gpus = ignore.read(env) or Config.from_environment().spark_use_local_rank_gpu_index
        self._env = env
        self._seconds = seconds
        self.settings = TaskSettings(
            self.secret.key,
            self.registry.addresses,
            min(seconds, REACH_SECONDS),
            {SETTINGS["start_timeout"].variable: f"{max(1.0, seconds):g}", **env},
            executable,
        )

    def plan(self, tasks: Sequence[tuple[str, TaskReady]], extra: Sequence[Mapping[str, str]] = ()) -> Plan:
        """A job whose rank r uses the r-th of these slots; `names` are their executors."""
        first = tasks[0][1]
        code = ssh.start_code(package_place(), "farandole.launch.worker")
        threads = None if "OMP_NUM_THREADS" in self._env else max(1, first.cpus)
        return Plan(
            # The Python of each host, whose path its task knows: Spark unpacks archives at different paths.
            command=["/bin/sh", "-c", f'exec "${PYTHON}" "$@"', "farandole", "-c", code],
            numbers=rank_numbers([here.host for _, here in tasks]),
            hosts=[name for name, _ in tasks],
            environ={name: value for name, value in self._env.items() if name == "OMP_NUM_THREADS"},
            directory="",  # the directory of Spark's worker
            connector=self.registry,
            start_timeout=self._seconds,
            interfaces=self.interfaces,
            threads=threads,
            calls=True,
            extra=extra,
            secret=self.secret,
        )

    def gpus_of(self, name: str) -> dict[str, str]:
        """The same for the ranks of one executor."""
        return self.visible(
            list(dict.fromkeys(gpu for here in self.registry.slots().get(name, ()) for gpu in here.gpus))
        )

    def visible(self, gpus: Sequence[str]) -> dict[str, str]:
        """The variables with which ranks see only these GPUs."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus and not self._ignore_gpus else {}


class SparkExecutor(executor.Executor):
    """Workers in the slots of a Spark application: `start()`, then any number of `run`, `submit` and so on, then
    `shutdown()`, which gives the slots back.

    `num_workers`: None: the value of spark.default.parallelism. `env`: more variables for the workers, in addition to
    those of Spark's Python workers. `stdout` and `stderr`: streams for the workers' output; None: this process's.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        start_timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        stdout: Any = None,
        stderr: Any = None,
        verbose: int = 1,
        nics: Any = None,
        prefix_output_with_timestamp: bool = False,
        executable: str | None = None,
    ) -> None:
        setting = SETTINGS["spark_start_timeout"]
        setting.check(start_timeout, "start_timeout")
        tested.warn_about_newer(["pyspark"])
        self._spark = session.active()
        super().__init__(session.default_parallelism(self._spark) if num_workers is None else num_workers)
        usual = Config.from_environment().spark_start_timeout
        self._seconds = float(usual if start_timeout is None else start_timeout)
        self._env = {str(name): str(value) for name, value in (env or {}).items()}
        self._streams = (stdout, stderr)
        self._level = verbose
        self._nics = tuple(nics.split(",")) if isinstance(nics, str) else tuple(nics or ())
        self._stamped = prefix_output_with_timestamp
        self._executable = executable
        self._slots: Slots | None = None
        self._holding: session.SlotJob | SlotKeeper | None = None

    def start(self) -> SparkExecutor:
        """Waits for the slots and starts the workers. A second call does nothing."""
        if self._job is None:
            try:
                self._task()
                super().start()
            except BaseException:
                self.shutdown()
                raise
        return self

    def shutdown(self) -> None:
        """Ends the workers and releases their slots. A second call does nothing."""
        super().shutdown()
        slots, self._slots = self._slots, None
        holding, self._holding = self._holding, None
        held = slots.registry.count() if slots is not None else 0
        if isinstance(holding, SlotKeeper):
            holding.stop()
        if slots is not None:
            slots.registry.close()
        if holding is not None:
            holding.close(held)

    def _open(self, most: int) -> Slots:
        self._slots = Slots(self._spark, most, self._env, self._executable, self._nics, self._seconds)
        return self._slots

    def _task(self) -> None:
        """The order of ranks: host by host, and on a host by executor and GPU."""
        count = self.num_workers
        began = time.monotonic()
        session.check_fixed(self._spark)
        session.check_slots(self._spark, count, self._seconds)
        slots = self._open(count)
        holding = self._holding = session.SlotJob(self._spark, count, slots.settings, barrier=True)
        if not slots.registry.await_slots(count, began + self._seconds, holding.why):
            raise TimeoutError(
                f"{slots.registry.count()} of {count} Spark tasks have started within {self._seconds:g} s "
                "(start_timeout): are all slots of Spark busy, or are there too few?"
            )
        tasks = [(name, here) for name, found in slots.registry.slots().items() for here in found]
        order = {host: at for at, host in enumerate(dict.fromkeys(here.host for _, here in tasks))}
        tasks.sort(key=lambda task: (order[task[1].host], task[0], [_number(gpu) for gpu in task[1].gpus]))
        gpus: dict[str, list[str]] = {}
        for _, here in tasks:
            gpus.setdefault(here.host, []).extend(gpu for gpu in here.gpus if gpu not in gpus.get(here.host, []))
        # Each rank sees the GPUs of all ranks on its host, so that scripts choose one by local_rank().
        self._plan = slots.plan(tasks, [slots.visible(gpus[here.host]) for _, here in tasks])

    def run_elastic(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        limits: Limits,
    ) -> list[Any]:
        """Like `run`, once, in an elastic job whose ranks follow Spark's executors. It needs no `start()`."""
        spark = self._spark
        if session.is_local(spark):
            session.check_slots(spark, limits.np, self._seconds)
        most = limits.max_np or max(limits.np, session.slots(spark) or 0)
        deadline = time.monotonic() + self._seconds
        slots = self._open(most)
        try:
            keeper = self._holding = SlotKeeper(spark, most, slots.settings)
            if not slots.registry.await_slots(limits.np, deadline, keeper.why):
                last = f"; the last one said: {keeper.last}" if keeper.last else ""
                raise TimeoutError(
                    f"{slots.registry.count()} of {limits.np} Spark tasks have started within {self._seconds:g} s "
                    f"(start_timeout){last}"
                )
            tasks = [(name, here) for name, found in slots.registry.slots().items() for here in found]
            self._plan = dataclasses.replace(slots.plan(tasks), of_host=slots.gpus_of)
            say = (lambda line: None) if self._level < 1 else self._say
            return self._run_elastic(fn, args, kwargs, ElasticOptions(limits, Executors(slots.registry)), say)
        finally:
            self.shutdown()

    def _say(self, line: str) -> None:
        stream = _Stream(self._streams[1]) if self._streams[1] is not None else executor._Screen("stderr")
        stream.write(f"farandole: {line}\n".encode())
        stream.flush()

    def _sink(self) -> Sink:
        numbered = [
            executor._Screen(name) if one is None else _Stream(one)
            for one, name in zip(self._streams, ("stdout", "stderr"), strict=True)
        ]
        targets: list[Target] = list(numbered)
        clock: Callable[[], str] = time_of_day if self._stamped else lambda: ""
        return Tee(self._tails, PrefixedLines(self.num_workers, targets, clock=clock))


def _number(gpu: str) -> int:
    return int(gpu) if gpu.isdigit() else 0
