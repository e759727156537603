"""Checks the rules of the repository: which room may use which, and which may make system calls, sockets, processes.
Reads files and imports nothing of the product. `check(root)` returns one line per broken rule."""

from __future__ import annotations

import ast
import functools
import gc
import graphlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rules import (
    BUILT_ON,
    CORE_ROOMS,
    EXCEPTIONS,
    FORBIDDEN_CALLS,
    FORBIDDEN_WORDS,
    FRAMEWORKS,
    PYTHON_ROOMS,
    SLEEP_REASON,
    SLEEPS,
    SYSTEM_HEADERS,
)

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("core", "src", "tests", "scripts", "examples", "bench")
IGNORED = ("__pycache__", ".git")
BUILT = (".venv", "build", "dist")
LONGEST_FILE, LONGEST_FUNCTION = 700, 80


@dataclass(frozen=True)
class Finding:
    """One broken rule. Exceptions refer to the name of the rule."""

    rule: str
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text} [{self.rule}]"


def files(root: Path) -> list[Path]:
    """Every file of the tree: files that git knows or would add; all files if there is no git."""
    command = ["git", "-c", "safe.directory=*", "-C", str(root)]  # the checkout may belong to another user
    command += ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    known = subprocess.run(command, capture_output=True)
    if known.returncode == 0 and (root / ".git").exists():
        names = sorted(set(known.stdout.decode().split("\0")) - {""})
        return [root / name for name in names if (root / name).is_file()]
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in IGNORED and not (Path(folder) == root and name in BUILT)]
        found += [Path(folder, name) for name in names]
    return sorted(found)


