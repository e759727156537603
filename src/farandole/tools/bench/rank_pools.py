"""Rank pools: a library with its ranks, which wait for commands. One of several pools works at a time, so repeats of
different libraries alternate. Touches named pipes in a temporary folder, and processes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import processes
from .processes import PYTHON, Failed, Process

START_SECONDS = 240.0  # the disk may be slow and the ranks many
ANSWER_SECONDS = 120.0
AT_ONCE_SECONDS = 1.0  # for ranks whose results are not needed
RANK = ["-m", "inside.rank"]
Start = Callable[[Path], list[Process]]  # starts the ranks of a pool; the folder has its pipes


class Refused(Failed):
    """A library cannot do what was asked; its ranks still answer."""


class RankPool:
    """`ask` sends a command to every rank and returns every rank's answer."""

    def __init__(self, name: str, ranks: int, folder: Path, start: Start, stops: bool = False) -> None:
        self.name = name
        self.ranks = ranks
        self.folder = folder
        # Ranks of a library that use CPU time while they wait would disturb the others, so they are stopped meanwhile.
        self._stops = stops
        self._open: list[int] = []
        self._text = [b""] * ranks
        folder.mkdir()
        for rank in range(ranks):
            for kind in ("commands", "answers"):
                os.mkfifo(folder / f"{kind}.{rank}", 0o600)
        # A pipe that is opened for both directions does not wait for its other end, and does not end with it.
        self._commands = [self._pipe(folder / f"commands.{rank}") for rank in range(ranks)]
        self._answers = [self._pipe(folder / f"answers.{rank}") for rank in range(ranks)]
        self._processes: list[Process] = []
        try:
            self._processes = start(folder)
            self._collect(START_SECONDS)
        except BaseException:
            self.close(AT_ONCE_SECONDS)
            raise
        self._pause()

    def ask(self, do: str, limit_s: float = ANSWER_SECONDS, **command: Any) -> list[dict[str, Any]]:
        """The answers, by rank; Refused when a rank could not do it, Failed when the pool is lost with it."""
        if not self._open:
            raise Refused(f"{self.name} is gone")
        if self._stops:
            self._signal(signal.SIGCONT)
        line = (json.dumps({"do": do, **command}) + "\n").encode()
        for descriptor in self._commands:
            os.write(descriptor, line)
        try:
            answers = self._collect(limit_s)
        except Failed:
            self.close(AT_ONCE_SECONDS)
            raise
        self._pause()
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise Refused(f"{self.name}, rank {rank}: {answer['error']}")
        return answers

    def close(self, timeout: float = processes.TIMEOUT_SECONDS) -> None:
        """Lets the ranks end, and ends them when they do not; once is enough."""
        if not self._open:
            return
        if self._stops:
            self._signal(signal.SIGCONT)
        for descriptor in self._commands:
            with contextlib.suppress(OSError):
                os.write(descriptor, b'{"do": "end"}\n')
        for process in self._processes:
            process.end(timeout)
        for descriptor in self._open:
            os.close(descriptor)
        self._open = []

    def _pipe(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDWR)
        self._open.append(descriptor)
        return descriptor

    def _pause(self) -> None:
        if self._stops:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            process.signal(number)

    def _collect(self, limit: float) -> list[dict[str, Any]]:
        """One line from every rank."""
        deadline = time.monotonic() + limit
        while missing := [rank for rank in range(self.ranks) if b"\n" not in self._text[rank]]:
            ready, _, _ = select.select([self._answers[rank] for rank in missing], [], [], 0.5)
            for rank in missing:
                if self._answers[rank] in ready:
                    self._text[rank] += os.read(self._answers[rank], 1 << 20)
            if ready:
                continue
            words = next((process.printed() for process in self._processes if process.ended()), None)
            if words is not None or time.monotonic() > deadline:
                why = "ended" if words is not None else f"did not answer within {limit:g} s"
                words = words or " ".join(process.printed() for process in self._processes)
                raise Failed(f"{self.name}: rank {missing[0]} {why}: {words[-500:] or 'it said nothing'}")
        found = []
        for rank in range(self.ranks):
            line, _, self._text[rank] = self._text[rank].partition(b"\n")
            found.append(json.loads(line))
        return found


def ours(ranks: int, more: Mapping[str, str] | None = None) -> Start:
    """Our ranks, started as a user would."""
    module = "farandole.torch" if processes.has_torch() else "farandole"

    def start(folder: Path) -> list[Process]:
        rank = [PYTHON, *RANK, "horovod", str(folder), "--module", module]
        return [Process([PYTHON, "-m", "farandole", "run", "-np", str(ranks), *rank], folder / "said", more)]

    return start


