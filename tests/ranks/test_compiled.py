# When operations of frameworks are compiled: once for all ranks of a host, or for no rank if one of them cannot.
# Touches farandole.bindings.compiled, a compiler, and files in a scratch directory.
"""A small library replaces a framework's; its compiler is a script that counts and waits and calls the real one."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import jobs
import pytest

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler"),
]
RANKS = 3
SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'
# Continues when the other ranks wait for the lock, according to the kernel.
COUNTING = """#!/bin/sh
echo compiled >> "$SCRATCH/compilers"
inode=$(stat -c %i "$FARANDOLE_CACHE_DIRECTORY"/*.lock)
while [ "$(grep -c -- "-> FLOCK.*:$inode " /proc/locks)" -lt {waiting} ]; do sleep 0.01; done  # sleep: between looks
exec {compiler} "$@"
"""
BUILD = """
import ctypes
from pathlib import Path
from farandole.bindings import compiled
from farandole.world.runtime import runtime
hvd.init()
source, failure, path = Path(os.environ["SCRATCH"], "answer.cc"), "", None
def load():
    global path
    try:
        path = compiled.built(runtime.config, "answering", "1.0", source, [], [])
    except compiled.FAILURES as error:
        return str(error) or type(error).__name__
    return ""
def seen():
    failures = []
    able = compiled.agreed(runtime.world, "tensorflow", "auto", lambda: failures.append(load()) or failures[0])
    answer = ctypes.CDLL(str(path)).answer() if path else None
    return {"able": able, "failure": failures[0], "path": str(path), "answer": answer}
"""


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "answer.cc").write_text(SOURCE)
    tools = tmp_path / "tools"
    tools.mkdir()
    script = tools / "c++"
    script.write_text(COUNTING.format(waiting=RANKS - 1, compiler=shlex.quote(str(shutil.which("c++")))))
    script.chmod(0o700)
    return tmp_path


def environment(scratch: Path, cache: str | Path) -> dict[str, str]:
    path = f"{scratch / 'tools'}{os.pathsep}{os.environ['PATH']}"
    return {"SCRATCH": str(scratch), "FARANDOLE_CACHE_DIRECTORY": str(cache), "PATH": path}


def test_one_rank_compiles_while_the_others_wait(scratch: Path) -> None:
    cache = scratch / "cache"
    found = jobs.run(BUILD + "report(**seen())", RANKS, env=environment(scratch, cache))
    assert (scratch / "compilers").read_text().split() == ["compiled"]
    assert all(one == {**found[0], "able": True, "answer": 42, "failure": ""} for one in found), found
    # Existing files are used: no compiler runs, and nothing is written.
    os.unlink(next(cache.glob("*.lock")))
    before = [(entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(cache)]
    assert jobs.run(BUILD + "report(**seen())", 2, env=environment(scratch, cache)) == found[:2]
    assert [(entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(cache)] == before
    assert (scratch / "compilers").read_text().split() == ["compiled"]


def test_ranks_agree_when_one_cannot_write_compile_or_trust(scratch: Path) -> None:
    # One after the other, rank 1 has a read-only directory, no compiler, a broken compiler, and another user's library.
    body = """
place, own, turns = os.environ["SCRATCH"], os.environ["FARANDOLE_CACHE_DIRECTORY"], []
def turn(**changes):
    hvd.shutdown()
    global path
    path, before = None, dict(os.environ)
    if rank == 1:
        os.environ.update(changes)
    hvd.init()
    turns.append(seen())
    os.environ.update(before)
cache = own + str(rank)  # as on hosts of their own
os.environ["FARANDOLE_CACHE_DIRECTORY"] = cache
os.environ["PATH"] = os.environ["PATH"].partition(":")[2]  # the plain compiler
os.makedirs(place + "/empty", exist_ok=True)
broken = place + "/broken"
if rank == 1:
    os.makedirs(broken)
    with open(broken + "/c++", "w") as script:
        script.write("#!/bin/sh\\necho error: no >&2\\nexit 1\\n")
    os.chmod(broken + "/c++", 0o700)
turn(FARANDOLE_CACHE_DIRECTORY="/proc/farandole")
turn(PATH=place + "/empty")
turn(PATH=broken + ":" + os.environ["PATH"])
turn()
if rank == 1:
    os.chmod(path, 0o722)
turn()
report(turns=turns)
"""
    found = [one["turns"] for one in jobs.run(BUILD + body, 2, env=environment(scratch, scratch / "cache"))]
    assert [[turn["able"] for turn in turns] for turns in found] == [[False, False, False, True, False]] * 2
    assert [turn["failure"] for turn in found[0]] == [""] * 5
    reasons = ("/proc/farandole", "no C++ compiler", "the compiler failed: error: no", "", "can be written by others")
    for turn, words in zip(found[1], reasons, strict=True):
        assert words in turn["failure"] and bool(words) is bool(turn["failure"]), turn
