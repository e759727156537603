# The checks of `farandole doctor` for one host. Each does a real test and reports the result, or how to correct it.
# Touches memory files, a loopback port, a private directory; removes all of them before it returns.
"""`this_host()` yields one `Check` after the other."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import itertools
import math
import mmap
import os
import platform
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from farandole.base import tested
from farandole.base.errors import LibraryMissing
from farandole.base.version import package_version
from farandole.engine import cuda
from farandole.launch import machine
from farandole.rendezvous import flow, sockets
from farandole.rendezvous.interfaces import interfaces
from farandole.tools import env

OK, NOTE, UNFIT = "ok", "note", "UNFIT"
REPORT = "report this with the output of `farandole env`"
PROBE_SECONDS = 5.0
FEW_DESCRIPTORS = 1024  # each rank has a link to every other rank, and one or two memory files for each neighbour
NEVER_SET = 1_704_067_200  # the start of 2024: a clock with an earlier time was never set


@dataclass(frozen=True)
class Check:
    """One line of the report. `remedy` says what to do if the state is not ok."""

    name: str
    state: str
    found: str
    remedy: str = ""


class Problem(Exception):
    """What is wrong, and the remedy. `note`: jobs can run nevertheless."""

    def __init__(self, found: str, remedy: str, note: bool = False) -> None:
        super().__init__(found)
        self.remedy = remedy
        self.note = note


def this_host() -> Iterator[Check]:
    """All checks, in an order in which a failure explains the next ones."""
    for name, act in CHECKS.items():
        try:
            found = act()
        except Problem as problem:
            yield Check(name, NOTE if problem.note else UNFIT, str(problem), problem.remedy)
        except Exception as error:  # an error in a check is reported, and the other checks continue
            yield Check(name, UNFIT, f"{type(error).__name__}: {error}", REPORT)
        else:
            if found:
                yield Check(name, OK, found)


def python() -> str:
    found = f"{platform.python_version()} ({platform.python_implementation()}, {sys.maxsize.bit_length() + 1} bit)"
    if sys.version_info < (3, 11) or sys.maxsize < 1 << 32:
        raise Problem(found, "use a 64-bit Python from 3.11 on")
    return found


def package() -> str:
    version, installed = package_version(), env.version_of("farandole")
    path = env.tilde(Path(__file__).resolve().parents[2])
    if installed and installed != version:
        remedy = "`python -m pip uninstall farandole`, or leave the checkout out of PYTHONPATH"
        raise Problem(f"{version} is imported from {path}, but {installed} is installed", remedy, note=True)
    return f"farandole {version} in {path}"


def native_library() -> str:
    try:
        return f"loads; kernels: {env.kernels()}"
    except LibraryMissing as error:
        raise Problem(
            str(error), "`python -m pip install --force-reinstall farandole`, or build the checkout"
        ) from None


def numpy() -> str:
    version = env.version_of("numpy")
    if not version or int(version.split(".")[0]) > 2:
        raise Problem(version or "not installed", "`python -m pip install 'numpy>=1.23,<3'`")
    return version


def shared_memory() -> str:
    """Checks memory files, which links inside a host use. They do not need /dev/shm."""
    remedy = "a sandbox forbids memory files: allow memfd_create, or ranks use TCP (FARANDOLE_LINKS=tcp)"
    try:
        fd = os.memfd_create("farandole-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise Problem(f"memfd_create: {error.strerror}", remedy, note=True) from None
    try:
        os.ftruncate(fd, 1 << 20)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with mmap.mmap(fd, 1 << 20) as writer, mmap.mmap(fd, 1 << 20, prot=mmap.PROT_READ) as reader:
            writer[:4] = b"seen"
            if reader[:4] != b"seen":
                raise Problem("what one mapping writes the other does not see", remedy)
    except OSError as error:
        raise Problem(f"memory files cannot be sealed or mapped: {error.strerror}", remedy, note=True) from None
    finally:
        os.close(fd)
    return "memory files, seals, shared mappings"


def watching() -> str:
    """Checks pidfds, by which the death of a rank on this host is noticed immediately."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        remedy = "deaths are still seen when streams end; a kernel from 5.3 on has it, and some sandboxes forbid it"
        raise Problem(f"no pidfd: {error}", remedy, note=True) from None
    return "pidfd"


