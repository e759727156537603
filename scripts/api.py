"""Writes docs/api.md from the docstrings of the public functions: `python scripts/api.py`.
Imports the package and its bindings, and reads only names, signatures and docstrings."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
sys.path.insert(0, str(ROOT / "src"))

MODULES = {
    "farandole": "On NumPy arrays, and on CPU tensors of any library that supports DLPack.",
    "farandole.torch": "On PyTorch tensors; `horovod.torch` is the same module. It also has those of `farandole`: "
    "init, rank, size, process sets, errors, reductions and so on.",
    "farandole.torch.elastic": "Training that continues while ranks join and leave: [elastic.md](elastic.md). "
    "`horovod.torch.elastic` is the same module.",
}
ALIASES = {"NoneCompressor": "Compression.none"}  # the names that users write for defaults
HEAD = """# The public names

Written by `python scripts/api.py` from the docstrings. `process_set` is everywhere the global one unless given; handles
come from the `_async` functions and go to `poll` and `synchronize`.
"""


class Plain:
    """A default value that is shown as a name."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def shown(value: Any) -> Any:
    """A default as users write it in a script."""
    if isinstance(value, Enum):
        return Plain(value.name.capitalize())
    if inspect.isclass(value):
        return Plain(ALIASES.get(value.__qualname__, value.__qualname__))
    return Plain("global_process_set") if type(value).__name__ == "ProcessSet" else value


def signature(value: Any) -> str:
    """The names and defaults of the parameters, without types."""
    found = inspect.signature(value)
    empty = inspect.Parameter.empty
    parameters = [
        parameter.replace(annotation=empty, default=empty if parameter.default is empty else shown(parameter.default))
        for parameter in found.parameters.values()
    ]
    return str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def prose(value: Any) -> str:
    """The docstring, with its examples as code."""
    text, code = [], False
    for line in (inspect.getdoc(value) or "").splitlines():
        if line.startswith(">>>") and not code:
            text.append("```python")
            code = True
        if code and not line:
            text.append("```")
            code = False
        text.append(line)
    return "\n".join([*text, "```"] if code else text)


def entry(name: str, value: Any) -> str:
    """The text about one public name."""
    if inspect.isclass(value):
        if issubclass(value, BaseException):
            return f"### {name}\n\nAn exception, a kind of `{value.__bases__[0].__name__}`. {prose(value)}\n"
        methods = [
            f"- `.{method}{signature(function)}`: {(inspect.getdoc(function) or '').splitlines()[0]}"
            for method, function in sorted(vars(value).items())
            if inspect.isfunction(function) and not method.startswith("_") and inspect.getdoc(function)
        ]
        # Users do not construct dataclasses and Enums; only their attributes are shown.
        call = "" if issubclass(value, Enum) or dataclasses.is_dataclass(value) else signature(value)
        return "\n".join([f"### {name}{call}\n", prose(value), *(["", *methods] if methods else []), ""])
    return f"### {name}{signature(value)}\n\n{prose(value)}\n"


def section(module: ModuleType, known: dict[str, Any]) -> str:
    """All names of a module that were not in an earlier module."""
    names = sorted(name for name in module.__all__ if known.get(name) is not getattr(module, name))
    values = {name: getattr(module, name) for name in names}
    constants = [name for name, value in values.items() if isinstance(value, Enum)]
    entries = [entry(name, value) for name, value in values.items() if callable(value) and name not in constants]
    parts = [f"## {module.__name__}\n\n{MODULES[module.__name__]}\n"]
    if constants:
        parts.append(f"Reductions: {', '.join(f'`{name}`' for name in constants)}.\n")
    return "\n".join([*parts, *entries])


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    known: dict[str, Any] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        parts.append(section(module, known))
        known.update(vars(module))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")
