"""`make wheel`: builds wheels for two platforms with a cross compiler from the package registry, checks and tries them;
and `horovod` and `lightning-horovod`, which hold no code. Writes dist/ and build/; starts compiler, pip, ranks."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from elftools.elf.dynamic import DynamicSection  # comes with auditwheel
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from stages import ROOT

PYTHON = Path(sys.executable)
DIST = ROOT / "dist"
WORK = ROOT / "build" / "wheel"
PLATFORMS = ("x86_64", "aarch64")
GLIBC = "2.28"
TAG = "manylinux_2_28"
PYTHONS = "cp311-abi3"  # Python 3.11 and later
# For packages that depend on the distribution `horovod`: the version of Horovod that we replace, and its extras, which
# install the frameworks that have a binding.
REPLACEMENT_VERSION = "0.28.1+farandole"
EXTRAS = {
    "all-frameworks": ["torch>=2.9.1"],
    "tensorflow": [],
    "tensorflow-cpu": [],
    "tensorflow-gpu": [],
    "keras": [],
    "pytorch": ["torch>=2.9.1"],
    "mxnet": ["mxnet==1.9.1", "numpy<1.24"],
    "spark": [],
    "pytorch-spark": ["torch>=2.9.1"],
    "ray": [],
    "dev": [],
    "test": [],
}
# The same for `lightning-horovod`, whose only versions were pre-releases of this one.
LIGHTNING_REPLACEMENT_VERSION = "0.1.0+farandole"
TRIAL = """
import horovod, lightning_horovod, sys
assert "torch" not in sys.modules
from horovod.common.process_sets import ProcessSet
assert horovod.__version__ == "0.28.1"
import numpy, farandole
farandole.init()
assert farandole.size() == 2
total = farandole.allreduce(numpy.arange(5, dtype=numpy.float32) + farandole.rank(), op=farandole.Sum)
assert total.tolist() == [1, 3, 5, 7, 9], total
print("rank", farandole.rank(), "of", farandole.size(), "has the sum")
farandole.shutdown()
"""


def run(command: list[str | Path], log: Path | None = None, **environment: str) -> str:
    """Returns the output of a command. If the command fails, the script prints the output and ends."""
    result = subprocess.run(
        [str(part) for part in command],
        cwd=WORK,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if log is not None:
        log.write_text(result.stdout)
    if result.returncode != 0:
        print("\n".join(result.stdout.splitlines()[-60:]), file=sys.stderr)
        sys.exit(f"wheel: failed: {' '.join(str(part) for part in command)}")
    return result.stdout


def toolchain(machine: str) -> Path:
    """Writes a CMake toolchain file and its compiler wrappers. zig links its C++ library statically."""
    folder = WORK / f"zig-{machine}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, command in {"c++": f"c++ -target {machine}-linux-gnu.{GLIBC}", "ar": "ar", "ranlib": "ranlib"}.items():
        wrapper = folder / f"zig-{name}"
        wrapper.write_text(f'#!/bin/sh\nexec "{PYTHON}" -m ziglang {command} "$@"\n')
        wrapper.chmod(0o755)
    text = f"""set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR {machine})
