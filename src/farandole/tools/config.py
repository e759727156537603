# `farandole config`: asks where and how a job runs, tests the answers, and writes the file for `run --config-file`.
# Touches the terminal, what doctor.py touches, and the file.
"""Each question has a default; a wrong answer is asked again. `ask` of `Answers` is `input` of Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from farandole.launch import hosts as host_lists
from farandole.launch.hosts import Host
from farandole.launch.machine import usable_cores
from farandole.tools import doctor
from farandole.tools.checks import UNFIT

USAGE = """usage: farandole config [FILE]

Asks on which hosts a job runs, with how many ranks, how they are started, and whether the job goes on when ranks die.
Tests the answers as `farandole doctor` does, and writes FILE (farandole.yaml) for `farandole run --config-file FILE`.
"""
HEAD = """# Written by `farandole config`. Flags of `farandole run` win over it. docs/settings.md has more settings.
"""
EXAMPLE = """job:
  np: 4
  hosts: host1:2,host2:2
"""
SLURM = """
SLURM starts the ranks itself, so no file is needed. In a job script, or inside of salloc:

  srun --ntasks=4 python train.py

docs/clusters.md says more, also for mpirun, torchrun and Kubernetes.
"""
LAUNCHERS = {"farandole": "its own agents, over ssh to other hosts", "mpirun": "Open MPI, MPICH", "slurm": "srun"}


@dataclass
class Job:
    """The answers."""

    hosts: list[Host]  # empty: this host
    hosts_text: str
    np: int
    launcher: str
    min_np: int | None

    def text(self) -> str:
        """The file."""
        job: dict[str, object] = {"np": self.np}
        if self.hosts:
            job["hosts"] = self.hosts_text
        if self.min_np is not None:
            job["min_np"] = self.min_np
        content: dict[str, object] = {"job": job}
        if self.launcher == "mpirun":
            content["controller"] = "mpi"
        return HEAD + str(yaml.safe_dump(content, sort_keys=False))


class Answers:
    """Asks the questions."""

    def __init__(self, ask: Callable[[str], str]) -> None:
        self._ask = ask

    def one(self, question: str, default: str, wrong: Callable[[str], str]) -> str:
        """An answer for which `wrong` returns ""; an empty answer is the default."""
        while True:
            answer = self._ask(f"{question} [{default}] ").strip() or default
            problem = wrong(answer)
            if not problem:
                return answer
            print(f"  {problem}")

    def yes(self, question: str, default: str = "no") -> bool:
        """Whether the answer is yes."""
        known = ("yes", "no", "y", "n")
        return (
            self.one(question, default, lambda one: "" if one.lower() in known else "answer yes or no")[0].lower()
            == "y"
        )

    def number(self, question: str, default: int, most: int, why: str) -> int:
        """A whole number from 1 to `most`."""

        def wrong(answer: str) -> str:
            fits = answer.isascii() and answer.isdigit() and 1 <= int(answer) <= most
            return "" if fits else f"expected a number from 1 to {most}{why}"

        return int(self.one(question, str(default), wrong))

    def job(self) -> Job:
        """All answers about the job."""
        here = "this machine"
        print("An empty answer takes what stands in [brackets].\n")
        text = self.one("Which hosts, with how many ranks on each? As in host1:4,host2:4", here, _wrong_hosts)
        hosts = [] if text == here else host_lists.parse(text)
        slots = sum(host.slots for host in hosts)
        most = slots or host_lists.MAX_SLOTS
        why = ", because the hosts have so many slots" if slots else ""
        np = self.number("How many ranks?", slots or usable_cores(), most, why)
        print("  " + "; ".join(f"{name}: {about}" for name, about in LAUNCHERS.items()))
        launcher = self.one(
            "What starts them?",
            "farandole",
            lambda one: "" if one in LAUNCHERS else f"expected one of {', '.join(LAUNCHERS)}",
        )
        min_np = None
        if launcher == "farandole" and np > 1 and self.yes("Shall the job go on when ranks die (elastic)?"):
            min_np = self.number("With how many ranks at least?", max(1, np // 2), np, ", the number of ranks")
        return Job(hosts, text, np, launcher, min_np)


def _wrong_hosts(text: str) -> str:
    if text == "this machine":
        return ""
    try:
        host_lists.parse(text)
    except ValueError as error:
        return str(error)
    return ""


def fit(job: Job) -> bool:
    """Tests this host and the others. Prints what is not ok, with the remedy."""
    print("\ntesting the answers, as `farandole doctor` does")
    words = ["-H", ",".join(host.name for host in job.hosts)] if job.hosts else []
    count, unfit = 0, []
    for check in doctor.examine(words):
        count += 1
        if check.remedy:
            doctor.show(check)
        if check.state == UNFIT:
            unfit.append(check.name)
    print(f"unfit: {', '.join(unfit)}" if unfit else f"{count} tests passed")
    return not unfit


def converse(answers: Answers, path: Path) -> int:
    """Asks, tests and writes. Returns the exit code."""
    job = answers.job()
    if job.launcher == "slurm":
        print(SLURM, end="")
        return 0
    if not fit(job) and not answers.yes("Write the file nevertheless?"):
        print("nothing was written")
        return 1
    if path.exists() and not answers.yes(f"{path} exists. Replace it?"):
        print("nothing was written")
        return 1
    path.write_text(job.text())
    print(f"\nwrote {path}:\n\n{job.text()}\n  farandole run --config-file {path} python train.py")
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command."""
    given = list(sys.argv[1:] if words is None else words)
    if given in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    if len(given) > 1 or any(word.startswith("-") for word in given):
        print(f"farandole config: expected at most the name of a file\n{USAGE}", end="", file=sys.stderr)
        return 2
    path = Path(given[0] if given else "farandole.yaml")
    if not os.access(path.parent, os.W_OK):
        print(f"farandole config: cannot write to the folder {path.parent}", file=sys.stderr)
        return 2
    if not sys.stdin.isatty():
        print(
            "farandole config: it asks questions, but the standard input is no terminal. Write the file yourself:\n\n"
            f"{EXAMPLE}",
            file=sys.stderr,
        )
        return 2
    try:
        return converse(Answers(input), path)
    except (EOFError, KeyboardInterrupt):
        print("\nnothing was written")
        return 130
    except OSError as error:
        print(f"farandole config: cannot write {path}: {error.strerror}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
