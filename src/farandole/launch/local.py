# A job on this host: starts N ranks, runs their hub, watches them, ends them together.
# Touches spawn, the hub, a private directory and the environment that workers inherit.
"""`start(command, np)` gives a `Job`.

>>> import sys
>>> with start([sys.executable, "-c", "print('hello')"], np=2) as job:
...     job.wait(), job.stdout(0), job.stdout(1)
(0, 'hello\\n', 'hello\\n')
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from farandole.launch import spawn
from farandole.launch.output import Kept, Marked
from farandole.launch.slots import places
from farandole.rendezvous import sockets
from farandole.rendezvous.hub import Hub
from farandole.rendezvous.secret import Secret
from farandole.version import package_version

GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
DRAIN_SECONDS = 1.0  # for output of a job whose processes have all ended
REAP_SECONDS = 0.05  # where the kernel does not tell of an end
OUTPUTS = ("kept", "marked", "raw")


class Job:
    """A running job. Use it as a context manager: leaving the block kills what still runs and cleans up."""

    def __init__(
        self, command: Sequence[str], hosts: Sequence[str], env: Mapping[str, str], output: str, stop_on_failure: bool
    ) -> None:
        self._output = output
        self._stop_on_failure = stop_on_failure
        self._over = threading.Event()
        self._kill_at: float | None = None
        self._stopped = False
        self._bell_reader, self._bell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread: threading.Thread | None = None
        self._workers: list[spawn.Worker] = []
        self._streams: list[tuple[Kept | Marked, Kept | Marked]] = []
        self._directory = sockets.private_directory()
        self.size = len(hosts)
        self.codes: list[int | None] = [None] * self.size
        self.failure: tuple[int, int] | None = None  # the first rank that failed, and its exit code
        self._hub: Hub | None = None
        try:
            self._start(command, hosts, env)
        except BaseException:
            self.close()
            raise

    def _start(self, command: Sequence[str], hosts: Sequence[str], env: Mapping[str, str]) -> None:
        secret = Secret.create()
        # It listens before the first rank is started; its thread begins after the last, so that no fork meets a thread.
        self._hub = Hub(secret, self.size, f"unix:{self._directory}/hub", package_version())
        secret_fd = secret.to_descriptor()
        try:
            for place in places(hosts):
                environment = {**env, **place.environment(), "PYTHONUNBUFFERED": "1"}
                environment["FARANDOLE_RENDEZVOUS"] = self._hub.address
                environment["FARANDOLE_SECRET_FD"] = str(secret_fd)
                self._workers.append(spawn.start(command, environment, [secret_fd], self._output != "raw"))
                self._streams.append(self._make_streams(place.rank))
        finally:
            os.close(secret_fd)
        self._hub.start()
        self._thread = threading.Thread(target=self._watch, name="farandole-job", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        return [worker.pid for worker in self._workers]

    @property
    def refused(self) -> int:
        """How many strangers the hub has turned away."""
        return self._hub.refused if self._hub is not None else 0

    def stdout(self, rank: int) -> str:
        """What a rank has printed so far (output="kept")."""
        return self._text(rank, 0)

    def stderr(self, rank: int) -> str:
        """What a rank has printed to its standard error so far (output="kept")."""
        return self._text(rank, 1)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of every rank: the exit code of the first that failed, or 0. TimeoutError if late."""
        if not self._over.wait(timeout):
            running = [rank for rank, code in enumerate(self.codes) if code is None]
            raise TimeoutError(f"after {timeout} s these ranks still run: {running}")
        return self.failure[1] if self.failure is not None else 0

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to one rank."""
        self._workers[rank].send(number)

    def stop(self, grace: float = GRACE_SECONDS) -> None:
        """Asks all ranks to end (SIGTERM) and kills those that have not after `grace` seconds. Does not wait."""
        self._stopped = True
        for worker in self._workers:
            worker.send_all(signal.SIGTERM if grace > 0 else signal.SIGKILL)
        self._kill_at = time.monotonic() + grace
        with contextlib.suppress(OSError):
            os.write(self._bell, b"x")

    def close(self) -> None:
        """Kills what still runs, reaps it, and removes every trace. Calling it again does nothing."""
        if self._bell < 0:
            return
        self.stop(grace=0)
        if self._thread is not None:
            self._thread.join()
        else:
            self._reap_unwatched()
        if self._hub is not None:
            self._hub.close()
        for worker in self._workers:
            worker.close()
        os.close(self._bell)
        os.close(self._bell_reader)
        self._bell = -1
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_streams(self, rank: int) -> tuple[Kept | Marked, Kept | Marked]:
        if self._output == "marked":
            return Marked(rank, "stdout", sys.stdout.buffer), Marked(rank, "stderr", sys.stderr.buffer)
        return Kept(), Kept()

    def _text(self, rank: int, which: int) -> str:
        stream = self._streams[rank][which]
        if not isinstance(stream, Kept):
            raise ValueError(f'the output of this job is {self._output}, not "kept"')
        return stream.text()

    def _reap_unwatched(self) -> None:
        for worker in self._workers:
            while worker.reap() is None:
                time.sleep(0.001)

    # What follows runs on the job's thread.

    def _watch(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                self._register(selector)
                while None in self.codes:
                    self._turn(selector, self._patience())
                    if self._kill_at is not None and time.monotonic() >= self._kill_at:
                        self._kill_at = None
                        for worker in self._workers:
                            worker.send_all(signal.SIGKILL)
                self._drain(selector)
        finally:
            self._over.set()

    def _register(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._bell_reader, selectors.EVENT_READ, None)
        for rank, worker in enumerate(self._workers):
            if worker.pidfd is not None:
                selector.register(worker.pidfd, selectors.EVENT_READ, rank)
            for pipe, stream in zip((worker.stdout, worker.stderr), self._streams[rank], strict=True):
                if pipe is not None:
                    selector.register(pipe, selectors.EVENT_READ, stream)

    def _patience(self) -> float | None:
        waits = [REAP_SECONDS] if any(worker.pidfd is None for worker in self._workers) else []
        if self._kill_at is not None:
            waits.append(max(0.0, self._kill_at - time.monotonic()))
        return min(waits) if waits else None

    def _turn(self, selector: selectors.BaseSelector, timeout: float | None) -> bool:
        """One round of events; False when there were none."""
        events = selector.select(timeout)
        for key, _ in events:
            if isinstance(key.data, Kept | Marked):
                self._read(selector, key.fd, key.data)
            elif key.data is None:
                os.read(self._bell_reader, 4096)
            else:
                selector.unregister(key.fd)
                self._check(key.data)
        for rank, worker in enumerate(self._workers):
            if worker.pidfd is None:
                self._check(rank)
        return bool(events)

    def _read(self, selector: selectors.BaseSelector, fd: int, stream: Kept | Marked) -> None:
        data = os.read(fd, 65536)
        if not data:
            selector.unregister(fd)
        try:
            stream.feed(data)
        except (OSError, ValueError):  # nobody reads our output any more: end as a pipeline does
            self._fail(-1, 128 + signal.SIGPIPE)
            self.stop()

    def _check(self, rank: int) -> None:
        if self.codes[rank] is not None:
            return
        code = self._workers[rank].reap()
        if code is None:
            return
        self.codes[rank] = code
        assert self._hub is not None
        self._hub.absent(rank, f"has ended ({describe(code)})")
        if code != 0:
            self._fail(rank, code)

    def _fail(self, rank: int, code: int) -> None:
        if self.failure is None and not self._stopped:  # whoever dies because we asked for it is not to blame
            self.failure = (rank, code)
            if self._stop_on_failure:
                self.stop()

    def _drain(self, selector: selectors.BaseSelector) -> None:
        # A child that left its group may hold a pipe open; nobody waits for it.
        deadline = time.monotonic() + DRAIN_SECONDS
        while len(selector.get_map()) > 1 and self._turn(selector, max(0.0, deadline - time.monotonic())):
            pass


def describe(code: int) -> str:
    """An exit code in words."""
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(code - 128).name}"
    return f"exit code {code}"


def start(
    command: Sequence[str],
    np: int,
    hosts: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    output: str = "kept",
    stop_on_failure: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Job:
    """Starts `np` ranks of `command` on this host.

    `hosts` is the host name of each rank: ranks with different names talk over TCP. `env` is added to this process's
    environment. `output`: "kept" for Job.stdout(rank), "marked" lines on our streams, or "raw" for the command's own.
    Without `stop_on_failure` the others go on when one fails. `say` gets the lines that are meant for people.
    """
    if np < 1:
        raise ValueError(f"np={np}: a job has at least one rank")
    if not command:
        raise ValueError("there is no command to run")
    if output not in OUTPUTS:
        raise ValueError(f"output={output!r}: expected one of {', '.join(OUTPUTS)}")
    names = list(hosts) if hosts is not None else ["localhost"] * np
    if len(names) != np:
        raise ValueError(f"hosts has {len(names)} names for {np} ranks")
    environment = {**os.environ, **(env or {})}
    if "OMP_NUM_THREADS" not in environment:
        threads = max(1, len(os.sched_getaffinity(0)) // np)
        environment["OMP_NUM_THREADS"] = str(threads)
        say(f"OMP_NUM_THREADS is not set; each of the {np} ranks gets {threads}")
    return Job(command, names, environment, output, stop_on_failure)
