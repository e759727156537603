# Settings: each variable and alias is read, each bad value is refused with its name, each field is declared.
# Touches farandole.base.config, and what the launcher sets.
"""config.py."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import farandole.base.config as settings
from farandole.base.config import SETTINGS, Config, MiB
from farandole.base.setting import Setting
from farandole.launch.environment import of_rank
from farandole.launch.slots import RankNumbers


def test_the_defaults_are_a_world_of_one_with_the_contracts_numbers() -> None:
    config = Config.from_environment({})
    assert (config.rank, config.size, config.local_size, config.rendezvous) == (0, 1, 1, None)
    assert config.fusion_threshold == 128 * MiB
    assert (config.cycle_time, config.cache_capacity, config.start_timeout) == (1.0, 1024, 30.0)
    assert (config.stall_check_time_seconds, config.stall_shutdown_time_seconds) == (60.0, 0.0)
    assert (config.engine, config.flush_us) == ("native", 20_000)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=list(SETTINGS))
def test_every_variable_and_alias_sets_its_setting(setting: Setting) -> None:
    good = {"int": "1", "float": "7.5", "bool": "1", "str": "x"}[setting.base]
    if setting.minimum is not None and setting.minimum > 1:
        good = str(int(setting.minimum) + 1)
    if setting.maximum < 7.5:
        good = str(setting.maximum / 2)
    if setting.choices:
        good = setting.choices[-1]
    partners = {"rank": "FARANDOLE_SIZE", "local_rank": "FARANDOLE_LOCAL_SIZE", "cross_rank": "FARANDOLE_CROSS_SIZE"}
    for variable in (setting.variable, *setting.aliases):
        environ = {variable: good}
        if setting.name in partners:
            environ[partners[setting.name]] = "2"
        value = getattr(Config.from_environment(environ), setting.name)
        assert value == setting.parse(good, variable)
        assert str(value).lower() in (good, "true")


def test_every_setting_has_help_and_the_right_default_type() -> None:
    kinds = {"int": int, "float": float, "bool": bool, "str": str}
    for setting in SETTINGS.values():
        assert setting.help, setting.name
        assert setting.default is None or type(setting.default) is kinds[setting.base], setting.name


def test_no_variable_is_declared_twice() -> None:
    variables = [name for setting in SETTINGS.values() for name in (setting.variable, *setting.aliases)]
    assert len(variables) == len(set(variables))


def test_our_variable_wins_over_the_alias_and_empty_counts_as_unset() -> None:
    both = {"FARANDOLE_FUSION_THRESHOLD": "1", "HOROVOD_FUSION_THRESHOLD": "2"}
    assert Config.from_environment(both).fusion_threshold == 1
    assert Config.from_environment({**both, "FARANDOLE_FUSION_THRESHOLD": " "}).fusion_threshold == 2


BAD = [
    ({"FARANDOLE_FUSION_THRESHOLD": "many"}, "FARANDOLE_FUSION_THRESHOLD='many': expected a whole number of bytes"),
    ({"HOROVOD_FUSION_THRESHOLD": "-1"}, "HOROVOD_FUSION_THRESHOLD=-1: expected a whole number of bytes, at least 0"),
    ({"HOROVOD_CYCLE_TIME": "nan"}, "HOROVOD_CYCLE_TIME"),
    ({"FARANDOLE_START_TIMEOUT": "inf"}, "FARANDOLE_START_TIMEOUT"),
    ({"FARANDOLE_START_TIMEOUT": ""}, None),
    ({"HOROVOD_ELASTIC": "perhaps"}, "HOROVOD_ELASTIC='perhaps': expected 0 or 1"),
    ({"FARANDOLE_ENGINE": "steam"}, "FARANDOLE_ENGINE='steam': expected one of native, python"),
    ({"FARANDOLE_ALLREDUCE_ALGORITHM": "best"}, "auto, ring, direct, doubling, tree"),
    ({"FARANDOLE_LOG_LEVEL": "loud"}, "trace, debug, info"),
    ({"HOROVOD_LOG_LEVEL": "loud"}, None),
    ({"FARANDOLE_RANK": "2", "FARANDOLE_SIZE": "2"}, "rank=2 must be smaller than size=2"),
    ({"HOROVOD_LOCAL_RANK": "1"}, "FARANDOLE_LOCAL_RANK, FARANDOLE_LOCAL_SIZE"),
]


@pytest.mark.parametrize(("environ", "message"), BAD, ids=[str(environ) for environ, _ in BAD])
def test_a_bad_value_is_refused_with_its_name(environ: dict[str, str], message: str | None) -> None:
    if message is None:
        assert Config.from_environment(environ) == Config()
    else:
        with pytest.raises(ValueError, match=r".") as caught:
            Config.from_environment(environ)
        assert message in str(caught.value)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """What this process warns of, as if it had not warned of anything before."""
    monkeypatch.setattr(settings, "_warned", set())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield lambda: [str(warning.message) for warning in seen]


def test_an_unknown_variable_warns_once_with_a_suggestion(logged: Callable[[], list[str]]) -> None:
    def elsewhere() -> None:
        Config.from_environment({"FARANDOLE_FUSION_TRESHOLD": "1"})

    for _ in range(3):
        Config.from_environment({"FARANDOLE_FUSION_TRESHOLD": "1", "HOROVOD_WHATEVER": "1"})
    elsewhere()
    assert logged() == [
        "FARANDOLE_FUSION_TRESHOLD is no setting of Farandole and has no effect; "
        "did you mean FARANDOLE_FUSION_THRESHOLD?"
    ]


def test_settings_without_effect_warn_once_with_the_reason(logged: Callable[[], list[str]]) -> None:
    ignored = [setting for setting in SETTINGS.values() if setting.no_effect]
    assert len(ignored) == 15
    other: dict[str, Callable[[Any], str]] = {"bool": lambda value: str(int(not value)), "str": lambda _: "mpi"}
    environ = {setting.aliases[0]: other.get(setting.base, lambda _: "37")(setting.default) for setting in ignored}

    def elsewhere() -> None:
        settings.warn_of_ignored(environ)

    Config.from_environment(environ)  # it is rank 0's to say, and nobody knows who that is yet
    assert logged() == []
    for _ in range(3):
        settings.warn_of_ignored(environ)
    elsewhere()
    assert logged() == [
        f"{setting.aliases[0]}={environ[setting.aliases[0]]} has no effect: {setting.no_effect}" for setting in ignored
    ]


def test_a_setting_without_effect_warns_even_if_it_asks_for_the_default(logged: Callable[[], list[str]]) -> None:
    settings.warn_of_ignored({"HOROVOD_HIERARCHICAL_ALLREDUCE": "0", "HOROVOD_CONTROLLER": " "})
    [text] = logged()
    assert text.startswith("HOROVOD_HIERARCHICAL_ALLREDUCE=0 has no effect: ")


def test_variables_that_our_launchers_set_cause_no_warning(logged: Callable[[], list[str]]) -> None:
    variables = of_rank(RankNumbers(0, 2, 0, 2, 0, 1, "here"), ("127.0.0.1", 1)) | {
        "FARANDOLE_RENDEZVOUS": "unix:/somewhere"
    }
    settings.warn_of_ignored(variables)
    assert logged() == []
    settings.warn_of_ignored({**variables, "FARANDOLE_CONTROLLER": "gloo"})  # which the launcher makes of a user's own
    [text] = logged()
    assert text.startswith("FARANDOLE_CONTROLLER=gloo has no effect: ")


def test_the_object_is_frozen_and_checks_what_code_gives_it() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().rank = 1  # type: ignore[misc]
    with pytest.raises(ValueError, match="slots=1"):
        Config(slots=1)