set(CMAKE_CXX_COMPILER "{folder / "zig-c++"}")
set(CMAKE_AR "{folder / "zig-ar"}")
set(CMAKE_RANLIB "{folder / "zig-ranlib"}")
set(CMAKE_SHARED_LINKER_FLAGS_INIT "-s")
"""
    path = folder / "toolchain.cmake"
    path.write_text(text)
    return path


def build(machine: str) -> Path:
    """Builds the wheel of one platform, for Python 3.11 and later and for systems with this glibc or a newer one."""
    target = WORK / f"out-{machine}"
    shutil.rmtree(target, ignore_errors=True)
    command: list[str | Path] = [PYTHON, "-m", "build", "--wheel", "--no-isolation", "--outdir", target, ROOT]
    command += [f"-Ccmake.define.CMAKE_TOOLCHAIN_FILE={toolchain(machine)}", f"-Cbuild-dir={WORK / f'cmake-{machine}'}"]
    # The linker strips, because the machine's strip does not support the other platform.
    command += [f"-Cwheel.tags={PYTHONS}-{TAG}_{machine}", "-Cinstall.strip=false"]
    run(
        command,
        log=WORK / f"build-{machine}.log",
        ZIG_GLOBAL_CACHE_DIR=str(WORK / "zig-cache"),
        ZIG_LOCAL_CACHE_DIR=str(WORK / "zig-cache"),
        CMAKE_GENERATOR="Ninja",
    )
    (wheel,) = target.glob("*.whl")
    DIST.mkdir(exist_ok=True)
    return Path(shutil.move(wheel, DIST / wheel.name))


def check(wheel: Path, machine: str) -> None:
    """Checks the tag, that the core and the extension module are inside, and that they export only their interfaces."""
    assert wheel.name.endswith(f"-{PYTHONS}-{TAG}_{machine}.whl"), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        libraries = {name: archive.read(name) for name in sorted(archive.namelist()) if name.endswith(".so")}
        assert list(libraries) == ["farandole/engine/_native/libfarandole.so", "farandole/engine/bridge.abi3.so"], list(
            libraries
        )
        for package in ("horovod", "lightning_horovod"):
            assert f"{package}/__init__.py" in archive.namelist(), f"the package `{package}` is missing"
    core, bridge = (_symbols(content, machine) for content in libraries.values())
    unexpected = [name for name in core if not name.startswith("farandole_")]
    assert not unexpected, f"exported by mistake: {unexpected[:10]}"
    assert not any("chaos" in name for name in core), "the fault injector is for tests alone"
    assert bridge == ["PyInit_bridge"], bridge
    # What the symbols need. The tag may name a newer platform, but not an older one.
    report = run([PYTHON, "-m", "auditwheel", "show", wheel])
    needs = re.search(rf'platform tag:\s+"manylinux_2_(\d+)_{machine}"', report)
    assert needs is not None and int(needs.group(1)) <= 28, report
    size = wheel.stat().st_size / 1e6
    print(
        f"wheel: {wheel.relative_to(ROOT)}: {size:.1f} MB, {len(core)} symbols, fits manylinux_2_{needs.group(1)}",
        flush=True,
    )


def _symbols(library: bytes, machine: str) -> list[str]:
    """The symbols that a library exports. The library must not need a C++ library of the system."""
    elf = ELFFile(io.BytesIO(library))
    expected = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}[machine]
    assert elf["e_machine"] == expected, elf["e_machine"]
    table, dynamic = elf.get_section_by_name(".dynsym"), elf.get_section_by_name(".dynamic")
    assert isinstance(table, SymbolTableSection) and isinstance(dynamic, DynamicSection)
    needed = [str(vars(tag)["needed"]) for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"]
    assert not any("stdc++" in name or "libc++" in name for name in needed), needed
    return [s.name for s in table.iter_symbols() if s.name and s["st_shndx"] != "SHN_UNDEF"]


def replacement_package(folder: Path = DIST) -> Path:
    """Builds the wheel `horovod`, which has only metadata and depends on farandole; for private indexes."""
    lines = ["Summary: Replaces Horovod: the package `horovod` comes with farandole."]
    lines += [f"Requires-Dist: farandole>={(ROOT / 'VERSION').read_text().strip()}"]
    for extra, needs in EXTRAS.items():
        lines += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {need}; extra == "{extra}"' for need in needs)]
    return metadata_wheel("horovod", REPLACEMENT_VERSION, lines, folder)


def lightning_replacement_package(folder: Path = DIST) -> Path:
    """Builds the wheel `lightning-horovod` in the same way."""
    lines = ["Summary: Replaces lightning-horovod: the package `lightning_horovod` comes with farandole."]
    lines += [f"Requires-Dist: farandole[lightning]>={(ROOT / 'VERSION').read_text().strip()}"]
    return metadata_wheel("lightning-horovod", LIGHTNING_REPLACEMENT_VERSION, lines, folder)


def metadata_wheel(name: str, version: str, more: list[str], folder: Path) -> Path:
    """Builds a wheel without code."""
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += ["License: Apache-2.0", "Requires-Python: >=3.11", *more]
    distribution = f"{name.replace('-', '_')}-{version}"
    inside = f"{distribution}.dist-info"
    files = {
        f"{inside}/METADATA": "\n".join(lines) + "\n",
        f"{inside}/WHEEL": "Wheel-Version: 1.0\nGenerator: farandole\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(text.encode())}\n"
    files[f"{inside}/RECORD"] = record + f"{inside}/RECORD,,\n"
    folder.mkdir(exist_ok=True)
    path = folder / f"{distribution}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            # A fixed date, so that the same source gives the same file.
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), text)
    return path


def trial(wheel: Path, horovod: Path) -> None:
    """Installs the wheels with only NumPy in a new environment and runs an allreduce between two ranks there."""
    fresh = WORK / "bare"
    shutil.rmtree(fresh, ignore_errors=True)
    run([PYTHON, "-m", "venv", fresh])
    # Variables that chose what Horovod compiles are accepted and have no effect.
    install: list[str | Path] = [fresh / "bin" / "python", "-m", "pip", "install", "--quiet", wheel, horovod]
    run(install, HOROVOD_WITH_PYTORCH="1", HOROVOD_GPU_OPERATIONS="NCCL")
    run([fresh / "bin" / "python", "-m", "pip", "check"])
    script = WORK / "trial.py"
    script.write_text(TRIAL)
    began = time.monotonic()
    command: list[str | Path] = [fresh / "bin" / "horovodrun", "-np", "2", fresh / "bin" / "python", script]
    output = run(command, PYTHONPATH="")
    assert output.count("has the sum") == 2, output
    print(f"wheel: two ranks in a bare environment agreed, {time.monotonic() - began:.1f} s")
    output = run([fresh / "bin" / "farandole", "doctor"], PYTHONPATH="")
    assert output.splitlines()[-1].startswith("fit") and "latency" in output, output
    assert "python:" in run([fresh / "bin" / "farandole", "env"], PYTHONPATH="")
    output = run([fresh / "bin" / "farandole", "bench", "--quick", "collectives", "life"], PYTHONPATH="")
    assert "init and shutdown" in output and "allreduce 2 ranks 1 MiB reused" in output, output


def main() -> None:
    """Builds both platforms; `here`: only this machine's, which is also tried; `compile`: only the slow part."""
    WORK.mkdir(parents=True, exist_ok=True)
    arguments = sys.argv[1:]
    machines = [machine for machine in PLATFORMS if "here" not in arguments or machine == platform.machine()]
    if "compile" in arguments:
        for machine in machines:
            build(machine)
        return
    wheels = {}
    for machine in machines:
        print(f"wheel: compiling for {machine}, glibc {GLIBC} (a minute or two the first time)", flush=True)
        wheels[machine] = build(machine)
        check(wheels[machine], machine)
    horovod = replacement_package()
    for path in (horovod, lightning_replacement_package()):
        print(f"wheel: {path.relative_to(ROOT)}: no code, requires farandole")
    here = platform.machine()
    if here in wheels and sys.platform == "linux":
        trial(wheels[here], horovod)
    else:
        print(f"wheel: no wheel for {here} is built, so none was tried")


if __name__ == "__main__":
    main()
