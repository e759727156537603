# The command line of `farandole check`: starts the ranks, waits, prints the findings.
# Touches launch/, a temporary folder.
"""usage: farandole check [-np N] [--steps N] [--seconds S] [--verbose] [--json FILE] train.py [-- ARGUMENTS...]"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from farandole.launch import local, missing
from farandole.launch.agent_connection import StartError, package_place
from farandole.tools import trace
from farandole.tools.check.judge import NOTE, UNSEEN, WRONG, Finding, findings
from farandole.tools.check.report import WHOLE_PASSES, steps_file
from farandole.tools.progress import Progress

START_SECONDS = 60.0  # more than the script's own time, for the start and the end of the ranks
LAST_LINES = 30  # of a rank that failed
ENVIRONMENT = {"FARANDOLE_HINTS": "0"}  # the check says it itself


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options; the words of the script are those after `--`."""
    words = list(words)
    at = words.index("--") if "--" in words else len(words)
    words, arguments = words[:at], words[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="farandole check",
        description="Runs a few steps of a training script on several ranks and reports mistakes, each with the line "
        "of the script and the remedy. Files of torch.save go to a temporary folder; other files are written.",
        epilog="example: farandole check train.py -np 2 -- --epochs 3",
    )
    parser.add_argument("script", nargs="+", help="the script; its own arguments stand behind --")
    parser.add_argument("-np", type=int, default=2, metavar="N", help="ranks, all on this host (2)")
    parser.add_argument(
        "--steps", type=int, default=10, metavar="N", help="batches of the first two passes; later ones have one (10)"
    )
    parser.add_argument("--seconds", type=float, default=120, metavar="S", help="time limit for the script (120)")
    parser.add_argument("--verbose", action="store_true", help="show what the script prints")
    parser.add_argument("--json", metavar="FILE", help="write the findings to a file too")
    options, unknown = parser.parse_known_args(words)
    script = options.script
    if len(script) > 1 and Path(script[0]).name.startswith("python"):
        script = script[1:]
    if unknown or len(script) > 1:
        own = " ".join([*script[1:], *unknown, *arguments])
        parser.error(f"the script's own arguments stand behind --: farandole check {script[0]} -- {own}")
    if not Path(script[0]).is_file():
        parser.error(missing.no_file(script[0]))
    if not script[0].endswith(".py"):
        parser.error(f"{script[0]}: expected a Python script")
    if options.np < 2 or options.steps < 3:
        parser.error("expected at least 2 ranks and 3 steps")
    options.script, options.arguments = script[0], arguments
    return options


def reports(options: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Runs the ranks. Returns their reports and what they wrote to stderr."""
    code = "from farandole.tools.check.rank import main; main()"
    code = f"import sys; sys.path.insert(0, {package_place()!r}); {code}"
    arguments = [str(folder), str(options.steps), str(options.seconds), options.script, *options.arguments]
    output = "marked" if options.verbose else "kept"
    command = [sys.executable, "-c", code, *arguments]
    with local.start(command, options.np, env=ENVIRONMENT, output=output) as job:
        with contextlib.nullcontext() if options.verbose else Progress("check", lambda: steps_made(options, folder)):
            try:
                job.wait(options.seconds + START_SECONDS)
            except TimeoutError:
                job.stop()
                job.wait(START_SECONDS)
        printed = ["" if options.verbose else job.stderr(rank) for rank in range(options.np)]
    found = [folder / f"rank.{rank}.json" for rank in range(options.np)]
    return [
        json.loads(path.read_text()) if path.exists() else _silent(rank) for rank, path in enumerate(found)
    ], printed


def steps_made(options: argparse.Namespace, folder: Path) -> tuple[float | None, str]:
    """How far the slowest rank is."""
    files = [steps_file(folder, rank) for rank in range(options.np)]
    done = min(path.stat().st_size if path.exists() else 0 for path in files)
    if not done:
        return None, f"the script runs; it has at most {options.seconds:g} s"
    return min(0.99, done / (WHOLE_PASSES * options.steps)), f"{done} step{'s' if done > 1 else ''}"


def _silent(rank: int) -> dict[str, Any]:
    return {"rank": rank, "ended": "error", "error": "it ended without a report", "line": ""}


def speed(found: list[dict[str, Any]]) -> str:
    """How long a step takes, and with what; "" if too few steps were seen."""
    own = found[0].get("torch") or found[0].get("keras") or {}
    times = own.get("step_seconds", [])
    if not times:
        return ""
    text = f"{1e3 * statistics.median(times):.1f} ms per step (median of {len(times)})"
    if "timeline" not in own:
        return text
    try:
        spent = trace.summarise(trace.read(own["timeline"]))
    except trace.BrokenTrace:
        return text
    if not spent.waiting + spent.moving:
        return text
    parts = (("computing", spent.computing), ("waiting for other ranks", spent.waiting), ("moving data", spent.moving))
    return f"{text}: " + ", ".join(f"{name} {100 * part / (spent.span or 1):.0f} %" for name, part in parts)


def show(found: Sequence[Finding], time: str) -> str:
    """The findings as text, with those that are wrong at the end, where people look first."""
    lines = []
    for one in found:
        where = f" ({one.line})" if one.line else ""
        lines.append(f"{one.state:<6} {one.about:<11} {one.text}{where}")
        if one.remedy and one.state in (NOTE, WRONG):
            lines.append(f"{'':<18} remedy: {one.remedy}")
    if time:
        lines.append(f"{'time':<18} {time}")
    wrong, notes, unseen = (sum(one.state == state for one in found) for state in (WRONG, NOTE, UNSEEN))
    lines.append("")
    lines.append(f"{wrong} wrong, {notes} to think about, {unseen} not seen. docs/check.md says what each line means.")
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 1 if something is wrong, 2 for a wrong command line, 3 if the script fails."""
    options = parse(sys.argv[1:] if words is None else words)
    print(
        f"check: {options.script} on {options.np} ranks, two passes of {options.steps} batches, then short ones",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="farandole-check-") as folder:
        try:
            found, printed = reports(options, Path(os.path.realpath(folder)))
        except StartError as error:
            print(f"farandole check: {error}", file=sys.stderr)
            return 3
        failed = [one for one in found if one["ended"] == "error"]
        if failed:
            first = next((one for one in failed if not one.get("collateral")), failed[0])
            sys.stderr.write("".join(line + "\n" for line in printed[first["rank"]].splitlines()[-LAST_LINES:]))
            where = f" ({first['line']})" if first["line"] else ""
            print(f"farandole check: rank {first['rank']} failed: {first['error']}{where}", file=sys.stderr)
            return 3
        judged = list(findings(found))
        print(show(judged, speed(found)), end="", flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps([asdict(one) for one in judged], indent=1) + "\n")
    return int(any(one.state == WRONG for one in judged))
