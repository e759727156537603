# The search for the fastest values, on simulated machines: deterministic, bounded, and never the worse for it.
# Touches only tuning.search.
"""Machines whose speed for each choice is known, with noise of every kind on top."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.base.config import Config, MiB
from farandole.world.tuning.search import MIN_GAIN, PAIRS, Search, Space, Values, choices, wins

DEFAULT = Values.of(Config())
CHOICES = choices(Config(), hosts=2)
Machine = Callable[[Values], float]


def found_on(machine: Machine, **more: object) -> Search:
    search = Search(DEFAULT, CHOICES, **more)  # type: ignore[arg-type]
    while (values := search.next()) is not None:
        search.add_score(machine(values))
    return search


def speed(values: Values, best: Values, gain: float) -> float:
    """1 for the defaults' distance from the best, more towards it."""
    space = Space(DEFAULT, CHOICES)
    places = {name: list(options) for name, options in space.choices.items()}

    def apart(one: Values) -> float:
        steps = [
            abs(options.index(getattr(one, name)) - options.index(getattr(best, name))) / (len(options) - 1)
            for name, options in places.items()
        ]
        return sum(steps) / len(steps)

    return 1.0 + gain * (apart(DEFAULT) - apart(values))


def test_what_is_tuned_depends_on_the_job() -> None:
    assert set(choices(Config(), 1)) == {"fusion_threshold", "flush_us", "spin_us"}
    assert set(choices(Config(), 2)) == {"fusion_threshold", "flush_us", "spin_us", "chunk_bytes", "streams"}
    assert "streams" not in choices(Config(tcp_streams=1), 2)
    # The ring adds in an order that depends on the bucket: fusion would change bits.
    assert "fusion_threshold" not in choices(Config(allreduce_algorithm="ring"), 2)
    assert "fusion_threshold" not in choices(Config(), 33)
    assert "fusion_threshold" in choices(Config(allreduce_algorithm="direct"), 33)
    pinned = choices(Config(), 2, ["fusion_threshold", "cycle_time", "tcp_streams"])
    assert set(pinned) == {"spin_us", "chunk_bytes"}
    assert 5 * MiB in choices(Config(fusion_threshold=5 * MiB), 1)["fusion_threshold"]


def test_the_contract_s_numbers_of_samples() -> None:
    asked = []

    def machine(values: Values) -> float:
        asked.append(values)
        return speed(values, best=replace(DEFAULT, spin_us=50), gain=1.0)

    found = found_on(machine, warmup=3, samples=20)
    assert asked[:4] == [DEFAULT] * 4  # three that do not count, and one that does
    assert len(found.measured) == len(asked) - 3 == 20 + 2 * PAIRS
    assert len(set(asked[3:23])) == 20  # nothing is explored twice
    assert found.over and found.next() is None
    with pytest.raises(ValueError, match="over"):
        found.add_score(1.0)


@pytest.mark.parametrize("samples", [0, 1])
def test_without_samples_the_defaults_are_kept(samples: int) -> None:
    search = Search(DEFAULT, CHOICES, samples=samples)
    assert search.over and search.best == DEFAULT


def test_tuning_ends_at_once_if_there_is_one_candidate() -> None:
    search = Search(DEFAULT, {})
    assert search.over and search.best == DEFAULT


@pytest.mark.parametrize("name", CHOICES)
def test_the_best_value_is_found_on_an_idle_machine(name: str) -> None:
    for value in CHOICES[name]:
        best = replace(DEFAULT, **{name: value})
        found = found_on(functools.partial(speed, best=best, gain=1.0), noise=0.1)
        assert getattr(found.best, name) == value
        assert speed(found.best, best, 1.0) >= 1.0


def test_equal_speeds_keep_the_defaults() -> None:
    assert found_on(lambda values: 1.0).best == DEFAULT
    assert found_on(lambda values: 0.0).best == DEFAULT
    assert found_on(lambda values: float("nan")).best == DEFAULT


def test_an_unclear_gain_is_not_used() -> None:
    """Whatever the search meets, in the end it is 1 % faster, which nobody can tell from noise."""
    assert found_on(lambda values: 1.0 if values == DEFAULT else 1.01).best == DEFAULT


def test_one_fast_sample_does_not_win() -> None:
    seen: dict[Values, int] = {}

    def machine(values: Values) -> float:
        seen[values] = seen.get(values, 0) + 1
        return 10.0 if values != DEFAULT and seen[values] == 1 else 1.0

    assert found_on(machine).best == DEFAULT


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    noise=st.sampled_from([0.0, 0.01, 0.05, 0.2, 0.5]),
    gain=st.sampled_from([-1.0, 0.0, 0.02, 0.3, 1.0]),
    drift=st.sampled_from([0.0, 0.01]),
    trust=st.sampled_from([0.0, 0.8, 1.0]),
)
def test_a_value_that_was_measured_slower_is_never_chosen(
    seed: int, noise: float, gain: float, drift: float, trust: float
) -> None:
    chance = random.Random(seed)
    best = chance.choice(Space(DEFAULT, CHOICES).all)
    scores: list[float] = []

    def machine(values: Values) -> float:
        weather = (1.0 + noise * abs(chance.gauss(0.0, 1.0))) * (1.0 + drift * len(scores))
        scores.append(max(0.1, speed(values, best, gain)) / weather)
        return scores[-1]

    found = found_on(machine, noise=trust)
    again = iter(scores)
    replay = found_on(lambda values: next(again), noise=trust)
    assert (replay.best, replay.measured) == (found.best, found.measured)  # the scores alone decide
    if found.best == DEFAULT:
        return
    duel = found.measured[-2 * PAIRS :]
    ours = [score for values, score in duel if values == DEFAULT]
    theirs = [score for values, score in duel if values == found.best]
    assert len(ours) == len(theirs) == PAIRS
    assert statistics.median(theirs) >= MIN_GAIN * statistics.median(ours)
    assert found.score == statistics.median(theirs)


def test_on_noisy_machines_without_a_gain_the_choice_costs_nothing_that_counts() -> None:
    """Half of all choices are slower than the defaults: they are hardly ever taken."""
    slower = 0
    for seed in range(50):
        chance = random.Random(seed)

        def machine(values: Values, chance: random.Random = chance) -> float:
            true = 1.0 if values.spin_us == DEFAULT.spin_us else 0.95
            return true * (1.0 + 0.05 * chance.gauss(0.0, 1.0))

        slower += found_on(machine).best.spin_us != DEFAULT.spin_us
    assert slower <= 1


def test_a_candidate_wins_only_if_it_is_clearly_faster() -> None:
    assert wins([1.1] * 5, [1.0] * 5)
    assert wins([1.1, 1.1, 1.1, 1.1, 0.1], [1.0] * 5)
    assert not wins([1.1, 1.1, 1.1, 0.1, 0.1], [1.0] * 5)
    assert not wins([1.01] * 5, [1.0] * 5)
    assert not wins([1.0] * 5, [0.0] * 5)
    assert not wins([], [])
