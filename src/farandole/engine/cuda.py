# Which of CUDA's libraries and which GPUs are here. It looks when it is asked, and an import of it loads nothing.
# Touches config, errors, the core by library.py, and the folders of Python's packages.
"""`libraries()` and `gpus()` are for reports; `enable()` lets an engine use GPUs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from ..base.config import Config, cache_directory
from .library import load


class Source(IntEnum):
    """Where a copy of a library comes from."""

    NONE = 0
    PROCESS = 1
    SETTING = 2
    PACKAGE = 3
    SYSTEM = 4


@dataclass(frozen=True)
class _Kind:
    title: str
    setting: str  # the attribute of Config
    pattern: str  # of its files below a folder of packages; "" where no package brings it


# The order is that of the C interface. NVIDIA's packages put their libraries into nvidia/NAME/lib.
_KINDS = (
    _Kind("CUDA driver", "cuda_library", ""),
    _Kind("NVRTC", "nvrtc_library", "nvidia/*/lib/libnvrtc.so.*"),
    _Kind("NCCL", "nccl_library", "nvidia/nccl/lib/libnccl.so.2"),
)

_USES = ("auto", "on", "off")  # of the setting nccl, in the order of the C interface


@dataclass(frozen=True)
class Library:
    """What was found of one library; `why` says why it cannot be used."""

    title: str
    usable: bool
    source: Source
    code: int  # the version as the library counts: 13000, 22809; 0: unknown
    path: str
    why: str
    missing: str  # functions that it does not have

    @property
    def version(self) -> str:
        """As people write it; "" when it is unknown."""
        if not self.code:
            return ""
        if self.title == "NCCL":
            return f"{self.code // 10000}.{self.code % 10000 // 100}.{self.code % 100}"
        return f"{self.code // 1000}.{self.code % 1000 // 10}"

    @property
    def aborts_hang(self) -> bool:
        """Whether an abort of this NCCL may hang when a rank has died; as in core/cuda/nccl.h."""
        return self.title == "NCCL" and 22501 <= self.code < 22602


@dataclass(frozen=True)
class Gpu:
    """What the driver says about one GPU."""

    name: str
    uuid: str  # "GPU-..." or "MIG-..."
    bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    slice: int  # 1: a part of a GPU that MIG divides
    mps: int  # 1: processes share it under MPS; -1: the driver does not report it
    stream_operations: int
    exports_memory: int


def libraries(config: Config) -> list[Library]:
    """The driver, NVRTC and NCCL, loaded here and now; LibraryMissing without the core."""
    core = load(config.library)
    found = []
    for which, kind in enumerate(_KINDS):
        usable, source, code, path, why, missing = core.cuda_library(which, _places(kind, config))
        found.append(Library(kind.title, usable, Source(source), code, path, why, missing))
    return found


def gpus(config: Config) -> list[Gpu]:
    """The GPUs that this process may use. Starts CUDA's driver here; OSError says why there are none."""
    return [Gpu(**facts) for facts in load(config.library).cuda_devices(_places(_KINDS[0], config))]


def enable(engine: Any, config: Config) -> str:
    """Lets requests of this engine have memory of GPUs. Gives the reason why they cannot, or an empty string."""
    if config.gpu == "host":
        return "the setting gpu is host"
    if not hasattr(engine, "use_gpus"):
        return "the engine in Python works on host memory alone"
    use_nccl, start_ms = _USES.index(config.nccl), max(1, int(1000 * config.start_timeout))
    try:
        engine.use_gpus(
            *(_places(kind, config) for kind in _KINDS),
            use_nccl,
            start_ms,
            str(Path(cache_directory(config), "kernels")),
        )
    except OSError as error:
        return str(error)
    return ""


def nccl_version(libraries: list[Library], config: Config) -> int:
    """The version of NCCL that CUDA tensors may travel by, as the library counts; 0: they cannot."""
    usable = all(one.usable for one in libraries) and config.gpu != "host" and config.nccl != "off"
    return libraries[-1].code if usable and not libraries[-1].aborts_hang else 0


def way(libraries: list[Library], config: Config) -> str:
    """How CUDA tensors travel with these libraries."""
    driver, nvrtc, _ = libraries
    why = "" if driver.usable and nvrtc.usable else (driver.why or nvrtc.why)
    if config.gpu == "host":
        why = "the setting gpu is host"
    if why:
        return f"through host memory: {why}"
    by_nccl = nccl_version(libraries, config) != 0
    between = "by NCCL where each rank has a GPU of its own" if by_nccl else "through host memory"
    return f"on the GPU between ranks of one host, between hosts {between}"


def _places(kind: _Kind, config: Config) -> list[tuple[int, str]]:
    """Where a copy may lie, in the order of preference."""
    chosen = getattr(config, kind.setting)
    if chosen:
        return [(Source.SETTING, str(chosen))]
    return [(Source.PACKAGE, str(path)) for path in _packaged(kind.pattern)] if kind.pattern else []


def _packaged(pattern: str) -> Iterator[Path]:
    """The files of Python's packages, the newest of a folder first."""
    for folder in dict.fromkeys(sys.path):
        files = [path for path in Path(folder or ".").glob(pattern) if re.fullmatch(r".*\.so\.[0-9.]+", path.name)]
        yield from sorted(files, key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)], reverse=True)
