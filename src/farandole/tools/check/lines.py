# Which line of the user's script something comes from, and what the script's source says.
# Reads stack frames and source files.
"""`Lines(script).here()` is the innermost frame that belongs to the user; `Source` answers questions about its code."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import FrameType

from farandole.base.tracebacks import is_library, shown

# Who uses one of these in a learning rate, scales it with the number of ranks.
OF_RANKS = {"size", "scale_lr", "world_size", "local_size", "get_world_size", "num_replicas", "num_processes", "ranks"}
# Who imports one of these trains with torch.
WITH_TORCH = {"torch", "torchvision", "lightning", "pytorch_lightning", "transformers", "accelerate"}
WITH_KERAS = {"keras", "tf_keras", "tensorflow"}


def here() -> str:
    """`train.py:41`: the line of the user that is being executed; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_library(path := frame.f_code.co_filename):
            return f"{shown(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def imported(script: str) -> set[str]:
    """The top-level names, and those of our bindings, that a script and the files in its folder import."""
    found: set[str] = set()
    todo, seen = [Path(script)], set()
    while todo:
        path = todo.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        for name in _names_in(path):
            top, _, rest = name.partition(".")
            found |= {top, rest.partition(".")[0]} if top in ("farandole", "horovod") else {top}
            todo += [path.parent / f"{top}.py", path.parent / top / "__init__.py"]
    return found


def _names_in(path: Path) -> list[str]:
    names: list[str] = []
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return names  # who runs it gets the error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


class Source:
    """The code of the file that a line like `train.py:41` names."""

    def __init__(self, where: str) -> None:
        path, _, line = where.rpartition(":")
        self.line = int(line) if line.isdecimal() else 0
        try:
            self.tree = ast.parse(Path(path).read_bytes()) if path else ast.parse("")
        except (OSError, SyntaxError, ValueError):
            self.tree = ast.parse("")

    def calls(self, method: str) -> bool:
        """Whether the file calls a method or function of this name."""
        names = (node.func for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        return any(getattr(one, "attr", getattr(one, "id", "")) == method for one in names)

    def knows_ranks(self) -> bool | None:
        """Whether the learning rate of the call in this line depends on the number of ranks; None: it has none."""
        calls = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call) and node.lineno <= self.line <= (node.end_lineno or node.lineno)
        ]
        for call in sorted(calls, key=lambda node: (node.end_lineno or 0) - node.lineno):
            named = next((word.value for word in call.keywords if word.arg in ("lr", "learning_rate")), None)
            if named is not None:
                return self._of_ranks(named, set())
        return None

    def _of_ranks(self, expression: ast.AST, seen: set[str]) -> bool:
        """Whether a name of OF_RANKS is in the expression, or in what was assigned to its names."""
        for node in ast.walk(expression):
            name = getattr(node, "attr", getattr(node, "id", None))
            if not isinstance(name, str) or name in seen:
                continue
            seen.add(name)
            if name.lower() in OF_RANKS or any(self._of_ranks(value, seen) for value in self._assigned(name)):
                return True
        return False

    def _assigned(self, name: str) -> list[ast.AST]:
        found: list[ast.AST] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(getattr(one, "attr", getattr(one, "id", None)) == name for one in targets):
                    found.append(node.value)
        return found
