# The arguments of Horovod's launcher as an object, as `_HorovodArgs` and `parse_args` return it.
# Pure: it reads neither the environment nor sys.argv.
"""The object has an attribute for each option, with Horovod's name. `words_of` turns the object into the words of a
command line of Farandole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farandole.base.config import SETTINGS
from farandole.base.setting import Setting
from farandole.launch.options import FLAGS, Options, Usage, scaled

# Our name of an option -> Horovod's name of its attribute, where the two differ.
NAMES = {
    "np": "num_proc",
    "min_np": "min_num_proc",
    "max_np": "max_num_proc",
    "slots_per_host": "slots",
    "cooldown": "cooldown_range",
    "discovery": "host_discovery_script",
    "network_interfaces": "nics",
    "gloo": "use_gloo",
    "mpi": "use_mpi",
    "jsrun": "use_jsrun",
    "tcp": "tcp_flag",
    "timestamps": "prefix_output_with_timestamp",
}
SETTING_NAMES = {  # attribute -> setting
    setting.flags[0][2:].replace("-", "_"): setting for setting in SETTINGS.values() if setting.scope == "job"
}


class HorovodArgs:
    """The attributes that the user has not set are None; only `num_proc` is 1 at first."""

    def __init__(self) -> None:
        for flag in FLAGS:
            setattr(self, NAMES.get(flag.name, flag.name), None)
        for name in SETTING_NAMES:
            setattr(self, name, None)
        self.num_proc: int | None = 1
        self.command: list[str] | None = None
        self.run_func: Any = None  # a function to run instead of a command
        self.executable: str | None = None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no option {name!r}")


def from_options(options: Options) -> HorovodArgs:
    """Returns the object for a parsed command line."""
    args = HorovodArgs()
    args.num_proc = None
    for flag in FLAGS:
        value = options.values.get(flag.name)
        setattr(args, NAMES.get(flag.name, flag.name), value)
    for name, setting in SETTING_NAMES.items():
        chosen = options.settings.get(setting.name)
        if chosen is not None and chosen.source.startswith(("flag", "file")):
            value = chosen.value
            setattr(args, name, value / setting.scale if setting.scale != 1.0 else value)
    args.command = options.command
    return args


def words_of(args: Any) -> list[str]:
    """Returns the options as words of our command line. The object need not have all attributes."""
    words: list[str] = []
    for flag in FLAGS:
        value = getattr(args, NAMES.get(flag.name, flag.name), None)
        if value is None or value is False or flag.name in ("help", "version"):
            continue
        if not flag.metavar:
            words.append(flag.words[-1])
        elif flag.count > 1:
            words += [flag.words[-1], *map(str, value)]
        elif isinstance(value, (list, tuple, set, frozenset)):
            words += [flag.words[-1], ",".join(sorted(value))]
        else:
            words += [flag.words[-1], str(value)]
    for name, setting in SETTING_NAMES.items():
        value = getattr(args, name, None)
        if value is not None:
            words += _setting_words(setting, value)
    return words


def _setting_words(setting: Setting, value: Any) -> list[str]:
    if setting.base == "bool":
        return [setting.flags[0] if value else setting.off_flags[0]]
    return [setting.flags[0], str(value)]


def settings_of(args: Any) -> Mapping[Setting, Any]:
    """Returns the settings that `args` sets, in the unit of their environment variables. Raises ValueError for a wrong
    value."""
    found: dict[Setting, Any] = {}
    for name, setting in SETTING_NAMES.items():
        value = getattr(args, name, None)
        if value is not None:
            try:
                found[setting] = value if setting.base == "bool" else scaled(setting, str(value), setting.flags[0])
            except Usage as error:
                raise ValueError(str(error)) from None
    return found