def blank(text: str) -> str:
    """C++ source with comments and strings replaced by spaces. Lines keep their numbers."""

    def spaces(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    return re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'", spaces, text, flags=re.DOTALL)


def core_arrows(path: str, text: str) -> Iterator[Finding]:
    """Checks that includes only go down, and that only os/ includes system headers."""
    room = path.split("/")[1]
    if room not in CORE_ROOMS:
        yield Finding("core-arrow", path, 1, f"core/{room} is not a room; add it to scripts/rules.py")
        return
    for number, line in enumerate(text.splitlines(), 1):
        include = re.match(r'\s*#\s*include\s+(["<])([^">]+)[">]', line)
        if include is None:
            continue
        quote, target = include.groups()
        if quote == '"' and "/" in target:
            other = target.split("/")[0]
            if other != room and other not in CORE_ROOMS[room]:
                yield Finding("core-arrow", path, number, f"{room}/ may not use {other}/")
        elif quote == "<" and room != "os" and re.fullmatch(SYSTEM_HEADERS, target):
            yield Finding("system-call", path, number, f"<{target}> belongs to os/")
    for number, line in enumerate(blank(text).splitlines(), 1):
        for pattern, reason in FORBIDDEN_CALLS.items():
            if found := re.search(pattern, line):
                yield Finding("core-call", path, number, f"{found.group().strip()}: {reason}")


@functools.cache
def parsed(text: str) -> ast.Module:
    """The syntax tree of a file. Several rules read it."""
    return ast.parse(text)


@functools.cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """Every node of a file. To walk through a tree takes as long as all rules about it."""
    return list(ast.walk(tree))


def imports(tree: ast.Module, package: list[str]) -> Iterator[tuple[int, str, bool]]:
    """(line, absolute module, whether at the top level) of every import, without those only for type checkers."""
    top = {id(node) for node in tree.body}
    for block in tree.body:
        if isinstance(block, ast.Try | ast.If | ast.With):
            top |= {id(inner) for inner in ast.walk(block)}
    typing_only: set[int] = set()
    for node in nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            typing_only |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
    for node in nodes(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "module_of":
            # An import by name, if the name is a constant: `module_of("farandole.ray")`.
            name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            if isinstance(name, str):
                yield node.lineno, importlib.util.resolve_name(name, ".".join(package)), id(node) in top
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            # In `from farandole.world import groups` the imported name may be a module.
            for alias in node.names:
                yield node.lineno, ".".join(filter(None, (module, alias.name))), id(node) in top


def room_of(names: Sequence[str]) -> str:
    """The room of a module: a file or folder of the package, or something inside one that has its own rule."""
    inner = "/".join(names[1:3])
    return inner if inner in PYTHON_ROOMS else names[1]


def python_arrows(path: str, tree: ast.Module) -> Iterator[Finding]:
    """Checks imports between rooms of the package, and actions that only one room may do."""
    parts = Path(path).with_suffix("").parts[1:]  # ("farandole", "rendezvous", "mesh")
    room = room_of(parts)
    if room not in PYTHON_ROOMS:
        yield Finding("python-arrow", path, 1, f"src/farandole/{room} is not a room; add it to scripts/rules.py")
        return
    package = list(parts[:-1])
    for line, module, top in imports(tree, package):
        names = module.split(".")
        if names[0] == "farandole" and len(names) > 1:
            other = room_of(names)
            if other in PYTHON_ROOMS and other != room and other not in PYTHON_ROOMS[room]:
                yield Finding("python-arrow", path, line, f"{room} may not use {other}")
        own = {room, room.partition("/")[0]} | BUILT_ON.get(room, set())
        if names[0] in FRAMEWORKS and names[0] not in own and (top or room != "tools"):
            yield Finding(
                "framework", path, line, f"{names[0]} may not be imported here: the package knows no framework"
            )
        if names[0] in ("socket", "socketserver", "asyncio", "http") and room != "rendezvous":
            yield Finding("socket", path, line, f"{names[0]}: only rendezvous/ opens sockets")
        if names[0] in ("subprocess", "multiprocessing", "pty") and path != "src/farandole/launch/spawn.py":
            yield Finding("process", path, line, f"{names[0]}: only launch/spawn.py starts processes")
        if names[0] in ("pickle", "cloudpickle", "marshal", "shelve", "dill"):
            yield Finding("pickle", path, line, f"{names[0]}: messages are typed data")
        if names[0] == "ctypes":
            yield Finding("ctypes", path, line, "ctypes: C is called by core/python/ alone")
    for node in nodes(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name in ("import_module", "__import__"):
                yield Finding("import-by-name", path, node.lineno, f"{name}: only base/named.py imports by name")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            reads = room == "launch" or path == "src/farandole/base/config.py"
            if node.attr in ("environ", "environb", "getenv", "putenv", "unsetenv") and not reads:
                yield Finding(
                    "environment", path, node.lineno, f"os.{node.attr}: only base/config.py and launch/ read it"
                )
            starts = re.fullmatch(r"fork|forkpty|system|popen|exec\w+|spawn\w+|posix_spawnp?", node.attr)
            if starts and path != "src/farandole/launch/spawn.py":
                yield Finding("process", path, node.lineno, f"os.{node.attr}: only launch/spawn.py starts processes")


def circles(sources: dict[str, str]) -> Iterator[Finding]:
    """Finds files that import each other, at the start or later. Reports one cycle at a time."""
    names = {}
    for path in sources:
        parts = Path(path).with_suffix("").parts[1:]
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    arrows: dict[str, set[str]] = {path: set() for path in sources}
    for path, text in sources.items():
        for _, module, _ in imports(parsed(text), list(Path(path).parts[1:-1])):
            other = names.get(module) or names.get(module.rpartition(".")[0])  # a module, or a name in one
            if other is not None and other != path:
                arrows[path].add(other)
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        circle = [str(path).removeprefix("src/farandole/") for path in error.args[1]]
        yield Finding("circle", error.args[1][0], 1, f"files import each other: {' <- '.join(circle)}")


def header(path: str, text: str) -> Iterator[Finding]:
    """Checks the two lines at the top of a file: what it is, what it may touch."""
    lines = text.splitlines()
    if not any(line.strip() for line in lines):
        return  # an empty __init__.py
    if lines[0].startswith("#!"):
        lines = lines[1:]
    start = lines[:2]
    if path.endswith(".py"):
        good = all(line.startswith("#") for line in start)
        if start and start[0].startswith(('"""', 'r"""')):
            good = len(start) == 2 and start[0].count('"""') == 1 and bool(start[1].strip(' "'))
    else:
        good = all(re.match(r"//|/\*| \*", line) for line in start)
    if not good or len(start) < 2:
        yield Finding("header", path, 1, "the file does not open with two lines: what it is, what it may touch")


def python_functions(tree: ast.Module) -> Iterator[tuple[str, int, int]]:
    """(name, first line, number of lines)."""
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


def core_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """(name, first line, number of lines) of C++ functions, found by their braces."""
    code = re.sub(r"^\s*#(?:[^\n]*\\\n)*[^\n]*", lambda m: re.sub(r"[^\n]", " ", m.group()), blank(text), flags=re.M)
    kinds: list[tuple[bool, str, int]] = []  # (is a function, its name, the line it begins in)
    since = 0
    line = 1
    for index, sign in enumerate(code):
        if sign == "\n":
            line += 1
        elif sign == "{":
            before = code[since:index]
            inside = any(function for function, _, _ in kinds)
            name = re.search(r"([\w~:]+|operator\S+)\s*\(", before)
            scope = re.search(r"\b(namespace|class|struct|enum|union|extern)\b(?![^(]*\()", before)
            function = not inside and name is not None and scope is None
            kinds.append((function, name.group(1) if name else "", line - before.lstrip().count("\n")))
            since = index + 1
        elif sign == "}":
            if kinds:
                function, title, first = kinds.pop()
                if function:
                    yield title, first, line - first + 1
            since = index + 1
        elif sign == ";":
            since = index + 1


def size(path: str, text: str, functions: Iterator[tuple[str, int, int]]) -> Iterator[Finding]:
    """Finds files and functions that are too long."""
    count = len(text.splitlines())
    if count > LONGEST_FILE:
        yield Finding("long-file", path, 1, f"{count} lines; {LONGEST_FILE} is the limit")
    for name, line, length in functions:
        if length > LONGEST_FUNCTION:
            yield Finding("long-function", path, line, f"{name} has {length} lines; {LONGEST_FUNCTION} is the limit")


def forbidden_words(path: str, text: str) -> Iterator[Finding]:
    """Finds paths and settings of one machine."""
    for number, line in enumerate(text.splitlines(), 1):
        for word in FORBIDDEN_WORDS:
            if word in line:
                yield Finding("word", path, number, f"{word!r} does not belong into the repository")


def sleeps(path: str, text: str) -> Iterator[Finding]:
    """Finds sleeps in tests, also in programs inside strings, because most tests run such programs."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(SLEEPS, line) and not re.search(SLEEP_REASON, line):
            why = "a test waits for an event (`until` of tests/ranks/waiting.py), or says why it sleeps: # sleep: why"
            yield Finding("sleep", path, number, why)


def findings_in(path: str, text: str) -> Iterator[Finding]:
    """All findings in one file."""
    yield from forbidden_words(path, text)
    if path.split("/")[0] not in SOURCES or not path.endswith((".py", ".h", ".cc")):
        return
    yield from header(path, text)
    if path.startswith("tests/"):
        yield from sleeps(path, text)
    if not path.endswith(".py"):
        yield from size(path, text, core_functions(text))
        if path.startswith("core/"):
            yield from core_arrows(path, text)
        return
    try:
        tree = parsed(text)
    except SyntaxError as error:
        yield Finding("syntax", path, error.lineno or 1, str(error.msg))
        return
    yield from size(path, text, python_functions(tree))
    if path.startswith("src/farandole/"):
        yield from python_arrows(path, tree)


def same_names(paths: list[str]) -> Iterator[Finding]:
    """Finds test files of one name. pytest imports them by name alone, so it cannot collect the second one."""
    known: dict[str, str] = {}
    for path in paths:
        name = path.rpartition("/")[2]
        tested = path.startswith("tests/") and name.startswith("test_") and name.endswith(".py")
        if tested and known.setdefault(name, path) != path:
            yield Finding("same-name", path, 1, f"{known[name]} has the same name; pytest needs different ones")


def check(root: Path) -> list[Finding]:
    """Every broken rule below `root` without a written exception, and every exception that is not needed."""
    found: list[Finding] = []
    used: set[tuple[str, str]] = set()
    package: dict[str, str] = {}
    for file in files(root):
        path = file.relative_to(root).as_posix()
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        findings = list(findings_in(path, text))
        if (
            path.startswith("src/farandole/")
            and path.endswith(".py")
            and "syntax" not in {one.rule for one in findings}
        ):
            package[path] = text
        for finding in findings:
            if path in EXCEPTIONS.get(finding.rule, {}):
                used.add((finding.rule, path))
            else:
                found.append(finding)
    found += circles(package)
    found += same_names([file.relative_to(root).as_posix() for file in files(root)])
    if root == ROOT:
        for rule, path in sorted({(rule, path) for rule, paths in EXCEPTIONS.items() for path in paths} - used):
            found.append(Finding(rule, path, 1, "the exception in scripts/rules.py is not needed any more"))
    return found


def main() -> int:
    """Prints broken rules. Returns 1 if there are any."""
    gc.disable()  # all trees are kept until the end, so there is nothing to collect
    found = check(ROOT)
    for finding in found:
        print(finding)
    print(f"house: {len(found)} broken rules" if found else "house: every rule is kept")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
