# Tuning at init: a short measurement, once for each number and kind of hosts; later jobs read its result.
# Touches config, engine, cache, search, switch, version.
"""`tune` is called by all ranks. Rank 0 decides what to measure and what to keep."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...base.config import Config
from ...base.version import package_version
from ...engine.interface import Array, Engine, Kind, Request
from . import cache
from .search import Search, Values
from .switch import switch

MAX_S = 0.8  # seconds, for all measurements together
STEP_S = 0.004  # seconds; the measurement makes its steps small enough to stay below
STEPS = 4  # of one sample
SETTLE_STEPS = 3
SAMPLES, PAIRS = 14, 5
KIB = (*[64] * 16, *[1024] * 4, 4096)  # the tensors of a step, as in a small network
MOST_HALVINGS = 8
NAME = "farandole.tuning"

_log = logging.getLogger("farandole")


def shape_of(config: Config, hosts: Sequence[int], choices: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The key of a stored result: library, number of ranks, their distribution over hosts, and the kind of host."""
    return {
        "version": package_version(),
        "ranks": sorted(Counter(hosts).values()),
        "machine": platform.machine(),
        "processor": _processor(),
        "algorithm": config.allreduce_algorithm,
        "slots": [config.slot_bytes, config.slots],
        "choices": {name: list(values) for name, values in choices.items()},
    }


def _processor() -> str:
    """The processor's model, if the kernel has it, and the number of processors."""
    lines: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                lines.setdefault(name.strip(), value.strip())
                if not line.strip():
                    break
    except OSError:
        pass
    model = lines.get("model name") or " ".join(lines.get(key, "") for key in ("CPU implementer", "CPU part"))
    return f"{model} x {os.cpu_count()}"


def tune(
    engine: Engine, config: Config, hosts: Sequence[int], choices: Mapping[str, Sequence[int]], directory: str
) -> None:
    """Applies the stored values for such jobs; if there are none, it measures and stores them."""
    if engine.rank != 0:
        _follow(engine)
        return
    now = Values(*engine.tuning())
    shape = shape_of(config, hosts, choices)
    best = cache.load(directory, shape)
    if best is None:
        best = _Measurement(engine, now, choices).run()
        cache.store(directory, shape, best)
    else:
        if best != now:
            switch(engine, best, False)
        _order(engine, 0, 0)
    _log.info("tuning: the job begins with %s", "the settings' values" if best == now else best)


def _order(engine: Engine, steps: int, halvings: int) -> tuple[int, int]:
    """Rank 0 sends the others the number of steps to run and their size; 0: the measurement has ended."""
    told = np.array([steps, halvings], dtype=np.int64)
    engine.run(Request(Kind.BROADCAST, NAME, told, told, peer=0))
    return int(told[0]), int(told[1])


def _follow(engine: Engine) -> None:
    tensors: dict[int, list[Array]] = {}
    while True:
        steps, halvings = _order(engine, 0, 0)
        if steps == 0:
            return
        _steps(engine, tensors, steps, halvings)


def _steps(engine: Engine, tensors: dict[int, list[Array]], steps: int, halvings: int) -> None:
    step = tensors.setdefault(halvings, [np.zeros((kib << 8) >> halvings, dtype=np.float32) for kib in KIB])
    requests = [Request(Kind.ALLREDUCE, f"{NAME}.{place}", each, each) for place, each in enumerate(step)]
    for _ in range(steps):
        for handle in engine.submit(requests):
            engine.wait(handle)


class _Measurement:
    def __init__(self, engine: Engine, now: Values, choices: Mapping[str, Sequence[int]]) -> None:
        self._engine = engine
        self._search = Search(now, choices, warmup=1, samples=SAMPLES, pairs=PAIRS)
        self._tensors: dict[int, list[Array]] = {}
        self._halvings = 0

    def run(self) -> Values:
        deadline = time.monotonic() + MAX_S
        search = self._search
        self._halvings = MOST_HALVINGS
        while self._halvings > 0 and self._timed(1) < STEP_S / 2 and time.monotonic() < deadline:
            self._halvings -= 1
        while (candidate := search.next()) is not None and time.monotonic() < deadline:
            switch(self._engine, candidate, False)
            self._timed(SETTLE_STEPS)
            search.tell(1.0 / self._timed(STEPS))
        switch(self._engine, search.best, False)  # a search that ran out of time keeps the defaults
        _order(self._engine, 0, 0)
        return search.best

    def _timed(self, steps: int) -> float:
        _order(self._engine, steps, self._halvings)
        begin = time.perf_counter()
        _steps(self._engine, self._tensors, steps, self._halvings)
        return max(time.perf_counter() - begin, 1e-9)
