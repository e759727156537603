# The search: which values to measure next, and which to keep. The same scores always lead to the same answer.
# Pure. Touches NumPy and base.config.
"""`Search` proposes values, takes their scores, and keeps the defaults unless others are clearly faster."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...base.config import Config, KiB, MiB

PAIRS = 5  # in the last comparison, each of the defaults and the best candidate
MIN_GAIN = 1.02  # the median of the others must be this many times the median of the defaults
XI = 0.01  # the improvement over the best so far that is worth a measurement
WIDTH = 0.4  # within this part of a setting's range, values have similar scores
MANY_HOSTS = 32  # above this, `auto` may choose the ring, whose bits depend on the bucket


@dataclass(frozen=True)
class Values:
    """One value for each setting that is tuned, in the order of the core."""

    fusion_threshold: int
    flush_us: int
    spin_us: int
    chunk_bytes: int
    streams: int

    @classmethod
    def of(cls, config: Config) -> Values:
        """The values of the settings."""
        return cls(
            config.fusion_threshold, config.flush_us, config.spin_us, config.chunk_bytes // 64 * 64, config.tcp_streams
        )

    def numbers(self) -> list[int]:
        """The values as the core takes them."""
        return list(asdict(self).values())


OTHERS: dict[str, tuple[int, ...]] = {
    "fusion_threshold": (2 * MiB, 8 * MiB, 16 * MiB, 32 * MiB, 64 * MiB, 128 * MiB),
    "flush_us": (1_000, 5_000, 20_000),
    "spin_us": (50, 1_000, 10_000),
    "chunk_bytes": (64 * KiB, 256 * KiB, 1 * MiB, 4 * MiB),
}
ALSO_SET = {"cycle_time": "flush_us", "tcp_streams": "streams"}  # settings with the same meaning


def choices(config: Config, hosts: int, user_set: Sequence[str] = ()) -> dict[str, tuple[int, ...]]:
    """The values to try for each setting, in rising order. Settings in `user_set` keep the user's value."""
    current = Values.of(config)
    fixed = {ALSO_SET.get(name, name) for name in user_set}
    if config.allreduce_algorithm == "ring" or (config.allreduce_algorithm == "auto" and hosts > MANY_HOSTS):
        fixed.add("fusion_threshold")
    if hosts == 1:
        fixed |= {"chunk_bytes", "streams"}
    others = {**OTHERS, "streams": tuple(range(1, current.streams + 1))}
    tuned = {name: value for name, value in asdict(current).items() if name not in fixed}
    found = {name: tuple(sorted({*others[name], value})) for name, value in tuned.items()}
    return {name: values for name, values in found.items() if len(values) > 1}


class Search:
    """next() returns the values to measure, or None at the end; add_score() takes their score. Larger is better."""

    def __init__(
        self,
        default: Values,
        choices: Mapping[str, Sequence[int]],
        *,
        warmup: int = 3,
        samples: int = 20,
        noise: float = 0.8,
        pairs: int = PAIRS,
    ) -> None:
        self.default = default
        self.best = default  # valid at any time: the defaults, until others were faster
        self.score = 0.0  # of the best
        self.over = False
        self.measured: list[tuple[Values, float]] = []  # in order, without the warm-up
        self._noise = noise
        self._space = Space(default, choices)
        self._plan = self._steps(warmup, samples, pairs)
        self._candidate: Values | None = None
        self._last_score = 0.0
        self._advance()

    def next(self) -> Values | None:
        return self._candidate

    def add_score(self, score: float) -> None:
        """Adds the score of the values that next() has returned."""
        if self._candidate is None:
            raise ValueError("the search is over")
        self._last_score = score if math.isfinite(score) else 0.0
        self._advance()

    def _advance(self) -> None:
        self._candidate = next(self._plan, None)
        self.over = self._candidate is None

    def _steps(self, warmup: int, samples: int, pairs: int) -> Iterator[Values]:
        if len(self._space.all) < 2 or samples < 2:
            return
        for _ in range(warmup):
            yield self.default
        scores: dict[Values, float] = {}
        for candidate in itertools.islice(self._candidates(scores), samples):
            yield candidate
            scores[candidate] = self._record(candidate)
        self.score = scores[self.default]
        fastest = max(scores, key=lambda values: scores[values])  # the first one if several are equal
        if fastest == self.default:
            return
        # Both run in turn, so that noise affects both; this rejects values that were fast only by chance.
        repeats: dict[Values, list[float]] = {self.default: [], fastest: []}
        for _ in range(pairs):
            for candidate, measurements in repeats.items():
                yield candidate
                measurements.append(self._record(candidate))
        default_scores, best_scores = repeats[self.default], repeats[fastest]
        self.score = statistics.median(default_scores) if default_scores else self.score
        if wins(best_scores, default_scores):
            self.best, self.score = fastest, statistics.median(best_scores)

    def _record(self, candidate: Values) -> float:
        self.measured.append((candidate, self._last_score))
        return self._last_score

    def _candidates(self, scores: dict[Values, float]) -> Iterator[Values]:
        seeds = self._space.seeds()
        yield from seeds
        while len(scores) < len(self._space.all):
            yield self._space.most_promising(scores, self._noise)


