# Finds out before a job starts that its program or script does not exist, and what the user may have meant.
# Looks at files; starts nothing.
"""`program("pyhton")` and `script(["python", "trian.py"])` return the text of the error, or "" if all is there."""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

_PYTHON = re.compile(r"python[\d.]*")


def program(name: str) -> str:
    """The text of the error if there is no such program on this host, else ""."""
    if shutil.which(name) is not None:
        return ""
    if name.endswith(".py"):
        hint = f"; did you mean `python {name}`?"
    else:
        known = [one for one in ("python", "python3", "torchrun", "accelerate") if shutil.which(one)]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
    return f"cannot run {name!r}: there is no such program{hint}"


def script(command: Sequence[str]) -> str:
    """The text of the error if a command like `python train.py` names a script that does not exist, else ""."""
    if len(command) < 2 or not _PYTHON.fullmatch(Path(command[0]).name) or not command[1].endswith(".py"):
        return ""
    return "" if command[1].startswith("-") or os.path.exists(command[1]) else no_file(command[1])


def no_file(name: str) -> str:
    """Says where a script was looked for, and which script there has a name like it."""
    path = Path(name)
    folder = path.parent if path.parent.is_dir() else Path()
    close = difflib.get_close_matches(path.name, sorted(one.name for one in folder.glob("*.py")), n=1)
    hint = f"; did you mean {folder / close[0]}?" if close else ""
    return f"there is no file {name} (looked from {Path.cwd()}){hint}"
