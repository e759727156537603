# The bar of farandole.tools.progress: what a terminal shows, what a log has, and what is left at the end.
# Uses a pseudo-terminal, and runs a check.
from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

from farandole.tools.progress import Progress

ROOT = Path(__file__).resolve().parents[2]


def test_a_log_gets_lines_and_no_bar() -> None:
    log, asked = io.StringIO(), threading.Event()

    def state() -> tuple[float, str]:
        asked.set()
        return 0.25, "file 1 of 4"

    with Progress("build", state, log, log_seconds=0.01) as progress:
        assert asked.wait(10)
        progress.say("a warning")
    lines = log.getvalue().splitlines()
    assert lines[0] == "build: 25 %, 0 s, file 1 of 4" and "a warning" in lines and "\x1b" not in log.getvalue()


def test_something_short_leaves_no_line_in_a_log() -> None:
    log = io.StringIO()
    with Progress("build", lambda: (None, ""), log):
        pass
    assert log.getvalue() == ""


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end() -> None:
    ours, theirs = pty.openpty()
    drawn = threading.Event()

    def state() -> tuple[float, str]:
        if shown:
            drawn.set()
        shown.append(1)
        return 0.5, "9 steps"

    shown: list[int] = []
    with os.fdopen(theirs, "w") as terminal:
        with Progress("check", state, terminal):
            assert drawn.wait(10)  # it was drawn before and is drawn again
        text = ""
        while text.count("9 steps") < 2 or not text.endswith("\r\x1b[K"):
            text += os.read(ours, 65536).decode()
    os.close(ours)
    assert "check [############............]  50 %" in text and "9 steps" in text
    assert re.sub(r"\r\x1b\[K[^\r]*", "", text) == ""


def test_it_needs_nothing_but_python() -> None:
    """The scripts that install everything else show it."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); import farandole.tools.progress; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-S", "-I", "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "yaml", "cloudpickle"} & set(done.stdout.split())
