# Different builds refuse each other: a library and an extension from different headers, ranks with other messages.
# Touches a compiler, copies of core/, the objects of the build, and ranks as processes.
"""The numbers that CMakeLists.txt makes of the sources."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from farandole.base import errors
from farandole.base.config import Config
from farandole.bindings.compiled import _interface
from farandole.engine import bridge, library, native
from farandole.engine.library import LIBRARY, load
from farandole.world import joining

ROOT = Path(__file__).parents[3]
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
    path = tmp_path_factory.mktemp("changed")
    for name in ("CMakeLists.txt", "VERSION"):
        shutil.copy(ROOT / name, path)
    shutil.copytree(ROOT / "core", path / "core")
    header, frame = path / "core" / "api" / "farandole.h", path / "core" / "wire" / "frame.h"
    header.write_text(
        header.read_text().replace("int64_t output_bytes; /*", "int64_t one_more;\n  int64_t output_bytes; /*")
    )
    frame.write_text(
        frame.read_text().replace("std::uint32_t generation = 0;", "std::uint32_t generation = 0, more = 0;")
    )
    assert (
        header.read_bytes() != HEADER.read_bytes() and frame.read_bytes() != (ROOT / "core/wire/frame.h").read_bytes()
    )
    return path


@pytest.mark.slow
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
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    for number in (ours["INTERFACE"], theirs["INTERFACE"]):
        assert number.removeprefix("0x") in output, output
    assert "different builds" in output
    bridge.Library(str(LIBRARY))  # ours fits


ROOMS = ("base", "collective", "engine", "group", "link", "negotiate", "wire")


@pytest.mark.slow
def test_every_file_that_makes_or_reads_messages_changes_the_protocol_version(changed: Path, tmp_path: Path) -> None:
    known = {numbers(changed, tmp_path / "build")["WIRE"]}
    files = ["engine/transfers.cc", "engine/follow.cc", "engine/group.cc", "engine/execute.cc"]
    files += ["engine/member_groups.cc", "engine/incoming.cc", "engine/drive.cc", "engine/tuning.h"]
    files += [f"{room}/{sorted(path.name for path in (changed / 'core' / room).iterdir())[0]}" for room in ROOMS]
    for file in files:
        path = changed / "core" / file
        before = path.read_bytes()
        path.write_bytes(before + b"// another\n")
        found = numbers(changed, tmp_path / "build")["WIRE"]
        path.write_bytes(before)
        assert found not in known, file
        known.add(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("base/dtype.h", "uint8 = 1,\n  int8 = 2", "int8 = 1,\n  uint8 = 2"),
        ("base/dtype.h", "bfloat16 = 10,", "bfloat16 = 10,\n  more = 11,"),
        ("base/kind.h", "allreduce = 0,\n  allgather = 1", "allgather = 0,\n  allreduce = 1"),
        ("base/error.h", "revoked = 7", "revoked = 17"),
        ("collective/collective.h", "ring = 1, direct = 2", "direct = 1, ring = 2"),
        ("api/farandole.h", "X(int8, INT8, 2, 1)", "X(int8, INT8, 2, 2)"),
        ("", "", ""),
    ],
)
def test_the_core_does_not_compile_with_other_numbers_than_its_interface(
    tmp_path: Path, file: str, old: str, new: str
) -> None:
    core = tmp_path / "core"
    shutil.copytree(ROOT / "core", core)
    text = (core / file).read_text() if file else ""
    assert old in text
    if file:
        (core / file).write_text(text.replace(old, new).replace("kDTypes = 11", f"kDTypes = {11 + ('more' in new)}"))
    command = ["c++", "-std=c++20", "-fsyntax-only", f"-I{core}", str(core / "api" / "numbers.cc")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode == 0) is not bool(file), done.stderr
    assert not file or "static assertion failed" in done.stderr or "static_assert" in done.stderr, done.stderr


def test_an_extension_with_other_numbers_than_the_package_is_refused() -> None:
    library.check_numbers(bridge.NUMBERS)
    swapped = {**bridge.NUMBERS, "DType": {**bridge.NUMBERS["DType"], "INT8": 1, "UINT8": 2}}
    with pytest.raises(ImportError, match=r"DType\.INT8 is 2 in .* and 1 in .*; DType\.UINT8 is 1 in .* and 2 in "):
        library.check_numbers(swapped)
    with pytest.raises(ImportError, match="a different build"):
        library.check_numbers({})  # an extension that has no numbers
    assert {name: getattr(errors, name) for name in bridge.NUMBERS["Code"]} == bridge.NUMBERS["Code"]


def test_an_engine_for_another_caller_is_refused_with_both_numbers() -> None:
    core = ctypes.CDLL(str(LIBRARY))
    core.farandole_interface.restype = ctypes.c_uint64
    engine, words = ctypes.c_void_p(), ctypes.create_string_buffer(1024)
    options = ctypes.create_string_buffer((0x1234).to_bytes(8, sys.byteorder), 1024)
    code = core.farandole_create(options, ctypes.byref(engine), words, ctypes.c_size_t(len(words)))
    text = words.value.decode()
    assert code == errors.INVALID_ARGUMENT and not engine
    for word in (f"{core.farandole_interface():016x}", f"{0x1234:016x}", "different builds", "Install farandole again"):
        assert word in text, text


@pytest.mark.parametrize("number", ["0x1234", ""])
def test_operations_for_another_core_are_refused_with_both_numbers(tmp_path: Path, number: str) -> None:
    path = tmp_path / "operations.so"
    tells = f'extern "C" unsigned long long farandole_compiled_for() {{ return {number}; }}' if number else ""
    (tmp_path / "operations.cc").write_text(
        tells + 'extern "C" int farandole_attach(unsigned long long, const void*, void*, int, int) { return 1; }'
    )
    subprocess.run(["c++", "-fPIC", "-shared", str(tmp_path / "operations.cc"), "-o", str(path)], check=True)
    engine = native.NativeEngine(Config(), 0, [0])
    try:
        with pytest.raises(ImportError) as caught:
            bridge.Operations(str(path), engine)
    finally:
        engine.close()
    text = str(caught.value)
    for word in (str(path), f"{int(number or '0', 16):016x}", _interface(HEADER), "different builds", "remove"):
        assert word in text, text


def test_the_engine_in_python_has_a_wire_of_its_own_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(engine="python")
    ours = joining.wire_version(config)
    assert re.fullmatch(r"python-[0-9a-f]{16}", ours)
    for name in joining.PYTHON_WIRE:
        shutil.copy(joining.PYTHON_ENGINE / name, tmp_path)
    monkeypatch.setattr(joining, "PYTHON_ENGINE", tmp_path)
    assert joining.wire_version(config) == ours
    for name in joining.PYTHON_WIRE:
        (tmp_path / name).write_text("another = 1\n")
        assert joining.wire_version(config) != ours
        shutil.copy(ROOT / "src" / "farandole" / "engine" / name, tmp_path)


@pytest.fixture(scope="module")
def other_wire(changed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A library that differs from ours in its wire alone, and that."""
    place = tmp_path_factory.mktemp("other")
    wire = numbers(changed, place / "theirs")["WIRE"]
    assert int(wire, 16) != load().wire
    version = (ROOT / "VERSION").read_text().strip()
    define = [
        f'-DFARANDOLE_VERSION="{version}"',
        f"-DFARANDOLE_INTERFACE=0x{_interface(HEADER)}",
        f"-DFARANDOLE_WIRE={wire}",
    ]
    other = place / "libfarandole.so"
    rest = [str(path) for path in OBJECTS.rglob("*.o") if path.name != "farandole.cc.o"]
    source = str(ROOT / "core" / "api" / "farandole.cc")
    subprocess.run([*CXX, f"-I{ROOT / 'core'}", *define, source, *rest, "-o", str(other), "-lpthread"], check=True)
    return other, wire.removeprefix("0x")


