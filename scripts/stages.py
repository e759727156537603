"""Runs stages one after the other, and some in the background; runs all of them even if one fails; prints a table.
Starts commands; does not depend on what they do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def chosen(script: str, kind: str, known: Sequence[str]) -> Sequence[str]:
    """The names on the command line, or all that there are. Ends the script if a name is unknown."""
    names = sys.argv[1:] or known
    if unknown := [name for name in names if name not in known]:
        print(f"{script}: no such {kind}: {', '.join(unknown)} (known: {' | '.join(known)})", file=sys.stderr)
        sys.exit(2)
    return names


@dataclass(frozen=True)
class Stage:
    """`needed`: if this stage fails, the next ones do not run. `background`: it runs while other stages run, one
    background stage at a time. `after`: it waits for the background stage of this title, if there is one."""

    title: str
    command: Sequence[str | Path]
    needed: bool = False
    environment: dict[str, str] | None = None
    background: bool = False
    after: str = ""


@dataclass(frozen=True)
class Result:
    """How a stage ended, and the processor time of all its processes."""

    title: str
    code: int
    seconds: float
    processors: float

    @property
    def verdict(self) -> str:
        return "ok" if self.code == 0 else f"FAILED ({self.code})"


def finished(title: str, process: subprocess.Popen[bytes], began: float) -> Result:
    """Waits for the process of a stage."""
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:  # for example Ctrl-C
        process.kill()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    return Result(title, process.returncode, time.monotonic() - began, usage.ru_utime + usage.ru_stime)


class Background:
    """Runs background stages. The output of a stage is shown only if it fails."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self._waiting: list[Stage] = []
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._running: subprocess.Popen[bytes] | None = None
        self._title = ""  # of the running stage
        self._stopped = False

    def add(self, stage: Stage) -> None:
        """Adds a stage after the earlier ones."""
        with self._lock:
            self._waiting.append(stage)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work)
                self._thread.start()

    def wait_for(self, title: str) -> None:
        """Waits until the stage of this title has ended; returns at once if there is none."""
        with self._ended:
            self._ended.wait_for(lambda: title not in [self._title, *(stage.title for stage in self._waiting)])

    def wait(self) -> None:
        """Waits until all of them have ended."""
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """Ends the running stage with all its processes."""
        with self._lock:
            self._stopped, self._waiting = True, []
            if self._running is not None:
                os.killpg(self._running.pid, signal.SIGKILL)
        self.wait()

    def _work(self) -> None:
        idle = ["chrt", "--idle", "0"] if shutil.which("chrt") else ["nice"]
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                stage = self._waiting.pop(0)
                self._title = stage.title
                began = time.monotonic()
                output = tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
                self._running = subprocess.Popen(
                    [*idle, *(str(part) for part in stage.command)],
                    cwd=ROOT,
                    env={**os.environ, **(stage.environment or {})},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            result = finished(stage.title, self._running, began)
            with self._lock:
                self._running, self._title = None, ""
                self._ended.notify_all()
                if result.code != 0 and not self._stopped:
                    output.seek(0)
                    print(f"\n{stage.title}:\n{output.read().decode(errors='replace')}", flush=True)
                self.results.append(result)
            output.close()


def run(stages: Sequence[Stage]) -> int:
    """Runs the stages. Returns 0 if no stage failed."""
    results: list[Result] = []
    background = Background()
    for ending in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C, so that background stages end too
        signal.signal(ending, lambda *_: sys.exit(1))
    began_all = time.monotonic()
    try:
        for number, stage in enumerate(stages, 1):
            print(
                f"\n[{number}/{len(stages)}] {stage.title}{' (runs while the next stages run)' * stage.background}",
                flush=True,
            )
            if stage.background:
                background.add(stage)
                continue
            if stage.after:
                background.wait_for(stage.after)
            began = time.monotonic()
            environment = {**os.environ, **(stage.environment or {})}
            try:
                process = subprocess.Popen([str(part) for part in stage.command], cwd=ROOT, env=environment)
            except FileNotFoundError as error:  # an earlier stage could not make this environment
                print(error, flush=True)
                results.append(Result(stage.title, 127, 0.0, 0.0))
            else:
                results.append(finished(stage.title, process, began))
            if results[-1].code != 0 and stage.needed:
                break
        else:
            background.wait()
    finally:
        background.stop()
    return report(stages, results + background.results, time.monotonic() - began_all)


def report(stages: Sequence[Stage], results: Sequence[Result], seconds: float) -> int:
    """Prints the table. Returns the exit code."""
    print("\nsummary")
    width = max(len(stage.title) for stage in stages)
    found = {result.title: result for result in results}
    for stage in stages:
        result = found.get(stage.title)
        if result is None:
            print(f"  {stage.title:<{width}}       -    not run")
        else:
            print(f"  {stage.title:<{width}}  {result.seconds:6.0f} s {result.processors:6.0f} s  {result.verdict}")
    processors = sum(result.processors for result in results)
    print(f"  {'together':<{width}}  {seconds:6.0f} s {processors:6.0f} s of processors")
    good = len(found) == len(stages) and all(result.code == 0 for result in results)
    print("all is well" if good else "something failed: see above", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit("a module of the other scripts")
