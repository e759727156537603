"""Runs named stages one after the other, all of them even if one fails, and ends with a table and an exit code.
Starts commands; knows nothing of what they do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Stage:
    """A title, the command, and whether the stages after it make no sense when it fails."""

    title: str
    command: Sequence[str | Path]
    needed: bool = False
    environment: dict[str, str] | None = None


def run(stages: Sequence[Stage]) -> int:
    """0 when every stage ended well."""
    results: list[tuple[str, str, float]] = []
    for number, stage in enumerate(stages, 1):
        print(f"\n[{number}/{len(stages)}] {stage.title}", flush=True)
        began = time.monotonic()
        environment = {**os.environ, **(stage.environment or {})}
        code = subprocess.run([str(part) for part in stage.command], cwd=ROOT, env=environment).returncode
        results.append((stage.title, "ok" if code == 0 else f"FAILED ({code})", time.monotonic() - began))
        if code != 0 and stage.needed:
            break
    print("\nsummary")
    width = max(len(stage.title) for stage in stages)
    for title, verdict, seconds in results:
        print(f"  {title:<{width}}  {seconds:6.0f} s  {verdict}")
    for stage in stages[len(results) :]:
        print(f"  {stage.title:<{width}}         -  not run")
    good = len(results) == len(stages) and all(verdict == "ok" for _, verdict, _ in results)
    print("all is well" if good else "something failed: see above", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit("a module of the other scripts")