def horovod(python: str, ranks: int) -> Start:
    """Ranks of the horovod.torch of another interpreter, started by the horovodrun of the same folder."""
    run = Path(python).parent / "horovodrun"
    if not run.exists():
        raise Failed(f"--peer-python {python}: there is no horovodrun in the same folder")

    def start(folder: Path) -> list[Process]:
        rank = [python, *RANK, "horovod", str(folder), "--module", "horovod.torch"]
        return [Process([str(run), "-np", str(ranks), *rank], folder / "said")]

    return start


def mpi(ranks: int) -> Start | str:
    """MPI ranks, or why there are none."""
    import importlib.util

    run = processes.find("mpirun") or processes.find("mpiexec")
    if run is None:
        return "MPI: no mpirun here"
    if importlib.util.find_spec("mpi4py") is None:
        return "MPI: mpirun is here, mpi4py is not (pip install mpi4py)"
    open_mpi = "Open MPI" in processes.says([run, "--version"])
    # Every library may use every core: nobody else binds its ranks.
    free = ["--bind-to", "none", "--oversubscribe"] if open_mpi else ["-bind-to", "none"]

    def start(folder: Path) -> list[Process]:
        return [Process([run, *free, "-n", str(ranks), PYTHON, *RANK, "mpi", str(folder)], folder / "said")]

    return start


def each(library: str, ranks: int, pinned: bool = False) -> Start:
    """One process per rank, without any launcher: gloo, alone, limits."""
    cores = sorted(os.sched_getaffinity(0))

    def start(folder: Path) -> list[Process]:
        found = []
        for rank in range(ranks):
            words = [PYTHON, *RANK, library, str(folder), "--rank", str(rank), "--size", str(ranks)]
            if library == "gloo":
                words += ["--meet", f"file://{folder / 'meet'}"]
            if pinned:
                words += ["--core", str(cores[rank % len(cores)])]
            found.append(Process(words, folder / f"said.{rank}"))
        return found

    return start


class RankPools:
    """All pools of a run: made when first asked for, kept while the same number of ranks is measured."""

    def __init__(self, folder: Path, peer_python: str, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._peer_python = peer_python
        self._say = say
        self._pools: dict[tuple[str, int], RankPool | None] = {}
        self._printed: set[str] = set()
        self._count = 0

    def __enter__(self) -> RankPools:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Closes every pool."""
        for pool in self._pools.values():
            if pool is not None:
                pool.close()
        self._pools = {}

    def note(self, line: str) -> None:
        """Says it once."""
        if line not in self._printed:
            self._printed.add(line)
            self._say(line)

    def attempt(self, pool: RankPool, what: str, do: str, **command: Any) -> list[dict[str, Any]] | None:
        """A pool's answers. What a peer cannot do is noted, and nothing is returned; what we cannot do is Failed."""
        try:
            return pool.ask(do, **command)
        except Failed as failure:
            if pool.name.startswith("farandole"):
                raise
            self.note(f"{what} is not measured: {failure}")
            return None

    def open(self, name: str, ranks: int, start: Start, stops: bool = False) -> RankPool:
        """A pool of its own."""
        self._count += 1
        return RankPool(name, ranks, self._folder / str(self._count), start, stops)

    @contextlib.contextmanager
    def pools(self, ranks: int, names: Sequence[str], keep: bool = True) -> Iterator[dict[str, RankPool]]:
        """The pools of these names that can be had; those for another number of ranks are closed."""
        if any(size != ranks for _, size in self._pools) or not keep:
            self.clear()
        found = {}
        for name in names:
            if (name, ranks) not in self._pools:
                self._pools[name, ranks] = self._make(name, ranks)
            pool = self._pools[name, ranks]
            if pool is not None:
                found[name] = pool
        try:
            yield found
        except BaseException:
            self.clear()  # a rank may still be working, or gone
            raise
        if not keep:
            self.clear()

    def _make(self, name: str, ranks: int) -> RankPool | None:
        stops = False
        if name == "farandole":
            return self.open(name, ranks, ours(ranks))
        if name in ("gloo", "alone") and not processes.has_torch():
            self.note("torch: not found (pip install torch==2.13.0 to compare with Gloo and to train)")
            return None
        if name == "mpi":
            start = mpi(ranks)
        elif name == "peer":
            nobody = "another Horovod: none given (--peer-python)"
            start = horovod(self._peer_python, ranks) if self._peer_python else nobody
            stops = True
        else:
            start = each(name, ranks, pinned=name == "alone")
        if isinstance(start, str):
            self.note(start)
            return None
        try:
            return self.open(name, ranks, start, stops)
        except Failed as failure:
            self.note(f"{name}: cannot be measured here: {failure}")
            return None
