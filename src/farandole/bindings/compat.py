# Names that other projects import from horovod.common and from horovod itself, besides the operations.
# Touches the rooms base, operations and world; `env` touches the environment of this process.
"""Horovod's helper functions under their old names, for `src/horovod`."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ..base.errors import HorovodVersionMismatchError as HorovodVersionMismatchError  # Horovod has it here too
from ..base.errors import get_version_mismatch_message as get_version_mismatch_message
from ..base.named import module_of
from ..operations.pending import chosen_op
from ..operations.reductions import Adasum, Average, Max, Min, Product, Sum
from ..world import basics
from ..world.runtime import runtime

Item = TypeVar("Item")

EXTENSIONS = ["tensorflow", "torch", "mxnet"]

_cache = functools.cache  # keeps the results of a function by its arguments


class HorovodBasics:
    """The functions of `farandole` as methods, for every binding. In Horovod the arguments named a library to load."""

    def __init__(self, pkg_path: str | None = None, *args: Any) -> None:
        self.Average, self.Sum, self.Adasum = Average, Sum, Adasum
        self.Min, self.Max, self.Product = Min, Max, Product

    init = staticmethod(basics.init)
    shutdown = staticmethod(basics.shutdown)
    is_initialized = staticmethod(basics.is_initialized)
    start_timeline = staticmethod(basics.start_timeline)
    stop_timeline = staticmethod(basics.stop_timeline)
    size = staticmethod(basics.size)
    local_size = staticmethod(basics.local_size)
    cross_size = staticmethod(basics.cross_size)
    rank = staticmethod(basics.rank)
    local_rank = staticmethod(basics.local_rank)
    cross_rank = staticmethod(basics.cross_rank)
    is_homogeneous = staticmethod(basics.is_homogeneous)
    mpi_threads_supported = staticmethod(basics.mpi_threads_supported)
    mpi_enabled = staticmethod(basics.mpi_enabled)
    mpi_built = staticmethod(basics.mpi_built)
    gloo_enabled = staticmethod(basics.gloo_enabled)
    gloo_built = staticmethod(basics.gloo_built)
    nccl_built = staticmethod(basics.nccl_built)
    ddl_built = staticmethod(basics.ddl_built)
    ccl_built = staticmethod(basics.ccl_built)
    cuda_built = staticmethod(basics.cuda_built)
    rocm_built = staticmethod(basics.rocm_built)

    # Other programs also call these.

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """The ranks of every registered process set, by its number."""
        return runtime.world.groups.ranks_by_id()

    def _process_set_size(self, process_set_id: int) -> int:
        """The number of ranks of a process set."""
        return len(runtime.world.groups.numbered(process_set_id))

    def _process_set_rank(self, process_set_id: int) -> int:
        """This process's index in a process set. Raises ValueError if it is not a member."""
        ranks = runtime.world.groups.numbered(process_set_id)
        if basics.rank() not in ranks:
            raise ValueError(f"rank {basics.rank()} is not in the process set {process_set_id}: {ranks}")
        return ranks.index(basics.rank())


# --- horovod.common.util ---------------------------------------------------------------------------------------------


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether both the binding of a framework and the framework are installed.

    >>> extension_available("cobol")
    False
    """
    binding = f"farandole.{ext_base_name}"
    return all(importlib.util.find_spec(name) is not None for name in (binding, ext_base_name))


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: Any) -> None:
    """ImportError unless the binding can be used. `ext_env_var` was for building Horovod and has no meaning here."""
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        raise ImportError(f"{ext_name}: there is no binding for {framework}, or {framework} is not installed")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the binding supports tensors on GPUs; the framework decides this."""
    if not extension_available(ext_base_name):
        return False
    binding = module_of(f"farandole.{ext_base_name}")
    return bool(binding.cuda_built() or binding.rocm_built())


def mpi_built(verbose: bool = False) -> bool:
    """As in `farandole`."""
    return basics.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """As in `farandole`."""
    return basics.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """As in `farandole`."""
    return basics.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """As in `farandole`."""
    return basics.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """As in `farandole`."""
    return basics.ccl_built()


@contextlib.contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Sets environment variables inside a `with` block; None leaves a variable unchanged."""
    new = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def split_list(l: Sequence[Item], n: int) -> list[Sequence[Item]]:
    """Divides a list into `n` parts whose lengths differ by at most one.

    >>> split_list([1, 2, 3, 4, 5], 2)
    [[1, 2, 3], [4, 5]]
    """
    least, longer = divmod(len(l), n)
    parts, start = [], 0
    for part in range(n):
        end = start + least + (part < longer)
        parts.append(l[start:end])
        start = end
    return parts


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(x: Any) -> bool:
    """Whether it can be iterated over."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version `ver` is `target` or newer; `target` has three numbers.

    >>> is_version_greater_equal_than("2.13.0+cpu", "2.9.1")
    True
    """
    if not isinstance(ver, str) or re.fullmatch(r"\d+\.\d+\.\d+", target) is None:
        raise ValueError(f"expected two versions such as '1.2.3', not {ver!r} and {target!r}")

    def numbers(version: str) -> list[int]:
        found = re.match(r"\d+(?:\.\d+)*", version)
        parts = [int(part) for part in found.group().split(".")] if found else []
        return [*parts, 0, 0, 0][:3]

    return numbers(ver) >= numbers(target)


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, bool | None], Any]:
    """The function that chooses the reduction from the arguments `op` and `average`."""
    return chosen_op


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Does nothing: the wheel is not compiled for a version of a framework."""


# --- horovod.runner.common.util --------------------------------------------------------------------------------------

MESSAGE = (
    "Timed out waiting for {activity}. Please check connectivity between servers. "
    "You may need to increase the timeout_s parameter if you have too many servers."
)


class TimeoutException(TimeoutError):
    """A timeout, under Horovod's name."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class Timeout:
    """A deadline."""

    def __init__(self, timeout: float, message: str = MESSAGE) -> None:
        self._seconds = timeout
        self._end = time.time() + timeout
        self._message = message

    def remaining(self) -> float:
        """Remaining seconds, at least 0."""
        return max(0.0, self._end - time.time())

    def timed_out(self) -> bool:
        """Whether the deadline has passed."""
        return time.time() > self._end

    def check_time_out_for(self, activity: str) -> None:
        """TimeoutException with the activity if the deadline has passed."""
        if self.timed_out():
            raise TimeoutException(self._message.format(activity=activity, timeout=self._seconds))


def make_secret_key() -> bytes:
    """32 random bytes. Farandole makes the secret of a job itself; this is for programs that call it."""
    return os.urandom(32)
