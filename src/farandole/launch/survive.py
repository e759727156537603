# Jobs that continue without their terminal: a process in the background runs the job; the command shows its output.
# Touches a folder of the user, and processes through spawn.py.
"""`--survive-launcher`: `begin(run)` starts the runner and shows its output; `attach(name)` shows it again later.

Each job has a folder that only its user can read. It contains `runner` (the process id), `stdout`, `stderr`, and at the
end `exit`. The process that shows a job may end at any time. If the runner ends, the job ends, as with any launcher.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from farandole.launch import spawn

CHECK_SECONDS = 0.05
KEEP_SECONDS = 86400.0  # after this time the folder of an ended job is removed, even if nobody has seen its output
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)  # without SIGHUP, which must not end the job
LOST = 1


def state_folder(name: str) -> Path:
    """A folder for files of this user that outlive a process. Other users cannot look into it."""
    ours = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "farandole"
    ours.parent.mkdir(parents=True, exist_ok=True)
    for path in (ours, ours / name):
        path.mkdir(mode=0o700, exist_ok=True)
    return ours / name


def jobs_folder() -> Path:
    """The folder that contains the folders of jobs."""
    return state_folder("jobs")


def begin(run: Callable[[], int], say: Callable[[str], None]) -> int:
    """Starts a runner for the job and shows the job. Returns the exit code."""
    _sweep()
    folder = jobs_folder() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(mode=0o700)
    spawn.detach(lambda: _run_detached(folder, run))
    deadline = time.monotonic() + 10
    while not (folder / "runner").exists():
        if time.monotonic() > deadline:
            say("the runner of the job did not start")
            return LOST
        time.sleep(CHECK_SECONDS)
    say(f"the job goes on without this process: `farandole attach {folder.name}` shows it again")
    return show(folder, say)


def attach(words: list[str], say: Callable[[str], None]) -> int:
    """`farandole attach [NAME]`: shows a job again. Returns the exit code of the job."""
    jobs = sorted(path for path in jobs_folder().iterdir() if (path / "runner").exists())
    if words and words[0] in ("-h", "--help"):
        print("usage: farandole attach [NAME | --list]     (the newest job when there is no name)")
        return 0
    if words == ["--list"]:
        for path in jobs:
            state = f"ended with {_code(path)}" if _code(path) is not None else "runs" if _alive(path) else "lost"
            print(f"{path.name}  {state}")
        return 0
    chosen = [path for path in jobs if path.name == words[0]] if words else jobs[-1:]
    if not chosen:
        say(f"there is no job {words[0]}; see `farandole attach --list`" if words else "there is no job to attach to")
        return 2
    return show(chosen[0], say)


def show(folder: Path, say: Callable[[str], None]) -> int:
    """Shows all output of the job until it ends."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(folder / name, "rb", buffering=0)) for name in ("stdout", "stderr")]
        stack.enter_context(_signals_to(int((folder / "runner").read_text())))
        while True:
            code, gone = _code(folder), not _alive(folder)
            moved = False
            for number, file in enumerate(files, 1):
                while data := file.read(1 << 16):
                    moved = True
                    _write(number, data)
            if code is None and gone:
                code = _code(folder)  # the runner may have written it after we looked
                if code is None and not moved:
                    say("the runner of the job has died, and the job with it")
                    shutil.rmtree(folder, ignore_errors=True)
                    return LOST
            elif code is not None and not moved:
                shutil.rmtree(folder, ignore_errors=True)
                return code
            if not moved:
                time.sleep(CHECK_SECONDS)


def _run_detached(folder: Path, run: Callable[[], int]) -> int:
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    spawn.become("farandole-job")
    put(folder / "runner", str(os.getpid()))
    code = LOST
    try:
        code = run()
    finally:
        put(folder / "exit", str(code))
    return code


def put(path: Path, text: str) -> None:
    """Writes a file that is there as a whole or not at all."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def _code(folder: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "exit").read_text())
    return None


def _alive(folder: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        pid = int((folder / "runner").read_text())
        return Path(f"/proc/{pid}/comm").read_text().strip() == "farandole-job"
    return False


def _write(number: int, data: bytes) -> None:
    view = memoryview(data)
    with contextlib.suppress(BrokenPipeError):
        while view:
            view = view[os.write(number, view) :]


@contextlib.contextmanager
def _signals_to(runner: int) -> Iterator[None]:
    def pass_on(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(runner, number)

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _sweep() -> None:
    for path in jobs_folder().iterdir():
        with contextlib.suppress(OSError):
            if not _alive(path) and time.time() - path.stat().st_mtime > KEEP_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
