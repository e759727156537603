# How a job that runs is asked what its ranks do: SIGQUIT to its launcher, `farandole why` and `farandole stacks`.
# Touches a folder of the user, and signals.
"""A launcher has a folder that only its user can read, named after its process. `ask` sends it SIGURG, which every
other process ignores, and waits for the answer's file there. No port is open for this."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from farandole.launch import spawn, survive
from farandole.launch.job import Job
from farandole.launch.spawn import has_ended
from farandole.observe.report import Report

ASK = signal.SIGURG
SHOW = signal.SIGQUIT
ANSWER_SECONDS = 10.0
CHECK_SECONDS = 0.02
SHOWN_COMMAND = 60  # letters
QUESTIONS = ("why", "stacks")


@contextlib.contextmanager
def open_to_questions(job: Job, command: Sequence[str], tell: Callable[[str], None]) -> Iterator[None]:
    """Until the end of the block the job answers. The main thread must call it."""

    def show(report: Report) -> None:
        tell(f"\n{report.why()}\n{report.stacks()}\n")

    def answer(report: Report) -> None:
        if folder is not None:
            for question in QUESTIONS:
                with contextlib.suppress(OSError):
                    survive.put(folder / question, getattr(report, question)())

    folder = _make_folder(command)
    acts = {SHOW: show, ASK: answer}
    before = {
        number: signal.signal(number, lambda *_, act=act: job.examine(act))
        for number, act in acts.items()
        if signal.getsignal(number) is not signal.SIG_IGN or number == ASK
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # the last job leaves nothing; other jobs have folders there
                folder.parent.rmdir()
                folder.parent.parent.rmdir()


def ask(question: str, words: Sequence[str], say: Callable[[str], None]) -> int:
    """`farandole why [JOB]` and `farandole stacks [JOB]`. Returns the exit code."""
    if words and words[0] in ("-h", "--help"):
        print(f"usage: farandole {question} [JOB | --list]     (JOB: the process of its launcher; none: the only one)")
        return 0
    jobs = _jobs()
    if list(words) == ["--list"]:
        for pid, about in jobs.items():
            print(f"{pid}  {' '.join(about['command'])[:SHOWN_COMMAND]}")
        return 0
    if words:
        chosen = [pid for pid in jobs if str(pid) == words[0]]
    else:
        chosen = list(jobs) if len(jobs) == 1 else []
    if not chosen:
        known = ", ".join(map(str, jobs)) or "none"
        what = f"there is no job {words[0]} of yours on this host" if words else "which job?"
        say(f"{what}; name the process of a launcher (running: {known}): farandole {question} PROCESS")
        return 2
    folder = _folder() / str(chosen[0])
    for name in QUESTIONS:
        (folder / name).unlink(missing_ok=True)
    spawn.signal_process(chosen[0], ASK)
    deadline = time.monotonic() + ANSWER_SECONDS
    while not (folder / question).exists():
        if time.monotonic() > deadline or not folder.exists():
            say(f"the launcher {chosen[0]} does not answer" if folder.exists() else "the job has ended")
            return 1
        time.sleep(CHECK_SECONDS)
    print((folder / question).read_text(), end="")
    return 0


def _folder() -> Path:
    return survive.state_folder("running")


def _make_folder(command: Sequence[str]) -> Path | None:
    for _ in range(3):  # a job that ends may remove the empty folder above
        with contextlib.suppress(OSError):  # or a home that cannot be written
            folder = _folder() / str(os.getpid())
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier process with this number
            folder.mkdir(mode=0o700)
            survive.put(folder / "job", json.dumps({"command": list(command)}))
            return folder
    return None


def _jobs() -> dict[int, dict[str, Any]]:
    """The jobs that run, with their commands."""
    found = {}
    with contextlib.suppress(OSError):
        for path in sorted(_folder().iterdir()):
            if not path.name.isdecimal() or has_ended(int(path.name)):
                shutil.rmtree(path, ignore_errors=True)
                continue
            with contextlib.suppress(OSError, ValueError):
                found[int(path.name)] = json.loads((path / "job").read_text())
    return found
