# What other projects import from horovod.common and from horovod itself, beside the operations.
# Touches groups, runtime, pending and, in `env`, the environment of this process.
"""Horovod's helper functions by their old names; `src/horovod` leads here."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from . import runtime
from .pending import chosen_op
from .reductions import Adasum, Average, Max, Min, Product, Sum

Item = TypeVar("Item")

EXTENSIONS = ["tensorflow", "torch", "mxnet"]


class HorovodBasics:
    """What every binding has: the functions of `farandole` as methods. Its arguments named a library to load."""

    def __init__(self, *_: Any) -> None:
        self.Average, self.Sum, self.Adasum = Average, Sum, Adasum
        self.Min, self.Max, self.Product = Min, Max, Product

    init = staticmethod(runtime.init)
    shutdown = staticmethod(runtime.shutdown)
    is_initialized = staticmethod(runtime.is_initialized)
    start_timeline = staticmethod(runtime.start_timeline)
    stop_timeline = staticmethod(runtime.stop_timeline)
    size = staticmethod(runtime.size)
    local_size = staticmethod(runtime.local_size)
    cross_size = staticmethod(runtime.cross_size)
    rank = staticmethod(runtime.rank)
    local_rank = staticmethod(runtime.local_rank)
    cross_rank = staticmethod(runtime.cross_rank)
    is_homogeneous = staticmethod(runtime.is_homogeneous)
    mpi_threads_supported = staticmethod(runtime.mpi_threads_supported)
    mpi_enabled = staticmethod(runtime.mpi_enabled)
    mpi_built = staticmethod(runtime.mpi_built)
    gloo_enabled = staticmethod(runtime.gloo_enabled)
    gloo_built = staticmethod(runtime.gloo_built)
    nccl_built = staticmethod(runtime.nccl_built)
    ddl_built = staticmethod(runtime.ddl_built)
    ccl_built = staticmethod(runtime.ccl_built)
    cuda_built = staticmethod(runtime.cuda_built)
    rocm_built = staticmethod(runtime.rocm_built)


# --- horovod.common.util ---------------------------------------------------------------------------------------------


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the binding of a framework is here, and the framework as well.

    >>> extension_available("cobol")
    False
    """
    binding = f"{__package__}.{ext_base_name}"
    return all(importlib.util.find_spec(name) is not None for name in (binding, ext_base_name))


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: Any) -> None:
    """ImportError unless the binding can be used; `ext_env_var` built it into Horovod and has no meaning here."""
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        raise ImportError(f"{ext_name}: there is no binding for {framework}, or {framework} is not installed")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the binding takes tensors on GPUs; it asks its framework."""
    if not extension_available(ext_base_name):
        return False
    binding = importlib.import_module(f"{__package__}.{ext_base_name}")
    return bool(binding.cuda_built() or binding.rocm_built())


def mpi_built(verbose: bool = False) -> bool:
    """As in `farandole`."""
    return runtime.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """As in `farandole`."""
    return runtime.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """As in `farandole`."""
    return runtime.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """As in `farandole`."""
    return runtime.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """As in `farandole`."""
    return runtime.ccl_built()


@contextlib.contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Sets environment variables for a while; those given as None stay as they are."""
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


def split_list(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """Cuts a list into `count` parts whose lengths differ by one at most.

    >>> split_list([1, 2, 3, 4, 5], 2)
    [[1, 2, 3], [4, 5]]
    """
    least, longer = divmod(len(items), count)
    parts, start = [], 0
    for part in range(count):
        end = start + least + (part < longer)
        parts.append(items[start:end])
        start = end
    return parts


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number is 1, 2, 4, 8 and so on."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(value: Any) -> bool:
    """Whether one can loop over it."""
    try:
        iter(value)
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
    """The function that makes one operation out of the arguments `op` and `average`."""
    return chosen_op


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Does nothing: a wheel was compiled against no version of a framework."""


# --- horovod.runner.common.util --------------------------------------------------------------------------------------

MESSAGE = (
    "Timed out waiting for {activity}. Please check connectivity between servers. "
    "You may need to increase the timeout_s parameter if you have too many servers."
)


class Timeout:
    """A moment by which something has to have happened."""

    def __init__(self, timeout: float, message: str = MESSAGE) -> None:
        self._seconds = timeout
        self._end = time.time() + timeout
        self._message = message

    def remaining(self) -> float:
        """Seconds that are left, or 0."""
        return max(0.0, self._end - time.time())

    def timed_out(self) -> bool:
        """Whether it is over."""
        return time.time() > self._end

    def check_time_out_for(self, activity: str) -> None:
        """TimeoutError, naming the activity, when it is over."""
        if self.timed_out():
            raise TimeoutError(self._message.format(activity=activity, timeout=self._seconds))


def make_secret_key() -> bytes:
    """32 random bytes. Farandole makes the secret of a job itself; this is for those who ask."""
    return os.urandom(32)
