# Looks for every public name of Horovod's Python packages under `horovod.*`, with its arguments.
# Touches what it imports; starts nothing.
"""`python horovod_names_look.py horovod.torch ...` prints, as JSON, what differs from horovod_names.json in the modules
that begin with these names."""

from __future__ import annotations

import builtins
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

NAMES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("horovod_names.json").read_text())
MISSING = "missing"


def written(parameter: inspect.Parameter, like: str) -> str:
    """A parameter of ours in Horovod's words; `like` is what Horovod writes."""
    default = parameter.default
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    if default is inspect.Parameter.empty:
        return parameter.name
    if type(default).__name__ == "ProcessSet":
        written_as = "hvd.global_process_set" if "hvd." in like else "global_process_set"
    elif getattr(default, "__name__", "") == "NoneCompressor":
        written_as = "Compression.none"
    elif type(default).__name__ == "ReduceOp":
        written_as = default.name.capitalize()
    elif re.fullmatch(r"[A-Za-z]\w*\.\w+|_?[A-Z_]+\w*", like.partition("=")[2]) and default is not None:
        written_as = (
            like.partition("=")[2] if like.partition("=")[2] not in ("None", "True", "False") else repr(default)
        )
    elif default is None and like.endswith("={}"):
        written_as = "{}"  # what a default may be that nobody can change
    else:
        written_as = repr(default)
    return f"{parameter.name}={written_as}"


def split(arguments: str) -> list[str]:
    """`a, b=(), c={}` at the commas between arguments."""
    return [one.strip() for one in re.split(r", (?=[*\w])", arguments) if one.strip()]


def compared(found: Any, expected: str) -> str:
    """What is wrong with the arguments; nothing if a call that Horovod takes is taken here.

    Horovod's arguments come first, in its order, with its defaults; more may follow if they have defaults.
    """
    wanted = [one for one in split(expected) if one not in ("self", "cls", "*")]
    if wanted == ["*args", "**kwargs"]:  # hands on what it gets
        return ""
    if known := getattr(found, "DEFAULTS", None):  # a stage of Spark takes its parameters by keyword
        return ", ".join(name for one in wanted if (name := one.partition("=")[0]) not in known)
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError) as error:
        return str(error)
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    ours = [written(one, wanted[index] if index < len(wanted) else "") for index, one in enumerate(parameters)]
    catches = ours[-1:] == [f"**{parameters[-1].name}"] if ours else False
    if "**kwargs" in wanted and not catches:
        return f"({', '.join(ours)}), without **kwargs"
    wanted = [one for one in wanted if not one.startswith("*")]
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    more = [one for one in parameters[len(wanted) :] if one.default is one.empty and one.kind not in optional]
    # What Horovod requires may be optional here.
    written_as = [one if "=" in want else one.partition("=")[0] for one, want in zip(ours, wanted, strict=False)]
    if written_as != wanted or more:
        return f"({', '.join(ours)}), not ({', '.join(wanted)})"
    return ""


def bases(module: ModuleType, words: str) -> Iterator[type]:
    """The classes that a class of Horovod is derived from, as far as names tell them."""
    for word in re.findall(r"[\w.]+", words):
        base = getattr(builtins, word, None) or getattr(module, word, None)
        if isinstance(base, type) and base is not object:
            yield base


def wrong_with_class(module: ModuleType, name: str, facts: dict[str, str]) -> Iterator[tuple[str, str]]:
    found = getattr(module, name)
    if not isinstance(found, type):
        if not callable(found):
            yield name, "is no class"
        elif (text := compared(found, facts.get("__init__", ""))) and "__init__" in facts:
            yield name, text
        return
    for base in bases(module, facts["is"]):
        if not issubclass(found, base):
            yield name, f"is no {base.__name__}"
    for method, arguments in facts.items():
        if method == "is":
            continue
        if not hasattr(found, method):
            yield f"{name}.{method}", MISSING
            continue
        value = found if method == "__init__" else inspect.getattr_static(found, method)
        if isinstance(value, property) or not callable(getattr(found, method)):
            continue
        if text := compared(found if method == "__init__" else getattr(found, method), arguments):
            yield f"{name}.{method}", text


def wrong_with(path: str) -> Iterator[tuple[str, str]]:
    facts = NAMES[path]
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if not path.startswith(str(error).partition(" ")[0]):
            raise
        yield "", MISSING
        return
    classes, functions = facts.get("classes", {}), facts.get("functions", {})
    for name in [*facts.get("values", "").split(), *functions, *classes]:
        if not hasattr(module, name):
            yield name, MISSING
        elif name in classes:
            yield from wrong_with_class(module, name, classes[name])
        elif name in functions and (text := compared(getattr(module, name), functions[name])):
            yield name, text


if __name__ == "__main__":
    wanted = [one for one in sys.argv[1:] if one != "horovod"]
    chosen = [path for path in NAMES if any(f"{path}.".startswith(f"{one}.") for one in wanted)]
    chosen += ["horovod"] * ("horovod" in sys.argv[1:])
    print(json.dumps({f"{path} {name}".strip(): text for path in chosen for name, text in wrong_with(path)}))