def ranks(folder: Path, flags: list[str], script: str) -> tuple[int, str]:
    (folder / "rank.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "farandole", "run", *flags, sys.executable, str(folder / "rank.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout + done.stderr


REFUSED = """
import os
if os.environ['FARANDOLE_{which}'] == '1': os.environ['FARANDOLE_LIBRARY'] = {other!r}
import farandole
try:
    farandole.init()
except Exception as error:
    print('refused:', os.environ['FARANDOLE_{which}'], error)
    raise SystemExit(1)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("flags", [[], ["--min-np", "2"]], ids=["fixed", "elastic"])
def test_ranks_with_another_protocol_version_cannot_join(
    other_wire: tuple[Path, str], tmp_path: Path, flags: list[str]
) -> None:
    other, theirs = other_wire
    ours = f"{load().wire:016x}"
    which = "LOCAL_RANK" if flags else "RANK"
    code, text = ranks(tmp_path, ["-np", "2", *flags], REFUSED.format(which=which, other=str(other)))
    assert code != 0
    refused = [line for line in text.splitlines() if "refused:" in line]
    assert {line.split("refused: ")[1][0] for line in refused} == {"0", "1"}, text
    for line in refused:
        for word in (ours, theirs, "install the same build", "on localhost has", "on localhost (protocol"):
            assert word in line, line
