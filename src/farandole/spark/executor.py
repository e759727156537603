# `SparkExecutor`: workers that stay, in the slots of a Spark application. The protocol is that of launch/executor.py.
# Touches Spark through session.py, the tasks through muster.py; the job itself is launch/'s.
"""A Spark job holds the slots; the launcher's agents, which its tasks start, run the ranks."""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farandole import tested
from farandole.config import SETTINGS, Config
from farandole.elastic.policy import Limits
from farandole.launch import executor, ssh
from farandole.launch.elastic import Terms
from farandole.launch.job import Plan
from farandole.launch.line import package_place
from farandole.launch.output import Marked, Sink, Target, Tee, time_of_day
from farandole.launch.slots import places
from farandole.rendezvous import interfaces
from farandole.rendezvous.secret import Secret
from farandole.spark import session
from farandole.spark.elastic import Executors, Keeper
from farandole.spark.muster import Muster
from farandole.spark.task import PYTHON, Summons
from farandole.spark.words import Here

REACH_SECONDS = 30.0  # for a task to reach this process


class _Stream:
    """A stream that somebody gave us, of text or of bytes."""

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
    """The tasks of a job and where they report: what a fixed and an elastic job on Spark have in common."""

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
        # In local mode no other machine has a part in it, and there may be no network at all.
        self.interfaces = nics or (() if not alone and interfaces.candidates() else ("lo",))
        self.muster = Muster(self.secret, [f"tcp:{one}" for one in interfaces.candidates(self.interfaces)], most)
        ignore = SETTINGS["spark_use_local_rank_gpu_index"]
        self._ignore_gpus = ignore.read(env) or Config.from_environment().spark_use_local_rank_gpu_index
        self._env = env
        self._seconds = seconds
        self.summons = Summons(
            self.secret.key,
            self.muster.addresses,
            min(seconds, REACH_SECONDS),
            {SETTINGS["start_timeout"].variable: f"{max(1.0, seconds):g}", **env},
            executable,
        )

    def plan(self, seats: Sequence[tuple[str, Here]], extra: Sequence[Mapping[str, str]] = ()) -> Plan:
        """A job whose rank r sits in the r-th of these slots, which are those of `names`, executors."""
        first = seats[0][1]
        code = ssh.start_code(package_place(), "farandole.launch.worker")
        threads = None if "OMP_NUM_THREADS" in self._env else max(1, first.cpus)
        return Plan(
            # Each host's own Python, which its task knows: archives are unpacked in another place everywhere.
            command=["/bin/sh", "-c", f'exec "${PYTHON}" "$@"', "farandole", "-c", code],
            places=places([here.host for _, here in seats]),
            hosts=[name for name, _ in seats],
            environ={name: value for name, value in self._env.items() if name == "OMP_NUM_THREADS"},
            directory="",  # where Spark's worker is
            way=self.muster,
            start_timeout=self._seconds,
            interfaces=self.interfaces,
            threads=threads,
            calls=True,
            extra=extra,
            secret=self.secret,
        )

    def gpus_of(self, name: str) -> dict[str, str]:
        """The same for those of one executor."""
        return self.visible(list(dict.fromkeys(gpu for here in self.muster.slots().get(name, ()) for gpu in here.gpus)))

    def visible(self, gpus: Sequence[str]) -> dict[str, str]:
        """What makes these GPUs the ones that ranks see."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus and not self._ignore_gpus else {}


class SparkExecutor(executor.Executor):
    """Workers in the slots of a Spark application: `start()`, then any number of `run`, `submit` and so on, then
    `shutdown()`, which gives the slots back.

    `num_workers`: None: as many as spark.default.parallelism says. `env`: variables for the workers, beside those of
    Spark's own Python workers. `stdout` and `stderr`: streams for what workers print; None: those of this process.
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
        tested.tell(["pyspark"])
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
        self._holding: session.Holding | Keeper | None = None

    def start(self) -> SparkExecutor:
        """Waits for the slots and starts the workers; a second call does nothing."""
        if self._job is None:
            try:
                self._seat()
                super().start()
            except BaseException:
                self.shutdown()
                raise
        return self

    def shutdown(self) -> None:
        """Ends the workers and gives their slots back. Calling it again does nothing."""
        super().shutdown()
        slots, self._slots = self._slots, None
        holding, self._holding = self._holding, None
        held = slots.muster.count() if slots is not None else 0
        if isinstance(holding, Keeper):
            holding.stop()
        if slots is not None:
            slots.muster.close()
        if holding is not None:
            holding.close(held)

    def _open(self, most: int) -> Slots:
        self._slots = Slots(self._spark, most, self._env, self._executable, self._nics, self._seconds)
        return self._slots

    def _seat(self) -> None:
        """The ranks' places: those of one host one after the other, on a host by executor and GPU."""
        count = self.num_workers
        began = time.monotonic()
        session.check_fixed(self._spark)
        session.check_slots(self._spark, count, self._seconds)
        slots = self._open(count)
        holding = self._holding = session.Holding(self._spark, count, slots.summons, barrier=True)
        if not slots.muster.await_slots(count, began + self._seconds, holding.why):
            raise TimeoutError(
                f"{slots.muster.count()} of {count} Spark tasks have started within {self._seconds:g} s "
                "(start_timeout): are all slots of Spark busy, or are there too few?"
            )
        seats = [(name, here) for name, found in slots.muster.slots().items() for here in found]
        order = {host: at for at, host in enumerate(dict.fromkeys(here.host for _, here in seats))}
        seats.sort(key=lambda seat: (order[seat[1].host], seat[0], [_number(gpu) for gpu in seat[1].gpus]))
        gpus: dict[str, list[str]] = {}
        for _, here in seats:
            gpus.setdefault(here.host, []).extend(gpu for gpu in here.gpus if gpu not in gpus.get(here.host, []))
        # Each sees the GPUs of all ranks on its host, so that local_rank() chooses among them.
        self._plan = slots.plan(seats, [slots.visible(gpus[here.host]) for _, here in seats])

    def run_elastic(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        limits: Limits,
    ) -> list[Any]:
        """As `run`, once, in ranks that come and go with Spark's executors; nothing has to be started before."""
        spark = self._spark
        if session.is_local(spark):
            session.check_slots(spark, limits.np, self._seconds)
        most = limits.max_np or max(limits.np, session.slots(spark) or 0)
        deadline = time.monotonic() + self._seconds
        slots = self._open(most)
        try:
            keeper = self._holding = Keeper(spark, most, slots.summons)
            if not slots.muster.await_slots(limits.np, deadline, keeper.why):
                last = f"; the last one said: {keeper.last}" if keeper.last else ""
                raise TimeoutError(
                    f"{slots.muster.count()} of {limits.np} Spark tasks have started within {self._seconds:g} s "
                    f"(start_timeout){last}"
                )
            seats = [(name, here) for name, found in slots.muster.slots().items() for here in found]
            self._plan = dataclasses.replace(slots.plan(seats), of_host=slots.gpus_of)
            say = (lambda line: None) if self._level < 1 else self._say
            return self._run_elastic(fn, args, kwargs, Terms(limits, Executors(slots.muster)), say)
        finally:
            self.shutdown()

    def _say(self, line: str) -> None:
        stream = _Stream(self._streams[1]) if self._streams[1] is not None else executor._Screen("stderr")
        stream.write(f"farandole: {line}\n".encode())
        stream.flush()

    def _sink(self) -> Sink:
        given = [
            executor._Screen(name) if one is None else _Stream(one)
            for one, name in zip(self._streams, ("stdout", "stderr"), strict=True)
        ]
        targets: list[Target] = list(given)
        clock: Callable[[], str] = time_of_day if self._stamped else lambda: ""
        return Tee(self._tails, Marked(self.num_workers, targets, clock=clock))


def _number(gpu: str) -> int:
    return int(gpu) if gpu.isdigit() else 0
