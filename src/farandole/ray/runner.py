# `RayExecutor`: workers that keep running, as Ray actors. It has the same methods as the executor on this host.
# Touches Ray, the strategies that place actors, and the coordinator that runs their hub.
"""The executor waits and decides. The adapter holds the actors and their hub; with Ray Client it is an actor itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from farandole.base import tested
from farandole.base.ending import blames
from farandole.base.errors import RankFailed
from farandole.ray.elastic_adapter import ElasticAdapter, ElasticParams, Executable
from farandole.ray.rendezvous import Coordinator as Coordinator  # Horovod has this name here
from farandole.ray.settings import MiniSettings, write_key
from farandole.ray.strategy import ColocatedStrategy, PGStrategy, Strategy, by_node, gpus_of

FOLLOW_SECONDS = 1.0  # when one rank has failed, the others have this long to fail as well
LEAVE_SECONDS = 3.0  # functions have this long to end after a rank that they wait for left; then workers are killed
TURN_SECONDS = 0.1  # between two checks for values for callbacks
NOT_STARTED = "the executor has not been started: call start() first"


@dataclass
class StaticParams:
    """The parameters of a job with a fixed number of workers."""

    num_workers: int | None = None
    num_hosts: int | None = None
    num_workers_per_host: int = 1
    cpus_per_worker: float = 1
    use_gpu: bool = False
    gpus_per_worker: float | None = None
    use_current_placement_group: bool = True

    def strategy(self, settings: Any) -> Strategy:
        """The strategy that places its workers."""
        more: dict[str, Any] = {
            "cpus_per_worker": self.cpus_per_worker,
            "use_gpu": self.use_gpu,
            "gpus_per_worker": self.gpus_per_worker,
            "use_current_placement_group": self.use_current_placement_group,
        }
        if self.num_workers is not None:
            return PGStrategy(settings, self.num_workers, **more)
        assert self.num_hosts is not None
        return ColocatedStrategy(settings, self.num_hosts, self.num_workers_per_host, **more)


class StaticAdapter:
    """The actors of a fixed job, by rank, and their hub."""

    def __init__(self, params: StaticParams, settings: Any) -> None:
        self.settings = settings
        self.strategy = params.strategy(settings)
        self.workers: list[Any] = []
        self.coordinator: Coordinator | None = None

    def start(self, executable: Executable, extra_env_vars: Mapping[str, Any]) -> None:
        """Places the workers, gives each its rank, and starts their hub."""
        try:
            self._start(extra_env_vars)
            ray.get([one.start_executable.remote(*executable) for one in self.workers])
        except BaseException:
            self.shutdown()
            raise

    def _start(self, extra: Mapping[str, Any]) -> None:
        self.workers, _ = self.strategy.create_workers()
        seconds = float(self.settings.timeout_s)
        try:
            found = by_node(self.workers, time.monotonic() + seconds)
        except GetTimeoutError:
            raise TimeoutError(
                f"the workers did not start within {seconds:g} s; if Ray is only slow, raise timeout_s of the settings"
            ) from None
        self.workers = [actor for actor, _ in found]
        coordinator = self.coordinator = Coordinator(self.settings)
        for rank, (_, location) in enumerate(found):
            coordinator.register(location.hostname, location.node, rank)
        coordinator.finalize_registration()
        coordinator.establish_rendezvous()
        key = coordinator.secret.key
        nodes: dict[str, list[str]] = {}
        for _, location in found:
            nodes.setdefault(location.node, []).extend(
                gpu for gpu in location.gpus if gpu not in nodes.get(location.node, [])
            )
        ready = []
        for rank, (actor, location) in enumerate(found):
            # Each worker sees the GPUs of all workers on its node, so that scripts choose one by local_rank().
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(nodes[location.node])} if location.gpus else {}
            ready.append(actor.update_env_vars.remote({**visible, **extra}))
            master = (found[0][1].address, found[0][1].port)
            ready.append(actor.take_place.remote(coordinator.variables(rank, master), coordinator.addresses, key))
        ray.get(ready)

    def execute(self, fn: Callable[[Any], Any], queue: Any = None) -> list[Any]:
        """Calls `fn(executable)` on every worker. Returns a reference for each rank."""
        for worker in self.workers:
            worker.set_queue.remote(queue)
        return [worker.execute.remote(fn) for worker in self.workers]

    def execute_on(self, rank: int, fn: Callable[[Any], Any]) -> list[Any]:
        """The same on one worker. The reference is in a list, so that Ray Client does not replace it by its value."""
        return [self.workers[rank].execute.remote(fn)]

    def leave(self, ranks: Sequence[int], dead: Mapping[int, str]) -> None:
        """Makes these ranks leave, so that ranks that wait for them get an error; dead ranks are reported as absent."""
        for rank, reason in dead.items():
            if self.coordinator is not None:
                self.coordinator.absent(rank, reason)
        for rank in ranks:
            self.workers[rank].leave.remote()

    def count(self) -> int:
        """The number of workers."""
        return self.strategy.num_workers

    def shutdown(self) -> None:
        """Ends the actors and releases their placement group."""
        for worker in self.workers:
            with contextlib.suppress(Exception):  # Ray itself may have ended
                ray.kill(worker)
        self.workers = []
        self.strategy.shutdown()
        if self.coordinator is not None:
            self.coordinator.close()
            self.coordinator = None


class _Remote:
    """An object in an actor, called as if it were local. Ray Client needs it, because this process is outside of
    Ray.
    """

    def __init__(self, cls: type, *args: Any) -> None:
        remote: Any = ray.remote  # its annotations lack max_concurrency
        self._actor = remote(num_cpus=0, max_concurrency=4)(cls).remote(*args)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: ray.get(getattr(self._actor, name).remote(*args, **kwargs))

    def begin(self, name: str, *args: Any) -> Any:
        """Calls a method and returns a reference to its result."""
        return getattr(self._actor, name).remote(*args)

    def kill(self) -> None:
        """Ends the actor."""
        with contextlib.suppress(Exception):
            ray.kill(self._actor)


def under_client() -> bool:
    """Whether this process uses the cluster through Ray Client."""
    from ray.util.client import ray as client

    return bool(client.is_connected())


class RayExecutor:
    """Workers on a Ray cluster: `start()`, then any number of `run`, `execute` and so on, then `shutdown()`.

    `num_workers`: this number of workers, on any nodes. A pair (least, most), or `min_workers` and `max_workers`: an
    elastic job, for functions that use the elastic API. `num_hosts` and `num_workers_per_host`: so many on each node.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: set[str] | None = None,
    ) -> MiniSettings:
        """`timeout_s`: limit for the start and rendezvous; `placement_group_timeout_s`: for free resources."""
        write_key(ssh_identity_file, ssh_str)
        return MiniSettings(
            ssh_identity_file=ssh_identity_file,
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
            nics=nics,
        )

    def __init__(
        self,
        settings: Any = None,
        num_workers: int | tuple[int, int] | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        """`settings`: from create_settings; None: the defaults."""
        tested.warn_about_newer(["ray"])
        self.settings = settings if settings is not None else self.create_settings()
        gpus_of(use_gpu, gpus_per_worker)
        if isinstance(num_workers, tuple):
            if min_workers is not None or max_workers is not None:
                raise ValueError("num_workers=(least, most) and min_workers or max_workers exclude each other")
            (min_workers, max_workers), num_workers = num_workers, None
        if max_workers is not None and min_workers is None:
            raise ValueError("`max_workers` can be set only for elastic jobs: give `min_workers` as well")
        if min_workers is not None:
            if num_workers is not None or num_hosts is not None:
                raise ValueError("`num_workers` and `num_hosts` are for jobs of a fixed size: leave `min_workers` out")
            self.params: Any = ElasticParams(
                min_workers,
                max_workers,
                reset_limit,
                None if cooldown_range is None else (cooldown_range[0], cooldown_range[1]),
                elastic_timeout,
                override_discovery,
                cpus_per_worker,
                use_gpu,
                gpus_per_worker,
            )
        else:
            if (num_workers is None) == (num_hosts is None):
                raise ValueError("give either `num_workers`, or `num_hosts`, or `min_workers`")
            for name, count in (("num_workers", num_workers), ("num_hosts", num_hosts)):
                if count is not None and count < 1:
                    raise ValueError(f"{name}={count}: a job has at least one worker")
            self.params = StaticParams(
                num_workers,
                num_hosts,
                num_workers_per_host,
                cpus_per_worker,
                use_gpu,
                gpus_per_worker,
                use_current_placement_group,
            )
        self.adapter: Any = None

    @property
    def _elastic(self) -> bool:
        return not isinstance(self.params, StaticParams)

    @property
    def num_workers(self) -> int:
        """The number of workers; in an elastic job the least number."""
        return int(self.adapter.count()) if self.adapter is not None else 0

    # The methods that every executor has.

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> RayExecutor:
        """Starts the workers. With `executable_cls` each worker makes such an object for the functions of `execute`."""
        if self.adapter is not None:
            return self
        adapter_cls: Any = StaticAdapter
        if self._elastic:
            adapter_cls = ElasticAdapter
        arguments = (self.params, self.settings)
        adapter = _Remote(adapter_cls, *arguments) if under_client() else adapter_cls(*arguments)
        try:
            adapter.start((executable_cls, executable_args, executable_kwargs), extra_env_vars or {})
        except RayTaskError as error:
            if isinstance(adapter, _Remote):
                adapter.kill()
            raise error.cause from None
        self.adapter = adapter
        return self

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """Calls `fn(*args, **kwargs)` on every worker. Returns the results, by rank."""
        return self.execute(_calling(fn, args, kwargs), callbacks)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Like `run`, but does not wait. Returns a reference for each rank, for `ray.get`."""
        return list(self._started().execute(_calling(fn, args, kwargs)))

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None) -> list[Any]:
        """Calls `fn(executable)` on every worker. Returns the results, by rank."""
        adapter = self._started()
        with _LogForwarder(callbacks) as forwarder:
            if self._elastic:
                return self._execute_elastic(adapter, fn, forwarder)
            refs = adapter.execute(fn, forwarder.queue)
            try:
                return self._collect(refs, forwarder)
            except KeyboardInterrupt:
                self.shutdown()
                raise

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Calls `fn(executable)` on rank 0 only and returns its result."""
        return self._single(self._started().execute_on(0, fn)[0], 0)

    def submit(self, fn: Callable[..., Any], rank: int, *args: Any, **kwargs: Any) -> Any:
        """Calls `fn(*args, **kwargs)` on one rank, after its earlier calls. Returns a reference for `ray.get`."""
        if not 0 <= rank < self.num_workers:
            raise ValueError(f"rank={rank}: the ranks are 0 to {self.num_workers - 1}")
        return self._started().execute_on(rank, _calling(fn, args, kwargs))[0]

    def shutdown(self) -> None:
        """Ends the workers. A second call does nothing."""
        adapter, self.adapter = self.adapter, None
        if adapter is not None:
            with contextlib.suppress(RayActorError):
                adapter.shutdown()
            if isinstance(adapter, _Remote):
                adapter.kill()

    def __enter__(self) -> RayExecutor:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.shutdown()

    # Waiting.

    def _started(self) -> Any:
        if self.adapter is None:
            raise RuntimeError(NOT_STARTED)
        return self.adapter

    def _execute_elastic(self, adapter: Any, fn: Callable[[Any], Any], forwarder: _LogForwarder) -> list[Any]:
        if not isinstance(adapter, _Remote):
            outcome = adapter.run(fn, forwarder.queue, forwarder.turn)
        else:
            ref = adapter.begin("run", fn, forwarder.queue)
            while not ray.wait([ref], timeout=TURN_SECONDS)[0]:
                forwarder.turn()
            outcome = ray.get(ref)
        if isinstance(outcome, BaseException):
            raise outcome
        return list(outcome)

    def _collect(self, refs: Sequence[Any], forwarder: _LogForwarder) -> list[Any]:
        """All results, or the root cause of the failure."""
        left, errors = list(refs), {}
        deadline = float("inf")
        parted = False
        while left:
            done, left = ray.wait(left, num_returns=1, timeout=TURN_SECONDS)
            forwarder.turn()
            for ref in done:
                rank = list(refs).index(ref)
                try:
                    ray.get(ref)
                except Exception as error:  # an error of the function, or the end of the actor
                    errors[rank] = error
                    deadline = min(deadline, time.monotonic() + FOLLOW_SECONDS)
            if time.monotonic() < deadline or not left:
                continue
            if parted:
                self.shutdown()  # the functions do not end, because they run no collectives that would fail
                break
            # The other ranks may wait forever for the failed one.
            self._part([rank for rank, ref in enumerate(refs) if ref not in left], errors)
            parted, deadline = True, time.monotonic() + LEAVE_SECONDS
        if errors:
            self._part(range(len(refs)), errors)  # so that all ranks are in the same state for the next function
            raise self._root_cause(errors)
        return list(ray.get(list(refs)))

    def _part(self, ranks: Sequence[int], errors: Mapping[int, Exception]) -> None:
        if self.adapter is not None:
            dead = {rank: _text(error) for rank, error in errors.items() if isinstance(error, RayActorError)}
            self.adapter.leave([rank for rank in ranks if rank not in dead], dead)

    def _single(self, ref: Any, rank: int) -> Any:
        try:
            return ray.get(ref)
        except RayActorError as error:
            raise self._root_cause({rank: error}) from None

    def _root_cause(self, errors: Mapping[int, Exception]) -> Exception:
        """The root cause: preferably an error that no other rank caused."""

        def innocence(rank: int) -> tuple[bool, int]:
            cause = getattr(errors[rank], "cause", None)
            return (isinstance(cause, BaseException) and blames(cause) is not None, rank)

        rank = min(errors, key=innocence)
        error = errors[rank]
        if isinstance(error, RayActorError):
            return RankFailed(f"rank {rank}: its actor has died: {_text(error)}", rank=rank)
        return error


def _text(error: BaseException) -> str:
    """The beginning of Ray's text about the end of an actor, on one line."""
    return " ".join(str(error).split())[:300]


def _calling(
    fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Callable[[Any], Any]:
    if not callable(fn):
        raise TypeError(f"{fn!r} is not a function")
    positional, keywords = tuple(args or ()), dict(kwargs or {})
    return lambda _executable: fn(*positional, **keywords)


class _LogForwarder:
    """Forwards what rank 0 logs to the callbacks, in the process and thread that called `run`."""

    def __init__(self, callbacks: Sequence[Callable[[Any], Any]] | None) -> None:
        self._callbacks = list(callbacks or ())
        self.queue: Any = None
        if self._callbacks:
            from ray.util.queue import Queue

            self.queue = Queue(actor_options={"num_cpus": 0})

    def turn(self) -> None:
        """Calls the callbacks with all new values."""
        while self.queue is not None and (count := self.queue.qsize()):
            for value in self.queue.get_nowait_batch(count):
                for callback in self._callbacks:
                    callback(value)

    def __enter__(self) -> _LogForwarder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.queue is not None:
            if kind is None:
                self.turn()
            self.queue.shutdown(force=True)
