"""Writes docs/settings.md from the declarations in src/farandole/base/config.py: `python scripts/settings.py`.
Reads only SETTINGS, so that each setting is described in one place."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "settings.md"
sys.path.insert(0, str(ROOT / "src"))

from farandole.base.config import SETTINGS  # noqa: E402
from farandole.base.setting import Setting  # noqa: E402
from farandole.launch.options import IN_FILE, job_settings  # noqa: E402

HEAD = """# Settings

Every setting has one declaration, in `src/farandole/base/config.py`; this page is written from it by
`python scripts/settings.py`. A variable is read once, at `init()`. An empty variable counts as unset; a value that
cannot be read is an error that names the variable; an unknown `FARANDOLE_` variable is a warning.
Where two variables are given, the first one wins; the second is Horovod's name for the same thing.
"""
FILE = """## The configuration file

`farandole config` asks a few questions and writes such a file; `farandole run --config-file FILE` reads it. What the
command line gives wins over it. Below `job:` stand flags of the launcher: {flags}.

```yaml
job:
  np: 4
  hosts: host1:2,host2:2
  min_np: 2
controller: gloo            # or mpi, jsrun: how ranks are started
```

The other sections have settings, with the units of their flags:

| section | settings |
|---|---|
{sections}
"""
SCOPES = {
    "job": ("For the whole job", "Set them for all ranks alike."),
    "worker": ("Set by the launcher", "Each rank gets its own; setting them by hand is for launchers."),
    "test": ("For tests", "They exist so that tests can reach what users should not."),
}


def default(setting: Setting) -> str:
    """The default as users type it."""
    if setting.default is None:
        return "none"
    if isinstance(setting.default, bool):
        return str(int(setting.default))
    return f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)


def row(setting: Setting) -> str:
    """One line of the table."""
    variables = "<br>".join(f"`{name}`" for name in (setting.variable, *setting.aliases))
    values = ", ".join(setting.choices) or setting.unit or {"bool": "0 or 1", "str": "text"}.get(setting.base, "number")
    return f"| {variables} | {default(setting)} | {values} | {setting.help} |"


def file() -> str:
    """The part about the file of --config-file."""
    sections: dict[str, list[str]] = {}
    for setting in job_settings():
        if "." in setting.key:
            section, name = setting.key.split(".", 1)
            sections.setdefault(section, []).append(f"`{name}`")
    rows = "\n".join(f"| `{section}` | {', '.join(names)} |" for section, names in sections.items())
    return FILE.format(flags=", ".join(f"`{name}`" for name in IN_FILE), sections=rows)


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for scope, (title, note) in SCOPES.items():
        rows = [row(setting) for setting in SETTINGS.values() if setting.scope == scope]
        table = "\n".join(["| variable | default | values | what it does |", "|---|---|---|---|", *rows])
        parts.append(f"## {title}\n\n{note}\n\n{table}\n")
    return "\n".join([*parts, file()])


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")
