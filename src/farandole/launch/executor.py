# Jobs from Python: `run(function)` runs one function, `Executor` has workers that keep running and keep their state.
# Touches job.py, and this process's streams, to which the output of the workers is written.
"""The workers of an executor are ranks like those of `farandole run`. cloudpickle carries functions and results."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future
from concurrent.futures import wait as wait_for
from types import TracebackType
from typing import Any

from farandole.base.config import SETTINGS
from farandole.base.errors import RankFailed
from farandole.launch import calls, discovery, hosts, ssh
from farandole.launch.agent_connection import StartError, package_place
from farandole.launch.blame import describe
from farandole.launch.elastic_run import ElasticRun
from farandole.launch.hosts import Host
from farandole.launch.job import Job
from farandole.launch.output import Files, PrefixedLines, Sink, Tails, Target, Tee
from farandole.launch.plan import ElasticOptions, Plan
from farandole.launch.slots import rank_numbers
from farandole.rendezvous import interfaces
from farandole.rendezvous.agent_messages import Call
from farandole.rendezvous.elastic.policy import Limits

FOLLOW_SECONDS = 1.0  # when one rank has failed, the others have this long to fail as well
OUTPUT_SECONDS = 0.5  # results are returned after the output of ranks is written, or after this time
INTERRUPT_SECONDS = 3.0  # functions have this long to end after Ctrl-C; then the workers are killed


class _Screen:
    """This process's stream at the moment of writing. A notebook has another stream for each cell."""

    def __init__(self, name: str) -> None:
        self._name = name

    def write(self, data: bytes) -> int:
        stream = getattr(sys, self._name)
        return int(stream.write(data.decode(errors="replace")) or 0)

    def flush(self) -> None:
        getattr(sys, self._name).flush()


class _Pending(Future[Any]):
    """The future of a call. `blames`: the rank that the error is about, if that is another rank (-1: not known)."""

    blames: int | None = None


