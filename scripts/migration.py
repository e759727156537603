"""Writes docs/migration.md, every public name of Horovod 0.28 with what it is here: `python scripts/migration.py`.
Reads the lists of names in tests/frameworks, the table of docs/horovod-names.md, and our settings and flags."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "migration.md"
NAMES = ROOT / "tests" / "frameworks" / "horovod_names.json"
WORDS = ROOT / "tests" / "frameworks" / "horovod_words.json"  # flags and variables
DIFFERENCES = ROOT / "tests" / "frameworks" / "horovod_differences.json"  # what horovod_names_look.py finds
REASONS = ROOT / "docs" / "horovod-names.md"
sys.path.insert(0, str(ROOT / "src"))

from farandole.base.config import SETTINGS  # noqa: E402
from farandole.base.setting import Setting  # noqa: E402
from farandole.launch.help import WITHOUT_EFFECT  # noqa: E402
from farandole.launch.options import FLAGS, table  # noqa: E402

SAME, BETTER, IGNORED, OTHER, ABSENT = "same", "better", "ignored", "other", "absent"
HEAD = """# Every name of Horovod, and what it is here

This page has each public module, function, class, flag and variable of Horovod 0.28.1. It is written by
`python scripts/migration.py`; tests compare it with what is imported. [from-horovod.md](from-horovod.md) says how to
move a script: in most cases nothing has to be changed.

| word | meaning |
|---|---|
| same | it is there, takes the same arguments and does the same |
| better | the same, and what is written behind it |
| ignored | it is accepted and has no effect, for the reason behind it |
| other | it is there, but takes other arguments or is of another kind |
| absent | it is not there |

