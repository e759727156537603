# The actor that is a rank: what an executor asks of it.
# Touches the environment of its own process, which is how a rank learns its place, and a descriptor for the secret.
"""`BaseHorovodWorker` is made a Ray actor by the strategies; functions run on its main thread."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from farandole import runtime
from farandole.errors import Removed
from farandole.launch.watch import Word
from farandole.lightning import registration
from farandole.ray import ray_logger
from farandole.rendezvous import sockets
from farandole.rendezvous.reach import reach
from farandole.rendezvous.secret import Secret

REACH_SECONDS = 10.0  # for one of the launcher's addresses to answer
SECRET = "FARANDOLE_SECRET_FD"


@dataclass(frozen=True)
class Whereabouts:
    """Where an actor runs."""

    node: str
    hostname: str
    address: str
    pid: int
    gpus: tuple[str, ...]
    port: int  # that a server of this process may use
    pulse: int  # descriptor of the memory file with its signs of life, in an elastic job


@dataclass(frozen=True)
class Gone:
    """What a worker of an elastic job gives when there is no place for it any more."""

    text: str


_held: list[Any] = []  # the port of this process
_pulse: list[Word] = []  # its signs of life


def whereabouts() -> Whereabouts:
    """Of this process."""
    if not _held:
        _held.extend(sockets.hold_port())
        _pulse.append(Word())
    context = ray.get_runtime_context()
    gpus = tuple(str(one) for one in ray.get_gpu_ids())
    address = str(ray.util.get_node_ip_address())
    node, host = str(context.get_node_id()), os.uname().nodename
    return Whereabouts(node, host, address, os.getpid(), gpus, _held[1], _pulse[0].fd)


def take_place(variables: Mapping[str, str], addresses: Sequence[str], key: bytes) -> None:
    """From now on `init()` in this process joins the job whose hub listens at one of these addresses."""
    secret = Secret(key)
    address, why = reach(addresses, secret, REACH_SECONDS)
    if address is None:
        raise ConnectionError(f"{os.uname().nodename} cannot reach the launcher: {why}")
    runtime.shutdown()
    registration.watch()  # the function that runs here may ask Lightning for strategy="horovod"
    old = os.environ.get(SECRET)
    os.environ.update(variables)
    os.environ["FARANDOLE_RENDEZVOUS"] = address
    if "FARANDOLE_ELASTIC" in variables:
        os.environ["FARANDOLE_PULSE_FD"] = str(_pulse[0].fd)
    os.environ[SECRET] = str(secret.to_descriptor())
    if old is not None:
        with contextlib.suppress(OSError, ValueError):
            os.close(int(old))


class BaseHorovodWorker:
    """One rank. `executable` is what `start(executable_cls=...)` has made; functions of `execute` get it."""

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        os.environ["HOROVOD_HOSTNAME"] = self.node_id()

    def node_id(self) -> str:
        """Ray's name for the node."""
        return whereabouts().node

    def hostname(self) -> str:
        """The name of the machine."""
        return os.uname().nodename

    def get_gpu_ids(self) -> list[Any]:
        """The GPUs that Ray gave to this actor."""
        return list(ray.get_gpu_ids())

    def where(self) -> Whereabouts:
        """All of that at once."""
        return whereabouts()

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Sets variables of this process."""
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """The variables of this process."""
        return dict(os.environ)

    def take_place(self, variables: Mapping[str, str], addresses: Sequence[str], key: bytes) -> None:
        """Makes it a rank of the job."""
        take_place(variables, addresses, key)

    def leave(self) -> None:
        """Out of this round of the job: ranks that wait for this one hear it. `init()` joins the next."""
        runtime.shutdown()

    def start_executable(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Makes the object that functions of `execute` get."""
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Calls `func(executable)`."""
        return func(self.executable)

    def train(self, func: Callable[[Any], Any], executable: Sequence[Any], place: tuple[Any, ...]) -> Any:
        """The whole life of a worker in an elastic job, where it may hear that it is not needed any more."""
        self.take_place(*place)
        self.start_executable(*executable)
        try:
            result = func(self.executable)
            runtime.shutdown()  # now: who ends without a word counts as lost, and the others may have a step to go
            return result
        except Removed as removed:
            return Gone(removed.message)

    def set_queue(self, queue: Any) -> None:
        """Where `ray_logger.log` puts things."""
        ray_logger.configure(queue)
