# `farandole new KIND DIR`: a small project that trains, with the files to start it here, on SLURM and in a container.
# Touches the folder that the user names.
"""The files are templates/KIND/ and templates/common/, with words like @NAME@ replaced."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from farandole.base.version import package_version

TEMPLATES = Path(__file__).parent / "templates"
TITLES = {"torch": "PyTorch", "lightning": "Lightning", "keras": "Keras", "jax": "JAX", "tensorflow": "TensorFlow"}
EXTRAS = {"keras": "keras,tensorflow"}  # what pip installs, if it is not the name of the kind
USAGE = """usage: farandole new [torch|lightning|keras|jax|tensorflow] DIR

Writes a small project into the new folder DIR: a script that trains on data that it makes, a stack file, an sbatch
file, a Dockerfile and a README that says what to type. Without a kind it is torch.
"""


def write(kind: str, folder: Path) -> list[str]:
    """Writes the project. Returns the names of its files. FileExistsError if the folder is not empty."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; give the name of a new folder")
    words = {
        "@NAME@": folder.resolve().name,
        "@KIND@": kind,
        "@TITLE@": TITLES[kind],
        "@EXTRA@": EXTRAS.get(kind, kind),
        "@VERSION@": package_version(),
    }
    found = sorted([*(TEMPLATES / "common").iterdir(), *(TEMPLATES / kind).iterdir()], key=lambda path: path.name)
    names = []
    for path in found:
        text = path.read_text()
        for word, value in words.items():
            text = text.replace(word, value)
        name = path.name.removesuffix(".txt")
        (folder / name).write_text(text)
        names.append(name)
    return names


def wrong(given: Sequence[str]) -> str:
    """What is wrong with the words of the command, else ""."""
    example = f"farandole new {given[0] if given[0] in TITLES else 'torch'} first"
    unknown = next((word for word in given if word.startswith("-")), "")
    if unknown:
        return f"unknown option {unknown}; type, for example: {example}"
    if len(given) > 2:
        return f"expected a kind and a folder, not {len(given)} words; type, for example: {example}"
    if len(given) == 2 and given[0] not in TITLES:
        close = difflib.get_close_matches(given[0], TITLES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(TITLES)}"
        return f"unknown kind {given[0]!r}; {hint}"
    if given[-1] in TITLES:
        # A folder of this name would also hide the framework from scripts beside it: Python would import the folder.
        return f"{given[-1]} is a kind of project; give the folder another name, for example: {example}"
    return ""


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command."""
    arguments = list(sys.argv[1:] if words is None else words)
    if arguments in ([], ["-h"], ["--help"]):
        print(USAGE, end="")
        return 0 if arguments else 2
    if problem := wrong(arguments):
        print(f"farandole new: {problem}", file=sys.stderr)
        return 2
    kind = arguments.pop(0) if len(arguments) > 1 else "torch"
    folder = Path(arguments[0])
    try:
        names = write(kind, folder)
    except OSError as error:
        print(f"farandole new: {error}", file=sys.stderr)
        return 1
    print(f"{folder}: {', '.join(names)}")
    print(f"\n  cd {folder}\n  farandole check train.py\n  farandole run -np 2 python train.py")
    return 0