def descriptors() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEW_DESCRIPTORS:
        raise Problem(
            f"{soft} file descriptors (at most {hard})", f"`ulimit -n {max(4096, FEW_DESCRIPTORS)}`", note=True
        )
    return f"{soft} file descriptors"


def cores() -> str:
    usable, limit = len(os.sched_getaffinity(0)), machine.quota()
    if limit != math.inf and limit < usable:
        remedy = f"start at most {max(1, int(limit))} ranks here, or raise the quota: more are stopped in turn"
        raise Problem(f"{env.cores()}: the quota is less than the cores", remedy, note=True)
    return env.cores()


def memory() -> str:
    return env.memory()


def private_directory() -> str:
    """Checks the directory for unix sockets: it must have mode 0700 and a short path."""
    directory = sockets.private_directory()
    try:
        listener, _ = sockets.listen(f"unix:{directory}/socket")
        listener.close()
    except OSError as error:
        raise Problem(
            f"no unix socket in {directory}: {error}", "set TMPDIR to a local directory you can write"
        ) from None
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return f"unix sockets in {os.path.dirname(directory)}"


def loopback() -> str:
    """Checks a TCP connection on this host, through our own sockets."""
    remedy = "bring the interface `lo` up (`ip link set lo up`) and let a firewall pass 127.0.0.1"
    loop = flow.Loop()
    try:
        listener, address = sockets.listen("tcp:127.0.0.1")
    except OSError as error:
        loop.close()
        raise Problem(f"cannot listen: {error}", remedy) from None
    try:
        began = time.perf_counter()
        caller = loop.finish(sockets.connect(address), time.monotonic() + PROBE_SECONDS)
        answerer = sockets.accept(listener)
        if answerer is None:
            raise Problem("a connection did not arrive", remedy)
        loop.finish(flow.send(caller, b"x"), time.monotonic() + PROBE_SECONDS)
        loop.finish(flow.receive(answerer, 1), time.monotonic() + PROBE_SECONDS)
        took = time.perf_counter() - began
        caller.close()
        answerer.close()
    except (OSError, TimeoutError) as error:
        raise Problem(f"TCP over 127.0.0.1: {error}", remedy) from None
    finally:
        listener.close()
        loop.close()
    return f"TCP over 127.0.0.1 in {took * 1e6:.0f} us"


def network() -> str:
    outer = [one for one in interfaces() if not one.loopback]
    if not outer:
        remedy = "fine for one host; for several, bring an interface up and give it an address"
        raise Problem("no interface but loopback is up", remedy, note=True)
    return ", ".join(f"{one.name} {one.address}" for one in outer)


