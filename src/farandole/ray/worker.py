# The actor of a rank, with the methods that executors call.
# Touches the variables of its process, which tell the rank its numbers, and a descriptor for the secret.
"""The strategies make a Ray actor of `BaseHorovodWorker`. Functions run on its main thread."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from farandole.base.errors import Removed
from farandole.launch.watch import StatusPage
from farandole.lightning import registration
from farandole.ray import ray_logger
from farandole.rendezvous import sockets
from farandole.rendezvous.reach import reach
from farandole.rendezvous.secret import Secret
from farandole.world import basics

REACH_SECONDS = 10.0  # time limit for an answer from the launcher's addresses
SECRET = "FARANDOLE_SECRET_FD"


@dataclass(frozen=True)
class ActorLocation:
    """The location of an actor."""

    node: str
    hostname: str
    address: str
    pid: int
    gpus: tuple[str, ...]
    port: int  # a free port for a server of this process
    pulse: int  # the descriptor of its status page with heartbeats, in an elastic job


@dataclass(frozen=True)
class ActorRemoved:
    """The result of a worker of an elastic job that has no slot any more."""

    text: str


_held: list[Any] = []  # the reserved port of this process
_status_pages: list[StatusPage] = []  # the status page of this process


def location() -> ActorLocation:
    """The location of this process."""
    if not _held:
        _held.extend(sockets.hold_port())
        _status_pages.append(StatusPage())
    context = ray.get_runtime_context()
    gpus = tuple(str(one) for one in ray.get_gpu_ids())
    address = str(ray.util.get_node_ip_address())
    node, host = str(context.get_node_id()), os.uname().nodename
    return ActorLocation(node, host, address, os.getpid(), gpus, _held[1], _status_pages[0].fd)


def take_place(variables: Mapping[str, str], addresses: Sequence[str], key: bytes) -> None:
    """From now on `init()` in this process joins the job whose hub listens at one of these addresses."""
    secret = Secret(key)
    address, why = reach(addresses, secret, REACH_SECONDS)
    if address is None:
        raise ConnectionError(f"{os.uname().nodename} cannot reach the launcher: {why}")
    basics.shutdown()
    registration.watch()  # the function may use Lightning with strategy="horovod"
    old = os.environ.get(SECRET)
    os.environ.update(variables)
    os.environ["FARANDOLE_RENDEZVOUS"] = address
    if "FARANDOLE_ELASTIC" in variables:
        os.environ["FARANDOLE_PULSE_FD"] = str(_status_pages[0].fd)
    os.environ[SECRET] = str(secret.to_descriptor())
    if old is not None:
        with contextlib.suppress(OSError, ValueError):
            os.close(int(old))


class BaseHorovodWorker:
    """One rank. `executable` is the object of `start(executable_cls=...)`; functions of `execute` get it."""

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        os.environ["HOROVOD_HOSTNAME"] = self.node_id()

    def node_id(self) -> str:
        """Ray's id of the node."""
        return location().node

    def hostname(self) -> str:
        """The name of the machine."""
        return os.uname().nodename

    def get_gpu_ids(self) -> list[Any]:
        """The GPUs that Ray assigned to this actor."""
        return list(ray.get_gpu_ids())

    def where(self) -> ActorLocation:
        """The location of this actor."""
        return location()

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Sets variables of this process."""
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """The variables of this process."""
        return dict(os.environ)

    def take_place(self, variables: Mapping[str, str], addresses: Sequence[str], key: bytes) -> None:
        """Makes this process a rank of the job."""
        take_place(variables, addresses, key)

    def leave(self) -> None:
        """Leaves this round of the job and informs the waiting ranks. `init()` joins the next round."""
        basics.shutdown()

    def start_executable(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Makes the object for the functions of `execute`."""
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Calls `func(executable)`."""
        return func(self.executable)

    def train(self, func: Callable[[Any], Any], executable: Sequence[Any], rendezvous: tuple[Any, ...]) -> Any:
        """Runs a worker of an elastic job until it ends, also if the job has no slot for it any more."""
        self.take_place(*rendezvous)
        self.start_executable(*executable)
        try:
            result = func(self.executable)
            # Shut down now: a worker that ends without leaving counts as lost, and others may still run a step.
            basics.shutdown()
            return result
        except Removed as removed:
            return ActorRemoved(removed.message)

    def set_queue(self, queue: Any) -> None:
        """Sets the queue for `ray_logger.log`."""
        ray_logger.configure(queue)
