# Tuning at init: a short measurement, once for each number and kind of hosts; later jobs read its result.
# Touches base, engine.interface, and the other files of tuning.
"""All ranks call `tune`. Rank 0 decides what to measure and what to keep."""

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
STEPS = 4  # in one sample
SETTLE_STEPS = 3  # not measured, after each change of values
SAMPLES, PAIRS = 14, 5  # limits of the search: measurements of candidates, and pairs that confirm the best one
TENSOR_KIB = (*[64] * 16, *[1024] * 4, 4096)  # the tensors of a step, as in a small network
MAX_HALVINGS = 8  # of each tensor, to make a step shorter
PREFIX = "farandole.tuning"

_log = logging.getLogger("farandole")


def cache_key_of(config: Config, hosts: Sequence[int], choices: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """What a stored result is for: library version, ranks on each host, kind of host, and settings."""
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
    """Applies the values that are stored for jobs of this kind; if there are none, measures and stores them."""
    if engine.rank != 0:
        _run_what_rank_0_asks(engine)
        return
    current = Values(*engine.tuning())
    key = cache_key_of(config, hosts, choices)
    best = cache.load(directory, key)
    if best is None:
        best = _Measurement(engine, current, choices).run()
        cache.store(directory, key, best)
    else:
        if best != current:
            switch(engine, best, measuring=False)
        _broadcast_steps(engine, 0, 0)
    _log.info("tuning: the job begins with %s", "the settings' values" if best == current else best)


def _broadcast_steps(engine: Engine, steps: int, halvings: int) -> tuple[int, int]:
    """Broadcasts rank 0's arguments: the steps to run, and how often to halve their tensors. 0 steps: the end."""
    numbers = np.array([steps, halvings], dtype=np.int64)
    engine.run(Request(Kind.BROADCAST, PREFIX, numbers, numbers, peer=0))
    return int(numbers[0]), int(numbers[1])


def _run_what_rank_0_asks(engine: Engine) -> None:
    tensors: dict[int, list[Array]] = {}
    while True:
        steps, halvings = _broadcast_steps(engine, 0, 0)
        if steps == 0:
            return
        _run_steps(engine, tensors, steps, halvings)


def _run_steps(engine: Engine, tensors: dict[int, list[Array]], steps: int, halvings: int) -> None:
    # A KiB has 1 << 8 elements.
    step = tensors.setdefault(halvings, [np.zeros((kib << 8) >> halvings, dtype=np.float32) for kib in TENSOR_KIB])
    requests = [Request(Kind.ALLREDUCE, f"{PREFIX}.{number}", each, each) for number, each in enumerate(step)]
    for _ in range(steps):
        for handle in engine.submit(requests):
            engine.wait(handle)


class _Measurement:
    def __init__(self, engine: Engine, current: Values, choices: Mapping[str, Sequence[int]]) -> None:
        self._engine = engine
        self._search = Search(current, choices, warmup=1, samples=SAMPLES, pairs=PAIRS)
        self._tensors: dict[int, list[Array]] = {}
        self._halvings = 0

    def run(self) -> Values:
        deadline = time.monotonic() + MAX_S
        search = self._search
        self._halvings = MAX_HALVINGS
        while self._halvings > 0 and self._seconds_for(1) < STEP_S / 2 and time.monotonic() < deadline:
            self._halvings -= 1
        while (candidate := search.next()) is not None and time.monotonic() < deadline:
            switch(self._engine, candidate, measuring=False)
            self._seconds_for(SETTLE_STEPS)
            search.add_score(1.0 / self._seconds_for(STEPS))
        # If time runs out, the best values so far stay; at first these are the settings' values.
        switch(self._engine, search.best, measuring=False)
        _broadcast_steps(self._engine, 0, 0)
        return search.best

    def _seconds_for(self, steps: int) -> float:
        _broadcast_steps(self._engine, steps, self._halvings)
        begin = time.perf_counter()
        _run_steps(self._engine, self._tensors, steps, self._halvings)
        return max(time.perf_counter() - begin, 1e-9)
