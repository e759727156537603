# horovod.runner.common.util.config_parser: copies settings between arguments, the configuration file and variables.
# Pure: all three are arguments.
"""It uses the settings of farandole.base.config."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from farandole.base.config import LOG_LEVELS as OUR_LEVELS
from farandole.base.config import SETTINGS
from farandole.base.setting import text_of
from farandole.horovod_names.arguments import SETTING_NAMES, settings_of

LOG_LEVELS = [level.upper() for level in OUR_LEVELS]
NCCL_IB_DISABLE = "NCCL_IB_DISABLE"
_VARIABLES = {variable for setting in SETTINGS.values() for variable in setting.aliases}


def __getattr__(name: str) -> str:
    """Each variable of Horovod is a constant of this module. Its value is the name of the variable."""
    if name in _VARIABLES:
        return name
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def set_args_from_config(args: Any, config: Mapping[str, Any], override_args: set[str]) -> None:
    """Sets the arguments from the content of the file, except those in `override_args`."""
    for name, setting in SETTING_NAMES.items():
        section, _, key = setting.key.partition(".")
        entries = config.get(section)
        value = entries.get(key) if isinstance(entries, Mapping) else None
        if value is not None and name not in override_args:
            setattr(args, name, (not value) if setting.inverted else value)
    controller = config.get("controller")
    if controller is not None and not override_args.intersection(("use_gloo", "use_mpi", "use_jsrun")):
        setattr(args, f"use_{controller}", True)


def validate_config_args(args: Any) -> None:
    """ValueError for a setting with a wrong value."""
    settings_of(args)


def set_env_from_args(env: MutableMapping[str, str], args: Any) -> MutableMapping[str, str]:
    """Puts the settings of `args` into `env`, with Horovod's names."""
    for setting, value in settings_of(args).items():
        for variable in setting.aliases or (setting.variable,):
            env[variable] = text_of(value)
    return env
