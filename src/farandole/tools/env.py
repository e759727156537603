# `farandole env`: prints text for bug reports: versions, machine, settings. No addresses, host names or secrets.
# Reads metadata, /proc and settings; loads CUDA's libraries; imports no framework and starts no process.
"""`facts()` returns the content of the text. `farandole doctor` shows a part of it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import platform
import resource
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from farandole.base.config import SETTINGS, Config
from farandole.base.errors import LibraryMissing
from farandole.base.version import package_version
from farandole.engine import cuda
from farandole.engine.library import load
from farandole.launch.machine import first_line, lines, quota
from farandole.rendezvous.interfaces import interfaces

# Arm processors report numbers. These are the names of processors in data centres.
ARM_PARTS = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}
PACKAGES = ("torch", "tensorflow", "keras", "jax", "mxnet", "lightning", "pyspark", "ray", "mpi4py", "cloudpickle")


def version_of(name: str) -> str:
    """The version of an installed distribution, or ""."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return ""


def kernels() -> str:
    """Which kernels the native library uses here; LibraryMissing without the library."""
    return load().kernels


def cores() -> str:
    """The number of cores of the machine, of this process, and of its control group."""
    text = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    limit = quota()
    return text if limit == math.inf else f"{text}, quota {limit:g}"


def memory() -> str:
    """Free and installed memory."""
    found = {}
    for line in lines("/proc/meminfo"):
        name, _, rest = line.partition(":")
        with contextlib.suppress(ValueError, IndexError):
            found[name] = int(rest.split()[0]) / (1 << 20)
    return f"{found.get('MemAvailable', 0):.1f} of {found.get('MemTotal', 0):.1f} GiB available"


def facts() -> Iterator[tuple[str, str]]:
    """(name, value) in the order of the text."""
    yield "farandole", f"{package_version()} in {tilde(Path(__file__).resolve().parents[2])}"
    try:
        yield "kernels", kernels()
    except LibraryMissing as error:
        yield "native library", tilde(error)
    yield "python", f"{platform.python_version()} {platform.python_implementation()}, {tilde(sys.executable)}"
    yield "system", f"{_system()}, Linux {platform.release()}, {platform.machine()}, {' '.join(platform.libc_ver())}"
    yield "processor", processor()
    yield "cores", cores()
    yield "memory", memory()
    yield "descriptors", "{} (at most {})".format(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield "network", ", ".join(sorted({one.name for one in interfaces()})) or "no interface is up"
    if driver := first_line(Path("/proc/driver/nvidia/version")):
        yield "nvidia driver", driver.removeprefix("NVRM version: ")
    yield from cuda_facts()
    yield "numpy", version_of("numpy")
    for name in PACKAGES:
        if version := version_of(name):
            yield name, version
    if version := version_of("horovod"):
        yield "horovod", version
    yield "settings", ", ".join(changed()) or "all at their defaults"


def cuda_libraries() -> list[cuda.Library]:
    """What is here of CUDA. Wrong settings count as unset; `changed` reports them. LibraryMissing without the core."""
    return cuda.libraries(_config())


def way(libraries: list[cuda.Library]) -> str:
    """How CUDA tensors travel with these libraries."""
    return cuda.way(libraries, _config())


def gpus() -> list[str]:
    """A line for each GPU, without its number, which would identify the machine; OSError when the driver fails."""
    words = {1: "MPS is on", 0: "MPS is off", -1: "the driver does not report whether MPS is on"}
    found = []
    for gpu in cuda.gpus(_config()):
        slice = ", a slice of MIG" if gpu.slice else ""
        found.append(f"{gpu.name}{slice}, {gpu.bytes / (1 << 30):.1f} GiB, {words[gpu.mps]}")
    return [f"{found.count(one)} x {one}" if found.count(one) > 1 else one for one in dict.fromkeys(found)]


def cuda_facts() -> Iterator[tuple[str, str]]:
    """CUDA's libraries and the GPUs. One line where there is nothing."""
    try:
        libraries = cuda_libraries()
    except LibraryMissing:
        return  # said above
    there = [one for one in libraries if one.source != cuda.Source.NONE]
    for one in there:
        text = f"{one.version or 'unknown version'} in {tilde(one.path)}" + (f": {tilde(one.why)}" if one.why else "")
        yield one.title.lower(), text + (f"; without {one.missing}" if one.missing else "")
    if not libraries[0].usable:
        yield "gpus", f"none: {tilde(libraries[0].why)}"
        return
    try:
        yield "gpus", "; ".join(gpus()) or "none"
    except OSError as error:
        yield "gpus", f"none: {error}"
    yield "cuda tensors", way(libraries)


def _config() -> Config:
    try:
        return Config.from_environment()
    except ValueError:
        return Config()


def changed() -> list[str]:
    """The settings of jobs that the environment sets, without the numbers of a worker."""
    try:
        config = Config.from_environment()
    except ValueError as error:
        return [tilde(error)]
    found = []
    for field in dataclasses.fields(config):
        setting, value = SETTINGS[field.name], getattr(config, field.name)
        private = setting.scope == "worker" or setting.name.startswith("secret")
        if not private and value != setting.default:
            found.append(f"{setting.variable}={tilde(value)}")
    return found


def tilde(text: object) -> str:
    """Replaces the home directory, which contains the user's name, in paths."""
    home = str(Path("~").expanduser())
    return str(text).replace(home, "~") if len(home) > 1 else str(text)


def _system() -> str:
    for line in lines("/etc/os-release"):
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip('"')
    return "Linux"


def processor() -> str:
    """The name of the processor, or what it reports instead."""
    named: dict[str, str] = {}
    for line in lines("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        named.setdefault(name.strip(), value.strip())
    if "model name" in named:
        return named["model name"]
    parts = [f"{name} {named[name]}" for name in ("CPU implementer", "CPU part") if name in named]
    return ARM_PARTS.get(named.get("CPU part", "")) or ", ".join(parts) or platform.machine()


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the text."""
    parser = argparse.ArgumentParser(prog="farandole env", description="Prints what a bug report needs; no secrets.")
    parser.parse_args(arguments)
    lines = [f"{name + ':':<16}{value}" for name, value in facts()]
    print("\n".join(["```", *lines, "```"]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