def clock() -> str:
    if time.time() < NEVER_SET:
        raise Problem(f"the clock says {time.strftime('%Y-%m-%d')}", "set the clock; use NTP", note=True)
    moments = [time.perf_counter() for _ in range(2000)]
    # The median, because on a busy machine some steps are long for another reason.
    step = statistics.median(later - earlier for earlier, later in itertools.pairwise(moments))
    if step > 5e-6:
        source = machine.first_line(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource"))
        raise Problem(f"asking the time takes {step * 1e6:.1f} us ({source})", "choose the clock source tsc", note=True)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, {step * 1e9:.0f} ns to ask"


def frameworks() -> str:
    versions = {name: version for name in tested.TESTED if (version := env.version_of(name))}
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    if older := [line for name, version in versions.items() if (line := tested.too_old_error(name, version))]:
        raise Problem(found, "; ".join(older), note=True)
    newer = [line for name, version in versions.items() if (line := tested.newer_warning(name, version))]
    if newer:
        remedy = f"{'; '.join(newer)}. If it fails, install a tested release, and {REPORT}"
        raise Problem(found, remedy, note=True)
    return found or "none installed; NumPy arrays and DLPack tensors work"


def horovod() -> str:
    """Checks that `import horovod` imports our package."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        files = metadata.distribution("horovod").files or []
        if any(str(file) == "horovod/__init__.py" for file in files):
            version = env.version_of("horovod")
            raise Problem(
                f"Horovod {version} is installed as well: it and Farandole contain the same package `horovod`",
                "`python -m pip uninstall horovod && python -m pip install --force-reinstall --no-deps farandole`",
            )
    spec = importlib.util.find_spec("horovod")
    ours = Path(__file__).resolve().parents[2] / "horovod" / "__init__.py"
    if spec is None or spec.origin is None:
        return "not importable; `import farandole` is"
    if Path(spec.origin).resolve() != ours:
        remedy = "remove it, or move it behind Farandole on sys.path"
        raise Problem(f"`import horovod` finds {spec.origin}", remedy)
    return "`import horovod` is Farandole"


def compiler() -> str:
    """Checks for a C++ compiler, which only torch.compile needs."""
    if not env.version_of("torch"):
        return ""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise Problem("no C++ compiler", "torch.compile needs one: install g++; everything else does not", note=True)
    return "a C++ compiler, for torch.compile"


def ssh() -> str:
    program = shutil.which("ssh")
    if program is None:
        raise Problem("no ssh", "ranks on other hosts need it: install the OpenSSH client", note=True)
    return program


def gpus() -> str:
    """Checks CUDA's driver and names the GPUs. A host without them is fit."""
    try:
        driver, *others = env.cuda_libraries()
        if driver.source == cuda.Source.NONE:
            return f"none: {driver.why}"
        if not driver.usable:
            raise Problem(f"{driver.why} ({driver.path})", "update NVIDIA's driver, or see docs/settings.md", note=True)
        found = env.gpus()
    except LibraryMissing:
        return ""  # "native library" has said it
    except OSError as error:
        remedy = "`nvidia-smi` says more; a container needs its GPUs handed in (docker run --gpus all)"
        raise Problem(f"the driver for CUDA {driver.version} shows none: {error}", remedy, note=True) from None
    way = env.way([driver, *others])
    return f"{'; '.join(found) or 'none'}; the driver is for CUDA {driver.version}; CUDA tensors go {way}"


def nccl() -> str:
    """Checks NCCL and NVRTC, if there is a GPU or a setting for them."""
    try:
        driver, *others = env.cuda_libraries()
    except LibraryMissing:
        return ""
    wrong = [one for one in others if not one.usable and (driver.usable or one.source != cuda.Source.NONE)]
    good = [f"{one.title} {one.version} in {env.tilde(one.path)}" for one in others if one.usable]
    if others[1].aborts_hang:
        good[-1] += ": not used, an abort of this version may hang when a rank dies"
    if wrong:
        text = "; ".join([*good, *(f"{one.title}: {one.why}" for one in wrong)])
        remedy = "NVRTC compiles the kernels, NCCL connects GPUs of several hosts; FARANDOLE_NCCL_LIBRARY and "
        raise Problem(text, remedy + "FARANDOLE_NVRTC_LIBRARY name a file", note=True)
    return "; ".join(good)


CHECKS: dict[str, Callable[[], str]] = {
    "python": python,
    "package": package,
    "native library": native_library,
    "numpy": numpy,
    "frameworks": frameworks,
    "gpus": gpus,
    "nccl": nccl,
    "horovod": horovod,
    "compiler": compiler,
    "shared memory": shared_memory,
    "watching": watching,
    "descriptors": descriptors,
    "cores": cores,
    "memory": memory,
    "unix sockets": private_directory,
    "loopback": loopback,
    "network": network,
    "ssh": ssh,
    "clock": clock,
}
