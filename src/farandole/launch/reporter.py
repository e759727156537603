# What the launcher prints about a job: the output of the ranks, the status line, the root cause, the summary.
# Touches the terminal, and files of --output-filename, --log-dir and --json.
"""`Reporter` is made for one job; `say` prints a line without one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

from farandole.base import hints
from farandole.launch.blame import describe, topic
from farandole.launch.job import Job
from farandole.launch.options import HOROVODS, OURS, Options, Usage
from farandole.launch.output import (
    Files,
    PrefixedLines,
    Raw,
    Sink,
    StatusLine,
    Tails,
    Tee,
    is_error,
    last_line,
    screens,
    time_of_day,
)
from farandole.launch.summary import Account
from farandole.observe.hangs import last_words, mismatch

BACKLOG_OF_COLLATERAL = 16  # the report names so many collateral ranks
TELL_SECONDS = 1.0  # a message is dropped if nobody reads our output for this long


def say(line: str) -> None:
    """Prints a line for the user."""
    tell(f"farandole: {line}\n")


def tell(text: str) -> None:
    """Prints text for the user. Does not wait long if nobody reads it."""
    with contextlib.suppress(OSError):
        screens()[1].write_within(TELL_SECONDS, text.encode(errors="replace"))


class Reporter:
    """Writes the output of the ranks, and the summary at the end."""

    def __init__(self, options: Options, size: int) -> None:
        self._options = options
        self._program = options.program
        self._clock = time_of_day if options.timestamps else lambda: ""
        self._tails = Tails(size)
        self._files: list[Files] = []
        self._job: Job | None = None
        self._ticking = threading.Event()
        self._ticker: threading.Thread | None = None
        self.log_directory: Path | None = None
        sinks: list[Sink] = [self._tails]
        if options.output_filename is not None:
            sinks.append(self._file_sink(Path(options.output_filename), size))
        if options.log_dir is not None:
            self.log_directory = new_folder(Path(options.log_dir))
            sinks.append(self._file_sink(self.log_directory, size))
        targets = screens()
        terminals = [stream.isatty() for stream in targets]
        self._status = StatusLine(targets[1], self._words) if all(terminals) and not options.raw else None
        if options.raw:
            sinks.append(Raw(targets))
        else:
            plain = os.environ.get("NO_COLOR") is not None or os.environ.get("TERM") == "dumb"
            colours = [terminal and not plain for terminal in terminals]
            around = self._status.around if self._status is not None else lambda write: write()
            sinks.append(PrefixedLines(size, targets, colours, self._clock, around, self._name))
        self.sink = Tee(*sinks)

    def say(self, line: str) -> None:
        """Prints a line for the user, with the time if that is asked for."""
        tell(f"{self._clock()}farandole: {line}\n")

    def _name(self, number: int) -> int:
        return self._job.rank_of(number) if self._job is not None else number

    def _file_sink(self, directory: Path, size: int) -> Files:
        try:
            files = Files(directory, size)
        except OSError as error:
            raise Usage(f"cannot write to {directory}: {error.strerror}") from None
        self._files.append(files)
        return files

    def watch(self, job: Job) -> None:
        """Shows the state of the job while it runs."""
        self._job = job
        if self._status is not None:
            self._ticker = threading.Thread(target=self._tick, name="farandole-status", daemon=True)
            self._ticker.start()

    def _tick(self) -> None:
        assert self._status is not None and self._job is not None
        while not self._ticking.wait(1.0):
            # On the thread that writes output, so that nothing else is written at the same moment.
            self._job.call_on_output_thread(self._status.show)

    def _words(self) -> str:
        if self._job is None:  # the first ranks may print while others are being started
            return "farandole: starting"
        return f"farandole: {self._job.status_text()}"

    def close(self) -> None:
        """Removes the status line, so that the output of the job is last on the screen, and closes the files."""
        self._ticking.set()
        if self._ticker is not None:
            self._ticker.join()
        if self._status is not None and not (self._job is not None and self._job.stuck):
            self._status.hide()
        for files in self._files:
            files.close()

    def summary(self, job: Job) -> None:
        """Reports the root cause with its last output, and the collateral ranks; or that the ranks trained alone."""
        if job.failure is None:
            if job.alone:
                what = hints.remedy(job.alone)
                self.say(f"no rank has called init(), so each has trained a model of its own. {what} {hints.OFF}")
            return
        if job.failure[0] < 0:
            if job.reason:
                self.say(job.reason)
            return
        verdict = job.verdict
        if verdict is None:
            return
        host, name = job.host_of(verdict.rank), self._name(verdict.rank)
        last = self._tails.last_words(verdict.rank)
        text = verdict.text
        if len(last) == 1 or (last and (last[0].startswith("Traceback") or is_error(last[-1]))):
            # It is on the screen already, and may be long. A rank that had not called init() could not report it.
            if verdict.text == describe(verdict.code):
                text += f": {last_line(last)}"
        elif last:
            tell("\n".join([f"\n----- rank {name}: last lines -----", *last, "-----\n"]))
        if self._program == HOROVODS:  # programs look for Horovod's text
            self.say("Horovod detected that one or more processes exited with non-zero status; the first was:")
        who = f"rank {name} (process {job.pid_of(verdict.rank)} on {host})"
        self.say(f"{who} failed first: {text} [{topic(verdict)}]")
        if verdict.collateral:
            fallen = sorted(map(self._name, verdict.collateral))
            named = ", ".join(map(str, fallen[:BACKLOG_OF_COLLATERAL]))
            more = " ..." if len(verdict.collateral) > BACKLOG_OF_COLLATERAL else ""
            self.say(f"collateral, because rank {name} was gone: rank {named}{more}")
        alike = sorted(self._name(one.rank) for one in verdict.by_themselves if one.text == verdict.text)
        if alike:
            named = ", ".join(map(str, alike[:BACKLOG_OF_COLLATERAL])) + (" ..." * (len(alike) > BACKLOG_OF_COLLATERAL))
            self.say(f"ended in the same way: rank {named}")
        others = [one for one in verdict.by_themselves if one.text != verdict.text]
        for ending in others[:BACKLOG_OF_COLLATERAL]:
            how = "failed by itself too" if ending.error else "ended too"
            self.say(f"rank {self._name(ending.rank)} {how}: {ending.text}")
        if verdict.code > 128 and (record := job.records.get(verdict.rank)) is not None:
            self.say(f"rank {name} {last_words(record)}")
        if (differs := mismatch(job.records)) is not None:
            self.say(f"{differs.kind}: {differs.text}")
        if job.reason:
            self.say(job.reason)
        if self.log_directory is not None:
            self.say(f"logs are in {self.log_directory}")

    def _other_python(self, job: Job) -> str:
        """The path of the ranks' Python if it is that of another environment and does not find a package; else ""."""
        program = self._options.command[0]
        found = shutil.which(program) if Path(program).name.startswith("python") else None
        if job.verdict is None or found is None or Path(found).parent == Path(sys.executable).parent:
            return ""
        last = self._tails.last_words(job.verdict.rank)
        return found if any("No module named" in line for line in last) else ""

    def account(self, job: Job, code: int, seconds: float) -> None:
        """Says how the job went, in a few lines, and writes the file of --json."""
        found = Account(
            self._options.command,
            self._program,
            code,
            seconds,
            self._options.np,
            job.endings,
            job.deaths,
            job.generations,
            job.verdict if job.failure is not None else None,
            job.reason,
            self._other_python(job),
            self._name,
        )
        # Programs that read Horovod's output expect no more lines than Horovod prints.
        if not self._options.quiet and not self._options.raw and self._program == OURS:
            for line in found.lines():
                self.say(line)
        if self._options.json is not None:
            try:
                Path(self._options.json).write_text(json.dumps(found.data(), indent=1) + "\n")
            except OSError as error:
                self.say(f"cannot write --json {self._options.json}: {error.strerror}")


def new_folder(above: Path) -> Path:
    """Makes a new folder for this run."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        (above / name).mkdir(parents=True)
    except OSError as error:
        raise Usage(f"cannot write to --log-dir {above}: {error.strerror}") from None
    return above / name
