"""Runs named stages one after the other, some beside the others, all of them even if one fails, and ends with a table
and an exit code. Starts commands; knows nothing of what they do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Stage:
    """A title, the command, and whether the stages after it make no sense when it fails. One that runs `beside` the
    next ones takes what they leave of the processors, up to the stage that needs it (`after`)."""

    title: str
    command: Sequence[str | Path]
    needed: bool = False
    environment: dict[str, str] | None = None
    beside: bool = False
    after: bool = False


class Beside:
    """A stage that runs while others do; what it says is shown when it is waited for and has failed."""

    def __init__(self, stage: Stage) -> None:
        idle = ["chrt", "--idle", "0"] if shutil.which("chrt") else ["nice"]
        self.stage, self._began = stage, time.monotonic()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the object)
        command = [*idle, *(str(part) for part in stage.command)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=self._said, stderr=subprocess.STDOUT)

    def result(self) -> tuple[str, str, float]:
        code = self.process.wait()
        if code != 0:
            self._said.seek(0)
            print(self._said.read().decode(errors="replace"), flush=True)
        return self.stage.title, "ok" if code == 0 else f"FAILED ({code})", time.monotonic() - self._began


def run(stages: Sequence[Stage]) -> int:
    """0 when every stage ended well."""
    results: list[tuple[str, str, float]] = []
    beside: list[Beside] = []
    try:
        for number, stage in enumerate(stages, 1):
            print(f"\n[{number}/{len(stages)}] {stage.title}", flush=True)
            if stage.beside:
                beside.append(Beside(stage))
                continue
            if stage.after:
                results += [one.result() for one in beside]
                beside = []
            began = time.monotonic()
            environment = {**os.environ, **(stage.environment or {})}
            code = subprocess.run([str(part) for part in stage.command], cwd=ROOT, env=environment).returncode
            results.append((stage.title, "ok" if code == 0 else f"FAILED ({code})", time.monotonic() - began))
            if code != 0 and stage.needed:
                break
    finally:
        for one in beside:
            one.process.kill()
            one.process.wait()
    print("\nsummary")
    width = max(len(stage.title) for stage in stages)
    for title, verdict, seconds in results:
        print(f"  {title:<{width}}  {seconds:6.0f} s  {verdict}")
    done = {title for title, _, _ in results}
    for stage in stages:
        if stage.title in done:
            continue
        print(f"  {stage.title:<{width}}         -  not run")
    good = len(results) == len(stages) and all(verdict == "ok" for _, verdict, _ in results)
    print("all is well" if good else "something failed: see above", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit("a module of the other scripts")
