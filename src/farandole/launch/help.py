# What `farandole run --help` and `--help-all` print.
# Pure: the declarations of options.py as text.
"""`short(program)` has the flags that people use; `long(program)` has all of them, those without effect last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from farandole.base.setting import Setting
from farandole.launch.options import FLAGS, Flag, job_settings

GROUPS = {
    "how many ranks, and where": ("np", "hosts", "hostfile", "config_file", "network_interfaces", "ssh_port"),
    "what is printed and kept": ("output_filename", "log_dir", "timestamps", "raw", "quiet", "json", "timeline"),
    "ranks that come and go": ("min_np", "max_np", "discovery", "reset_limit"),
    "before the job": ("dry_run", "print_config", "check_build", "start_timeout", "help", "help_all"),
}
WITHOUT_EFFECT = ("gloo", "disable_cache")  # of FLAGS; they are there for scripts that were written for Horovod


def _examples(program: str) -> list[str]:
    return [
        f"usage: {program} -np N [flags] COMMAND...",
        "",
        f"  {program} -np 4 python train.py",
        f"  {program} -np 8 -H host1:4,host2:4 python train.py",
        f"  {program} -np 4 --min-np 2 python train.py          (goes on when ranks die)",
        "",
    ]


def short(program: str) -> str:
    """The text of --help."""
    flags = {flag.name: flag for flag in FLAGS}
    settings = {setting.name: setting for setting in job_settings()}
    lines = _examples(program)
    for title, names in GROUPS.items():
        lines.append(f"{title}:")
        for name in names:
            words = _words(flags[name]) if name in flags else _setting_words(settings[name])
            text = (flags[name].help if name in flags else settings[name].help).removeprefix("elastic: ")
            lines.append(f"  {words:<34} {text}" if len(words) < 35 else f"  {words}\n  {'':<34} {text}")
        lines.append("")
    lines.append(f"{program} --help-all: all flags. Before the first job: farandole check train.py")
    return "\n".join(lines) + "\n"


def long(program: str) -> str:
    """The text of --help-all."""
    shown = [flag for flag in FLAGS if not flag.hidden and flag.name not in WITHOUT_EFFECT]
    idle = [flag for flag in FLAGS if flag.name in WITHOUT_EFFECT]
    settings = job_settings()
    parts = (
        ("flags of the launcher", ((_words(flag), flag.help) for flag in shown)),
        (
            "settings of the job (--print-config shows their values)",
            ((_setting_words(one), one.help) for one in settings if not one.no_effect),
        ),
        (
            "accepted, without effect",
            [
                *((_words(flag), flag.help) for flag in idle),
                *((_setting_words(one), str(one.no_effect)) for one in settings if one.no_effect),
            ],
        ),
    )
    return "\n".join([*_examples(program), *(line for title, rows in parts for line in _rows(title, rows))]) + "\n"


def _rows(title: str, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield f"{title}:"
    for words, text in rows:
        yield f"  {words}"
        yield f"        {text}"
    yield ""


def _words(flag: Flag) -> str:
    return f"{', '.join(flag.words)} {flag.metavar}".rstrip()


def _setting_words(setting: Setting) -> str:
    value = "" if setting.base == "bool" else " " + (setting.unit or "value").upper().replace(" ", "-")
    return f"{setting.flags[0]}{' N' if setting.scale != 1.0 else value}"
