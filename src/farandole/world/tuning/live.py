# Tuning while a job trains: a thread of rank 0 switches values, measures the speed, and keeps the best.
# Touches the rooms base and engine; the files search and switch. Writes the log file that users ask for.
"""`Tuner` runs on rank 0 during the training; the other ranks need nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...base.config import Config
from ...base.errors import HorovodInternalError, Mismatch
from ...engine.interface import Engine
from .search import Search, Values
from .switch import Stopped, switch

SETTLE_STEPS = 3  # after a switch, because the engine must make its plan again
MIN_S, MAX_S = 0.002, 0.25  # seconds between two measurements
# The first columns are those of Horovod, with the same meaning.
COLUMNS = (
    "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,"
    "tensor_fusion_threshold,score,chunk_bytes,tcp_streams,spin_us"
)

_log = logging.getLogger("farandole")


class Progress(NamedTuple):
    """The progress of the job since the last switch."""

    steps: int
    nanoseconds: int  # when the last step ended
    bytes: int  # reduced by then

    @classmethod
    def read(cls, engine: Engine) -> Progress:
        """Reads until two reads are equal, because the engine writes the three counters one after the other."""
        last: Progress | None = None
        while True:
            now = cls(*(engine.counter(name) for name in ("steps", "step_ns", "step_bytes")))
            if now == last:
                return now
            last = now


class Log:
    """The CSV file of the samples; its last row is the choice."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._descriptor: int | None = None
        if config.autotune_log is not None:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                self._descriptor = os.open(config.autotune_log, flags, 0o644)
            except OSError as error:
                raise ValueError(
                    f"autotune_log={config.autotune_log!r} (HOROVOD_AUTOTUNE_LOG, --autotune-log-file) cannot be "
                    f"written: {error.strerror}; expected a path in a directory that exists"
                ) from None
        self._line(COLUMNS)

    def row(self, values: Values, score: float) -> None:
        """Adds one sample, or the choice; the score is in bytes per microsecond, as in Horovod."""
        config = self._config
        switches = (
            config.hierarchical_allreduce,
            config.hierarchical_allgather,
            config.torus_allreduce,
            config.cache_capacity > 0,
        )
        first = ",".join(str(int(switch)) for switch in switches)
        last = f"{values.chunk_bytes},{values.streams},{values.spin_us}"
        self._line(f"{first},{values.flush_us / 1000:g},{values.fusion_threshold},{score:.6g},{last}")

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _line(self, text: str) -> None:
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, text.encode() + b"\n")
        except OSError as error:
            _log.warning("the autotune log %s ends here: %s", self._config.autotune_log, error.strerror)
            self.close()


class Tuner:
    """Starts to tune when it is made, until it has found the best values or is stopped. Only on rank 0."""

    def __init__(self, engine: Engine, config: Config, choices: Mapping[str, Sequence[int]]) -> None:
        self.search = Search(
            Values(*engine.tuning()),  # kept unless others are clearly faster
            choices,
            warmup=config.autotune_warmup_samples,
            samples=config.autotune_bayes_opt_max_samples,
            noise=config.autotune_gaussian_process_noise,
        )
        self._engine = engine
        self._steps = max(1, config.autotune_steps_per_sample)
        self._log = Log(config)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="farandole-autotune", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the search. A second call does nothing."""
        if not self._thread.is_alive():  # in a forked child too, where the event may stay locked
            return
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        search = self.search
        try:
            logged = 0
            while (candidate := search.next()) is not None:
                self._switch(candidate, measuring=True)
                search.add_score(self._sample())
                for values, score in search.measured[logged:]:
                    self._log.row(values, score)
                logged = len(search.measured)
            self._switch(search.best, measuring=False)
            kept = "the values it had" if search.best == search.default else str(search.best)
            _log.info("autotune: the job keeps %s", kept)
        except (Stopped, HorovodInternalError):
            pass  # the operations of the training report failures of the job
        except Exception:
            _log.exception("autotune has failed; the job goes on with the values it had before")
            with contextlib.suppress(Exception):
                switch(self._engine, search.best, measuring=False)
        finally:
            self._log.row(search.best, search.score)
            self._log.close()

    def _switch(self, values: Values, measuring: bool) -> None:
        while True:
            if self._stopped.is_set():
                raise Stopped
            try:
                return switch(self._engine, values, measuring, self._stopped.is_set)
            except Mismatch:  # this rank has joined: its training begins again, or ends
                self._stopped.wait(MAX_S)

    def _sample(self) -> float:
        """The pace of the next steps, in bytes per microsecond."""
        begin = self._pace_at(SETTLE_STEPS)
        end = self._pace_at(begin.steps + self._steps)
        return (end.bytes - begin.bytes) / max(1, end.nanoseconds - begin.nanoseconds) * 1000.0

    def _pace_at(self, steps: int) -> Progress:
        pause = MIN_S
        while (pace := Progress.read(self._engine)).steps < steps:
            if self._stopped.wait(pause):
                raise Stopped
            pause = min(2 * pause, MAX_S)
        return pace
