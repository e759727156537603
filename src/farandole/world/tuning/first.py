# Tuning at init: a short measurement, once per host shape; later jobs of that shape read what it found.
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

MAX_S = 0.8  # of all measurements together
STEP_S = 0.004  # a step of the measurement is made small enough to take no longer
STEPS = 4  # of one sample
SETTLE_STEPS = 3
SAMPLES, PAIRS = 14, 5
KIB = (*[64] * 16, *[1024] * 4, 4096)  # the tensors of a step: as a small network has them
MOST_HALVINGS = 8
NAME = "farandole.tuning"

_log = logging.getLogger("farandole")


def shape_of(config: Config, hosts: Sequence[int], choices: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """What a result holds for: the same library on as many ranks, spread alike over hosts of this kind."""
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
    """The model's name, where the kernel tells; with the number of processors."""
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
    """The job works with the best values that are known, or are found now, from here on."""
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
    """Rank 0 tells the others how many steps to run, and how small; 0 when the measurement is over."""
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
        switch(self._engine, search.best, False)  # a search that the clock has ended keeps the defaults
        _order(self._engine, 0, 0)
        return search.best

    def _timed(self, steps: int) -> float:
        _order(self._engine, steps, self._halvings)
        begin = time.perf_counter()
        _steps(self._engine, self._tensors, steps, self._halvings)
        return max(time.perf_counter() - begin, 1e-9)