Names that begin with `_` are not listed. Methods are listed where they are not the same.
"""
# Patterns of `module name`, and what is better.
BETTER_NAMES = {
    "horovod.torch* DistributedOptimizer": "it can be pickled and copied; `zero_grad(set_to_none=True)` works; "
    "`gradient_predivide_factor` counts with `groups` too; a parameter that is frozen on some ranks blocks nobody",
    "horovod.torch* SyncBatchNorm": "also on the CPU, and with `process_set=`",
    "horovod.torch* allgather_object": "takes `process_set=`",
    "horovod.torch* Compression": "has `bf16` too",
    "horovod.torch.elastic* *State": "lists and dictionaries that were changed in place are rolled back too",
    "horovod.torch.elastic* ElasticSampler": "no sample is repeated when hosts leave as planned",
    "horovod*exceptions HorovodInternalError": "`PeerLost`, a kind of it, has the rank that died",
}
BETTER_FLAGS = {
    "--check-build": "also names JAX, and who moves the bytes",
    "--hosts": "exactly `-np` ranks start, also if there are more slots",
    "--output-filename": "also with one rank",
    "--stall-check-warning-time-seconds": "the rank, its line and its operation are told after 5 s already",
}
# Variables that are no settings of ours.
OTHER_VARIABLES = {
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": (
        SAME,
        "for master programs that start ranks themselves: [clusters.md](clusters.md)",
    ),
    "HOROVOD_GLOO_RENDEZVOUS_PORT": (SAME, "as above"),
    "_HOROVOD_SECRET_KEY": (SAME, "as above"),
    "HOROVOD_SPARK_PYTHONPATH": (ABSENT, "inside Horovod's tasks on Spark"),
    "HOROVOD_SPARK_WORK_DIR": (ABSENT, "inside Horovod's tasks on Spark"),
}
BUILD = "nothing is compiled for a framework when the package is installed"


@cache
def reasons() -> tuple[tuple[str, str], ...]:
    """Patterns of names that differ, each with the reason, from the table of docs/horovod-names.md."""
    rows = [line.split("|") for line in REASONS.read_text().splitlines() if line.startswith("| `")]
    return tuple((pattern, row[2].strip()) for row in rows for pattern in re.findall(r"`([^`]+)`", row[1]))


def verdict(module: str, name: str, differences: dict[str, str]) -> tuple[str, str]:
    """What a name is here, and why."""
    full = f"{module} {name}".strip()
    if full in differences:
        why = next((why for pattern, why in reasons() if fnmatchcase(full, pattern)), "")
        return ABSENT if differences[full] == "missing" else OTHER, why
    better = next((why for pattern, why in BETTER_NAMES.items() if fnmatchcase(full, pattern)), "")
    return (BETTER, better) if better else (SAME, "")


def names_of(facts: dict[str, Any]) -> list[str]:
    """The values, functions and classes of a module, then the methods of its classes."""
    plain = [*facts.get("values", "").split(), *facts.get("functions", {}), *facts.get("classes", {})]
    methods = [
        f"{one}.{method}" for one, known in facts.get("classes", {}).items() for method in known if method != "is"
    ]
    return [*plain, *methods]


def section(module: str, facts: dict[str, Any], differences: dict[str, str]) -> Iterator[str]:
    """A module: names that are the same in one line, then the others, grouped by the reason."""
    yield f"\n### {module}\n"
    if module in differences:  # the whole module
        yield f"absent: {verdict(module, '', differences)[1]}"
        return
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names_of(facts):
        found = verdict(module, name, differences)
        if "." not in name or found[0] in (OTHER, ABSENT):
            groups.setdefault(found, []).append(f"`{name}`")
    if not groups:
        yield "same: the module itself, which has no public names of its own"
        return
    yield "| here | names | why |\n|---|---|---|"
    order = [SAME, BETTER, IGNORED, OTHER, ABSENT]
    for (word, why), names in sorted(groups.items(), key=lambda group: order.index(group[0][0])):
        yield f"| {word} | {', '.join(names)} | {why} |"


def effect(setting: Setting) -> tuple[str, str]:
    """Whether a setting of Horovod has an effect here."""
    return (IGNORED, str(setting.no_effect)) if setting.no_effect else (SAME, setting.help)


def flag_verdict(words: list[str]) -> tuple[str, str]:
    """What a flag is here, and why."""
    known = table()
    if any(word not in known for word in words):
        return ABSENT, ""
    for word in words:
        if why := BETTER_FLAGS.get(word):
            return BETTER, why
    found = known[words[0]]
    if isinstance(found, tuple):
        return effect(found[0])
    idle = found in [flag for flag in FLAGS if flag.name in WITHOUT_EFFECT]
    return (IGNORED if idle else SAME), found.help


def variable_verdict(name: str) -> tuple[str, str]:
    """What a variable is here, and why."""
    setting = next((one for one in SETTINGS.values() if name in one.variables), None)
    if setting is not None:
        return effect(setting)
    return OTHER_VARIABLES.get(name, (ABSENT, ""))


def page() -> str:
    """The whole page."""
    names = json.loads(NAMES.read_text())
    words = json.loads(WORDS.read_text())
    differences = json.loads(DIFFERENCES.read_text())
    lines = [HEAD, "## Flags of horovodrun\n", "| flag | here | what it does, or why |\n|---|---|---|"]
    for spellings in words["flags"]:
        here, why = flag_verdict(spellings)
        lines.append(f"| {', '.join(f'`{one}`' for one in spellings)} | {here} | {why} |")
    lines.append(
        "\nThe file of `--config-file` may be one that was written for Horovod: "
        "[settings.md](settings.md#the-configuration-file).\n"
    )
    lines += ["## Variables\n", "| variable | here | what it does, or why |\n|---|---|---|"]
    for name in words["variables"]:
        here, why = variable_verdict(name)
        lines.append(f"| `{name}` | {here} | {why} |")
    lines += ["", "These are read when Horovod is built. They are ignored here: " + BUILD + ".", ""]
    lines.append(", ".join(f"`{name}`" for name in words["build variables"]) + "\n")
    lines.append("## Modules, functions and classes")
    for module, facts in sorted(names.items()):
        lines += section(module, facts, differences)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")
