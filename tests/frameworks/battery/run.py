# Runs the cases of a table, all in one process per rank: init, the case, a probe, shutdown, and the next.
# Touches the cases and farandole's launcher.
"""A rank calls `run(binding, table)`, the test `results(...)`: one job per number of ranks."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from farandole.base.errors import ShutDown

from .binding import Binding, Case, Table
from .edges import EDGES
from .life import LIFE
from .mistakes import MISTAKES
from .values import VALUES

PATIENCE_S = 90.0  # for one case; the first one to need a compiler loads it
JOB_S = 240.0


def common() -> Table:
    """The cases for every framework."""
    table = Table()
    for part in (VALUES, LIFE, MISTAKES, EDGES):
        table.update(part)
    return table


def chosen(binding: Binding, table: Table) -> list[Case]:
    """The cases of the table whose needs the framework offers."""
    return [case for case in table.values() if case.needs <= binding.offers]


def run(binding: Binding, table: Table, patience: float = PATIENCE_S) -> None:
    """Runs all cases on this rank. Prints a line of JSON for each case, with its error or an empty text."""
    rank, size = int(os.environ["FARANDOLE_RANK"]), int(os.environ["FARANDOLE_SIZE"])
    for case in chosen(binding, table):
        faulthandler.dump_traceback_later(patience, exit=True)
        wrong, began = "", time.monotonic()
        try:
            if case.init is not None:
                binding.hvd.init(**case.init)
            case.body(binding, rank, size)
            binding.holds(binding.hvd.allreduce(binding.tensor([1.0]), name="probe", op=binding.hvd.Sum), [size])
        except ShutDown:
            wrong = "another rank has failed"
        except BaseException:
            wrong = traceback.format_exc()
        # A rank whose case failed leaves, so that the other ranks do not wait for it.
        binding.hvd.shutdown()
        print(
            json.dumps({"case": case.name, "wrong": wrong, "seconds": round(time.monotonic() - began, 3)}), flush=True
        )
    faulthandler.cancel_dump_traceback_later()


def run_forms(asked: Sequence[str], bindings: Mapping[str, Any], table: Callable[[str], Table], **more: Any) -> None:
    """The cases of several forms one after the other, in one job, because the import of a framework takes long.

    A form is the name of a binding, or `name/way`: the variable named `variable` is set to `way`, and init reads it.
    """
    variable = more.pop("variable", "")
    for form in asked:
        name, _, way = form.partition("/")
        if way:
            os.environ[variable] = way
        cases = {one: replace(case, name=f"{form}: {case.name}") for one, case in table(name).items()}
        run(bindings[name](), Table(cases), **more)


def check_all(found: dict[str, list[str]], size: int, forms: Sequence[str], least: int) -> None:
    """Asserts that every form had at least `least` cases, and that all of them passed on all ranks."""
    for form in forms:
        assert len([name for name in found if name.startswith(f"{form}: ")]) >= least, (form, list(found))
    for name in found:
        check_case(found, name, size)


def results(program: Path, size: int, *arguments: str) -> dict[str, list[str]]:
    """Runs a job with `program` on every rank. Returns for each case the errors by rank; without error, empty texts."""
    import jobs  # the harness of tests/ranks, which conftest.py puts on the path

    environment = {"PYTHONPATH": f"{jobs.SOURCE}:{program.parent}", "OMP_NUM_THREADS": "1"}
    found: dict[str, list[str]] = {}
    command = [sys.executable, str(program), *arguments]
    with jobs.local.start(command, size, None, environment, stop_on_failure=False) as job:
        code = job.wait(JOB_S)
        for rank in range(size):
            for line in jobs.results(job, rank):
                found.setdefault(line["case"], []).append(line["wrong"])
        assert code == 0, f"exit codes {job.codes} after {list(found)[-1:]}:\n" + "\n".join(
            f"rank {rank}: {job.stderr(rank)[-4000:]}" for rank in range(size)
        )
    return found


def check_case(found: dict[str, list[str]], name: str, size: int) -> None:
    """Asserts that a case ran and passed on all ranks."""
    errors: list[Any] = found.get(name, [])
    assert len(errors) == size, f"run on {len(errors)} of {size} ranks"
    assert not any(errors), "\n".join(f"rank {rank}: {wrong}" for rank, wrong in enumerate(errors) if wrong)
