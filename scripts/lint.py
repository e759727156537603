"""`make lint`: ruff, mypy, clang-format, the rules of the repository, and the site of the docs with all its links.
Starts the tools and changes no file but those of build/."""

from __future__ import annotations

import sys
from pathlib import Path

from stages import ROOT, Stage, run

PYTHON = Path(sys.executable)


def tool(name: str) -> Path:
    """A program of the virtual environment."""
    return PYTHON.with_name(name)


def sources() -> list[Path]:
    """Every C++ file."""
    folders = (ROOT / "core", ROOT / "src", ROOT / "tests")
    return sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in (".h", ".cc"))


def stages() -> list[Stage]:
    """All stages. Types take longest, so they are checked in the background."""
    site: list[str | Path] = [tool("mkdocs"), "--quiet", "build"]
    return [
        Stage("mypy", [tool("mypy")], background=True),
        Stage("rules of the house", [PYTHON, ROOT / "scripts" / "house.py"]),
        Stage("ruff check", [tool("ruff"), "check", "--quiet"]),
        Stage("ruff format", [tool("ruff"), "format", "--check", "--quiet"]),
        Stage("the docs as a site, links and anchors", site, environment={"NO_MKDOCS_2_WARNING": "1"}),
        Stage("clang-format", [tool("clang-format"), "--dry-run", "-Werror", *sources()]),
    ]


if __name__ == "__main__":
    sys.exit(run(stages()))