class Executor:
    """Workers that keep running: `start()`, then any number of `run`, `submit` and so on, then `shutdown()`.

    >>> with Executor(2) as executor:
    ...     executor.run(lambda x: x + 1, (1,))
    [2, 2]
    """

    def __init__(
        self,
        num_workers: int,
        hosts: str | Sequence[str] | None = None,
        *,
        hostfile: str | None = None,
        env: Mapping[str, str] | None = None,
        start_timeout: float | None = None,
        ssh_port: int | None = None,
        ssh_identity_file: str | None = None,
        network_interfaces: str | Sequence[str] | None = None,
        executable: str | None = None,
        output_filename: str | None = None,
        verbose: bool = True,
    ) -> None:
        """`hosts` as in `-H`: "host1:4,host2:4"; None: all workers on this host. `verbose`: show what workers print."""
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: a job has at least one worker")
        names = _hosts_of(hosts, hostfile, num_workers)
        self.num_workers = num_workers
        self._output_filename = output_filename
        self._verbose = verbose
        self._plan = _plan(
            names, env, start_timeout, ssh_port, ssh_identity_file, _names(network_interfaces), executable
        )
        self._job: Job | None = None
        self._shut = False
        self._files: Files | None = None
        self._tails = Tails(num_workers)
        self._parts = calls.Assembly()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        # The calls of each rank. The first one has been sent.
        self._queues: list[list[tuple[int, bytes]]] = [[] for _ in range(num_workers)]
        self._futures: dict[tuple[int, int], _Pending] = {}

    # The methods that every executor has.

    def start(self) -> Executor:
        """Starts the workers; a second call does nothing."""
        if self._job is None:
            sink = self._sink()
            try:
                self._job = Job(self._plan, sink, on_call=self._on_call_piece, on_ended=self._ended, on_over=self._over)
            except StartError as error:
                self.shutdown()
                raise RuntimeError(str(error)) from None
        return self

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Calls `fn(*args, **kwargs)` on every worker. Returns the results, by rank."""
        futures = self._submit_all(fn, args, kwargs)
        try:
            left = wait_for(futures, return_when=FIRST_EXCEPTION).not_done
            # The ranks that are left may wait forever for the rank that failed.
            if left and (left := wait_for(left, FOLLOW_SECONDS).not_done):
                self._interrupt(left)
        except BaseException:
            self._interrupt(futures)
            raise
        if self._job is not None:
            self._job.finish_output(OUTPUT_SECONDS)  # a cell of a notebook shows only what is written before it ends
        return _gather(futures)

    def _run_elastic(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        elastic_options: ElasticOptions,
        say: Callable[[str], None] = lambda line: None,
    ) -> list[Any]:
        """Like `run`, once, in an elastic job. The executor itself starts no workers."""
        plan = dataclasses.replace(self._plan, numbers=[], hosts=[])
        try:
            return ElasticRun(_pack_call(fn, args, kwargs)).run(plan, elastic_options, self._sink(), say)
        finally:
            self.shutdown()

    def _sink(self) -> Sink:
        sinks: list[Sink] = [self._tails]
        if self._output_filename is not None:
            self._files = Files(self._output_filename, self.num_workers)
            sinks.append(self._files)
        if self._verbose:
            targets: list[Target] = [_Screen("stdout"), _Screen("stderr")]
            sinks.append(PrefixedLines(self.num_workers, targets))
        return Tee(*sinks)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Future[Any]]:
        """Like `run`, but does not wait. Returns a future for each rank."""
        return list(self._submit_all(fn, args, kwargs))

    def execute_single(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls `fn` on rank 0 only and returns its result."""
        future = self._submit(0, _pack_call(fn, args, kwargs))
        try:
            return future.result()
        except KeyboardInterrupt:
            self._interrupt([future])
            raise

    def submit(self, fn: Callable[..., Any], rank: int, *args: Any, **kwargs: Any) -> Future[Any]:
        """Calls `fn(*args, **kwargs)` on one rank, after the earlier calls of that rank. Returns a future."""
        if not 0 <= rank < self.num_workers:
            raise ValueError(f"rank={rank}: the ranks are 0 to {self.num_workers - 1}")
        return self._submit(rank, _pack_call(fn, args, kwargs))

    def shutdown(self) -> None:
        """Ends the workers; pending calls fail. A second call does nothing."""
        self._shut = True
        if self._job is not None:
            self._job.close()
        if self._files is not None:
            self._files.close()
            self._files = None

    def __enter__(self) -> Executor:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.shutdown()

    # Pending calls.

    def _submit_all(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> list[_Pending]:
        data = _pack_call(fn, args, kwargs)
        return [self._submit(rank, data) for rank in range(self.num_workers)]

    def _submit(self, rank: int, data: bytes) -> _Pending:
        if self._job is None:
            raise RuntimeError("the executor has not been started: call start() first")
        future = _Pending()
        future.set_running_or_notify_cancel()
        with self._lock:
            number = next(self._numbers)
            if self._job.codes[rank] is not None or self._job.over:
                future.set_exception(self._why(rank))
                return future
            self._futures[rank, number] = future
            self._queues[rank].append((number, data))
            if len(self._queues[rank]) == 1:
                self._job.send_call(rank, calls.cut(rank, number, calls.FUNCTION, data))
        return future

    def _on_call_piece(self, piece: Call) -> None:
        data = self._parts.add(piece)
        if data is None:
            return
        with self._lock:
            future = self._futures.pop((piece.rank, piece.call), None)
            queue = self._queues[piece.rank]
            queue.pop(0)
            if queue and self._job is not None:
                number, call = queue[0]
                self._job.send_call(piece.rank, calls.cut(piece.rank, number, calls.FUNCTION, call))
        if future is None:
            return
        try:
            if piece.kind == calls.RESULT:
                future.set_result(calls.unpack(data))
                return
            failure = calls.unpack_error(piece.rank, data)
            future.blames = failure.blames
            future.set_exception(failure.error)
        except Exception as error:  # a result that this process cannot read
            future.set_exception(
                RankFailed(f"the result of rank {piece.rank} cannot be read: {error}", rank=piece.rank)
            )

    def _ended(self, rank: int, _code: int) -> None:
        """A worker has ended with code 0 before the end of the job, for example by os._exit(0)."""
        # If a rank has failed, the job ends anyway, and its root cause may still be sending its error.
        if self._job is not None and self._job.verdict is None:
            self._fail([rank])

    def _over(self) -> None:
        """The job has ended: no worker will answer any more."""
        self._fail(range(self.num_workers))

    def _fail(self, ranks: Collection[int]) -> None:
        with self._lock:
            lost = {key: future for key, future in self._futures.items() if key[0] in ranks}
            for key in lost:
                del self._futures[key]
            for rank in ranks:
                self._queues[rank].clear()
        for (rank, _), future in lost.items():
            future.set_exception(self._why(rank))

    def _why(self, rank: int) -> RankFailed:
        """The error for a worker that has ended: what happened to it, and which rank is the root cause."""
        job = self._job
        assert job is not None
        verdict = job.verdict
        if verdict is None:
            code = job.codes[rank]
            text = job.reason or f"rank {rank}: {describe(code or 0)} before it answered"
            if self._shut and not job.reason:
                text = "the executor was shut down"
            return RankFailed(text, rank=rank, code=code or 0)
        words = "\n".join(self._tails.last_words(verdict.rank))
        last_lines = f"; its last lines:\n{words}" if words else ""
        text = f"rank {verdict.rank} on {job.host_of(verdict.rank)}: {verdict.text}{last_lines}"
        return RankFailed(text, rank=verdict.rank, code=verdict.code)

    def _interrupt(self, futures: Collection[Future[Any]]) -> None:
        """Ctrl-C, or a notebook's stop button: functions get KeyboardInterrupt. Workers that ignore it are killed."""
        if self._job is not None:
            for rank in range(self.num_workers):
                self._job.kill(rank, signal.SIGINT)
            if wait_for(futures, INTERRUPT_SECONDS).not_done:
                self.shutdown()


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: Any = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Calls `func(*args, **kwargs)` in `num_proc` new processes that can all `init()`. Returns the results, by rank.

    The arguments are those of `horovod.run`. `verbose=False` hides the output of the ranks. `host_discovery_script` may
    also be an object of a class like `horovod.runner.elastic.discovery.HostDiscovery`. When the function fails, `run`
    raises RankFailed, a RuntimeError. Its cause is the exception that the rank raised.
    """
    least = min_num_proc if min_np is None else min_np
    most = max_num_proc if max_np is None else max_np
    elastic = any(value is not None for value in (least, most, host_discovery_script))
    if not elastic and any(value is not None for value in (slots, reset_limit, cooldown_range)):
        raise ValueError("slots, reset_limit and cooldown_range are for elastic jobs: give min_num_proc as well")
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi exclude each other")
    if use_mpi or mpi_args:
        raise ValueError("run() starts its ranks with our own agents; for mpirun use `horovodrun --mpi`")
    if host_discovery_script is not None and (hosts is not None or hostfile is not None):
        raise ValueError("host_discovery_script, hosts and hostfile exclude each other")
    named = hosts if host_discovery_script is None else f"localhost:{num_proc if np is None else np}"
    executor = Executor(
        num_proc if np is None else np,
        named,
        hostfile=hostfile,
        start_timeout=start_timeout,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        network_interfaces=network_interfaces or network_interface,
        executable=executable,
        output_filename=output_filename,
        verbose=verbose is not False,
    )
    if elastic:
        limits = Limits(
            executor.num_workers,
            executor.num_workers if least is None else least,
            most,
            reset_limit,
            None if cooldown_range is None else (cooldown_range[0], cooldown_range[1]),
            SETTINGS["elastic_timeout"].default,
            leave_hosts_out=host_discovery_script is not None,
        )
        chosen = ElasticOptions(limits, _discovery(host_discovery_script, slots, hosts, hostfile, executor.num_workers))
    try:
        if elastic:
            return executor._run_elastic(func, args, kwargs, chosen)
        with executor:
            return executor.run(func, args, kwargs)
    except BaseException as error:
        failure = calls.job_failed(error)
        if failure is None:
            raise
        raise failure from error


def _discovery(
    script: Any, slots: int | None, hosts_given: str | None, hostfile: str | None, count: int
) -> discovery.Discovery:
    if hasattr(script, "find_available_hosts_and_slots"):
        return discovery.UserDiscovery(script)
    if script is not None:
        return discovery.Script(script, slots)
    if hostfile is not None:
        return discovery.Hostfile(hostfile)
    return discovery.FixedHosts(hosts.parse(hosts_given) if hosts_given is not None else [Host("localhost", count)])


def _pack_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    if not callable(fn):
        raise TypeError(f"{fn!r} is not a function")
    # The function is pickled separately. It may need modules on our sys.path, so the worker must set its path first.
    return calls.pack((sys.path, calls.pack(fn), tuple(args), dict(kwargs or {})))


def _gather(futures: Sequence[_Pending]) -> list[Any]:
    """All results, or the error of the root cause: preferably no interrupt by us, and no error that blames another."""
    errors = [
        (isinstance(error, KeyboardInterrupt), future.blames is not None, index, error)
        for index, future in enumerate(futures)
        if (error := future.exception()) is not None
    ]
    if errors:
        raise min(errors)[3]
    return [future.result() for future in futures]


def _names(names: str | Sequence[str] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return tuple(name for name in (names.split(",") if isinstance(names, str) else names) if name)


def _hosts_of(chosen: str | Sequence[str] | None, hostfile: str | None, count: int) -> list[str]:
    if chosen is not None and hostfile is not None:
        raise ValueError("hosts and hostfile exclude each other")
    if hostfile is not None:
        with open(hostfile, encoding="utf-8") as file:
            return hosts.assign(hosts.read(file.read(), hostfile), count)
    if chosen is None:
        return hosts.assign([Host("localhost", count)], count)
    return hosts.assign(hosts.parse(chosen if isinstance(chosen, str) else ",".join(chosen)), count)


def _plan(
    names: Sequence[str],
    env: Mapping[str, str] | None,
    start_timeout: float | None,
    ssh_port: int | None,
    ssh_identity_file: str | None,
    network_interfaces: tuple[str, ...],
    executable: str | None,
) -> Plan:
    if start_timeout is not None:
        SETTINGS["start_timeout"].check(start_timeout, "start_timeout")
    python = executable or sys.executable
    path = package_place()
    here = {name: interfaces.is_this_host(name) for name in dict.fromkeys(names)}
    timeout = SETTINGS["start_timeout"]
    more = {} if start_timeout is None else {timeout.variable: str(start_timeout)}
    environ = {**os.environ, **more, **(env or {})}
    return Plan(
        command=[python, "-c", ssh.start_code(path, "farandole.launch.worker")],
        numbers=rank_numbers(names),
        hosts=["" if here[name] else name for name in names],
        environ=environ,
        directory=os.getcwd(),
        connector=ssh.SshOptions(python, path, ssh_port, ssh_identity_file),
        start_timeout=timeout.read(environ),
        survivor_grace=SETTINGS["survivor_grace_seconds"].read(environ),
        interfaces=network_interfaces,
        calls=True,
    )
