# Builds that do not fit refuse each other: a library beside an extension of another header, ranks of other messages.
# Touches a compiler, copies of core/, the objects of the build, and ranks as processes.
"""The numbers that CMakeLists.txt makes of the sources."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from farandole import bridge
from farandole.compiled import _interface
from farandole.native import LIBRARY, load

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "core" / "api" / "farandole.h"
OBJECTS = ROOT / "build" / "checkout" / "CMakeFiles" / "farandole_core.dir" / "core"
CXX = ["c++", "-std=c++20", "-O0", "-fPIC", "-shared", "-fvisibility=hidden"]


def numbers(sources: Path, build: Path) -> dict[str, str]:
    """What CMake makes of these sources."""
    cmake = [str(Path(sys.executable).with_name("cmake")), "-G", "Ninja", "-S", str(sources), "-B", str(build)]
    ninja = Path(sys.executable).with_name("ninja")
    subprocess.run([*cmake, f"-DCMAKE_MAKE_PROGRAM={ninja}"], check=True, capture_output=True)
    found = re.findall(r"^FARANDOLE_(INTERFACE|WIRE):INTERNAL=(0x\w+)$", (build / "CMakeCache.txt").read_text(), re.M)
    return dict(found)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources with one more field in a struct of the C interface, and one more in a message."""
    place = tmp_path_factory.mktemp("changed")
    for name in ("CMakeLists.txt", "VERSION"):
        shutil.copy(ROOT / name, place)
    shutil.copytree(ROOT / "core", place / "core")
    header, frame = place / "core" / "api" / "farandole.h", place / "core" / "wire" / "frame.h"
    header.write_text(
        header.read_text().replace("int64_t output_bytes; /*", "int64_t one_more;\n  int64_t output_bytes; /*")
    )
    frame.write_text(
        frame.read_text().replace("std::uint32_t generation = 0;", "std::uint32_t generation = 0, more = 0;")
    )
    assert (
        header.read_bytes() != HEADER.read_bytes() and frame.read_bytes() != (ROOT / "core/wire/frame.h").read_bytes()
    )
    return place


def test_an_extension_of_another_header_is_refused(changed: Path, tmp_path: Path) -> None:
    ours, theirs = numbers(ROOT, tmp_path / "ours"), numbers(changed, tmp_path / "theirs")
    assert f"0x{_interface(HEADER)}" == ours["INTERFACE"] != theirs["INTERFACE"]
    include = [f"-I{changed / 'core'}", f"-I{sysconfig.get_path('include')}"]
    define = ["-DPy_LIMITED_API=0x030B0000", f"-DFARANDOLE_INTERFACE={theirs['INTERFACE']}"]
    sources = sorted(str(path) for path in (changed / "core" / "python").glob("*.cc"))
    subprocess.run([*CXX, *include, *define, *sources, "-o", str(tmp_path / "bridge.abi3.so")], check=True)
    program = f"""
import importlib.machinery, importlib.util
loader = importlib.machinery.ExtensionFileLoader("bridge", {str(tmp_path / "bridge.abi3.so")!r})
other = importlib.util.module_from_spec(importlib.util.spec_from_loader("bridge", loader))
try:
    other.Library({str(LIBRARY)!r})
except ImportError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    for number in (ours["INTERFACE"], theirs["INTERFACE"]):
        assert number.removeprefix("0x") in said, said
    assert "different builds" in said
    bridge.Library(str(LIBRARY))  # ours fits


@pytest.mark.ranks
def test_ranks_of_another_wire_form_no_job(changed: Path, tmp_path: Path) -> None:
    theirs = numbers(changed, tmp_path / "theirs")["WIRE"]
    ours = f"{load().wire:016x}"
    assert int(theirs, 16) != load().wire
    version = (ROOT / "VERSION").read_text().strip()
    define = [
        f'-DFARANDOLE_VERSION="{version}"',
        f"-DFARANDOLE_INTERFACE=0x{_interface(HEADER)}",
        f"-DFARANDOLE_WIRE={theirs}",
    ]
    other = tmp_path / "libfarandole.so"
    rest = [str(path) for path in OBJECTS.rglob("*.o") if path.name != "farandole.cc.o"]
    source = str(ROOT / "core" / "api" / "farandole.cc")
    subprocess.run([*CXX, f"-I{ROOT / 'core'}", *define, source, *rest, "-o", str(other), "-lpthread"], check=True)
    script = tmp_path / "rank.py"
    script.write_text(
        "import os\n"
        f"if os.environ['FARANDOLE_RANK'] == '1': os.environ['FARANDOLE_LIBRARY'] = {str(other)!r}\n"
        "import farandole\n"
        "try:\n    farandole.init()\nexcept Exception as error:\n    print('refused:', error)\n"
    )
    command = [sys.executable, "-m", "farandole", "run", "-np", "2", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    refused = [line for line in done.stdout.splitlines() if "refused:" in line]
    assert len(refused) == 2, done.stdout + done.stderr
    for line in refused:
        assert ours in line and theirs.removeprefix("0x") in line and "install the same build" in line, line