def wins(candidate: Sequence[float], default: Sequence[float]) -> bool:
    """Whether the scores of `candidate` are clearly better: in the median, and in all pairs or all but one."""
    if not default:
        return False
    better = sum(one > other for one, other in zip(candidate, default, strict=True))
    gained = statistics.median(candidate) >= MIN_GAIN * statistics.median(default) > 0
    return better >= max(1, len(default) - 1) and gained


class Space:
    """All combinations of the choices, as points between 0 and 1."""

    def __init__(self, default: Values, choices: Mapping[str, Sequence[int]]) -> None:
        self.default = default
        self.choices = dict(choices)
        names = list(choices)
        self.all = [
            replace(default, **dict(zip(names, each, strict=True))) for each in itertools.product(*choices.values())
        ]
        steps = [np.linspace(0.0, 1.0, len(values)) for values in choices.values()]
        self._points = np.array(list(itertools.product(*steps)), dtype=np.float64).reshape(len(self.all), len(names))
        self._index = {values: index for index, values in enumerate(self.all)}

    def seeds(self) -> list[Values]:
        """The defaults, and for each setting the defaults with its smallest and with its largest value."""
        found = [self.default]
        for name, values in self.choices.items():
            found += [replace(self.default, **{name: value}) for value in (values[0], values[-1])]
        return list(dict.fromkeys(found))

    def most_promising(self, scores: Mapping[Values, float], noise: float) -> Values:
        """The point without a score that has the largest expected improvement; the first one if several are equal."""
        known = [self._index[values] for values in scores]
        measurements = np.array(list(scores.values()))
        spread = float(measurements.std()) or 1.0
        heights = (measurements - measurements.mean()) / spread
        # A Gaussian process over the points: near points have similar scores; `noise` is the uncertainty of one score.
        inverse = np.linalg.inv(self._near(known, known) + (noise + 1e-6) * np.eye(len(known)))
        near = self._near(range(len(self.all)), known)
        expected = near @ inverse @ heights
        deviation = np.sqrt(np.maximum(1.0 - np.einsum("ij,jk,ik->i", near, inverse, near), 1e-12))
        gain = expected - heights.max() - XI
        ratio = gain / deviation
        below = np.array([0.5 * (1.0 + math.erf(each / math.sqrt(2.0))) for each in ratio])
        improvement = gain * below + deviation * np.exp(-0.5 * ratio**2) / math.sqrt(2.0 * math.pi)
        improvement[known] = -np.inf
        return self.all[int(np.argmax(improvement))]

    def _near(self, some: Sequence[int], others: Sequence[int]) -> NDArray[np.float64]:
        apart = self._points[list(some)][:, None, :] - self._points[list(others)][None, :, :]
        near: NDArray[np.float64] = np.exp(-0.5 * (apart**2).sum(axis=2) / WIDTH**2)
        return near
