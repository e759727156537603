# CUDA's libraries and GPUs as the package finds them, and what doctor, env and --check-build say about them.
# Touches processes, the stand-ins for CUDA's libraries in build/checkout/standins.
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.engine import cuda
from farandole.tools import checks, env

ROOT = Path(__file__).resolve().parents[2]
STANDINS = ROOT / "build" / "checkout" / "standins"
HERE = {
    "FARANDOLE_CUDA_LIBRARY": str(STANDINS / "libcuda.so.1"),
    "FARANDOLE_NVRTC_LIBRARY": str(STANDINS / "libnvrtc.so.13"),
    "FARANDOLE_NCCL_LIBRARY": str(STANDINS / "libnccl.so.2"),
}
TELL = """
from farandole.tools import checks
for act in (checks.gpus, checks.nccl):
    try:
        print(act())
    except checks.Problem as problem:
        print("note" if problem.note else "unfit", problem, "->", problem.remedy)
"""


def run(code: str, **variables: str) -> str:
    """Runs code in a separate process, because a loaded library stays; returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done
    return done.stdout


def test_importing_farandole_loads_no_library_and_nccl_is_built_where_it_may_be_used() -> None:
    code = """
import farandole
maps = open("/proc/self/maps").read()
print(any(name in maps for name in ("libcuda", "libnccl", "libnvrtc")), farandole.cuda_built())
print(farandole.nccl_built())
"""
    assert run(code, **HERE) == "False False\n22809\n"
    for variables in (
        {"FARANDOLE_NCCL": "off"},
        {"FARANDOLE_GPU": "host"},
        {"FARANDOLE_NCCL_LIBRARY": "/nowhere"},
        {"STANDIN_NCCL_VERSION": "22501"},
    ):
        assert run(code, **{**HERE, **variables}).endswith("\n0\n"), variables


def test_doctor_names_gpus_and_libraries_and_which_way_tensors_take() -> None:
    gpus, nccl = run(TELL, **HERE, STANDIN_CUDA_DEVICES="2", STANDIN_CUDA_MPS="1").splitlines()
    assert gpus == (
        "2 x NVIDIA H200, 140.0 GiB, MPS is on; the driver is for CUDA 13.0; CUDA tensors go on the GPU between ranks "
        "of one host, between hosts by NCCL where each rank has a GPU of its own"
    )
    assert nccl.startswith("NVRTC 13.0 in ") and nccl.endswith("libnccl.so.2"), nccl
    assert "NCCL 2.28.9 in " in nccl
    gpus = run(TELL, **HERE, STANDIN_CUDA_NAME="NVIDIA H200 MIG 1g.18gb", STANDIN_CUDA_MPS="-1").splitlines()[0]
    assert gpus.startswith("NVIDIA H200 MIG 1g.18gb, a slice of MIG, 140.0 GiB, the driver does not report whether MPS")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"STANDIN_CUDA_VERSION": "9020"}, "note the driver for CUDA 9.2 is too old: 10.2 or newer is needed"),
        (
            {"STANDIN_CUDA_INIT": "803"},
            "shows none: cuInit fails with CUDA_ERROR_SYSTEM_DRIVER_MISMATCH -> `nvidia-smi`",
        ),
        ({"STANDIN_CUDA_INIT": "100"}, "none; the driver is for CUDA 13.0"),
        (
            {"STANDIN_NCCL_VERSION": "21706"},
            "NCCL: NCCL 2.17.6 is too old: 2.18.0 or newer is needed -> NVRTC compiles",
        ),
        ({"STANDIN_NCCL_VERSION": "22501"}, "libnccl.so.2: not used, an abort of this version may hang"),
        ({"FARANDOLE_NCCL_LIBRARY": "/nowhere"}, "NCCL: /nowhere: cannot open shared object file"),
    ],
)
def test_doctor_explains_what_cannot_be_used(variables: dict[str, str], message: str) -> None:
    output = run(TELL, **{**HERE, **variables})
    assert message in output and "unfit" not in output, output


def test_a_host_without_cuda_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"CUDA driver": "libcuda.so.1", "NVRTC": "libnvrtc.so.13", "NCCL": "libnccl.so.2"}
    none = [
        cuda.Library(title, False, cuda.Source.NONE, 0, "", f"there is no {name}", "") for title, name in names.items()
    ]
    monkeypatch.setattr(env, "cuda_libraries", lambda: none)
    assert checks.gpus() == "none: there is no libcuda.so.1" and checks.nccl() == ""
    assert list(env.cuda_facts()) == [("gpus", "none: there is no libcuda.so.1")]


def test_env_and_check_build_name_what_is_here() -> None:
    command = "import sys; from farandole.launch.cli import main; sys.exit(main({}))"
    lines = run(command.format(["env"]), **HERE, STANDIN_NCCL_VERSION="22705").splitlines()
    assert f"cuda driver:    13.0 in {env.tilde(STANDINS / 'libcuda.so.1')}" in lines, lines
    assert "gpus:           NVIDIA H200, 140.0 GiB, MPS is off" in lines
    way = "on the GPU between ranks of one host, between hosts by NCCL where each rank has a GPU of its own"
    assert f"cuda tensors:   {way}" in lines
    (nccl,) = [line for line in lines if line.startswith("nccl:")]
    assert nccl.endswith("libnccl.so.2; without ncclAlltoAll (since 2.28.3), ncclCommRevoke (since 2.28.7)")
    table = run(command.format(["run", "--check-build"]), **HERE)
    assert f"[X] NCCL  (2.28.9 is found in {STANDINS}/libnccl.so.2; CUDA tensors go on the GPU" in table
    assert "[X] Gloo" in table
    table = run(command.format(["run", "--check-build"]), **HERE, STANDIN_NCCL_VERSION="20905")
    assert "[ ] NCCL  (NCCL 2.9.5 is too old" in table and "between hosts through host memory" in table


def test_packages_of_python_bring_libraries_and_the_newest_comes_first(tmp_path: Path) -> None:
    for package, name, source in (
        ("nccl", "libnccl.so.2", "libnccl.so.2"),
        ("cuda_nvrtc", "libnvrtc.so.12", "nothing"),
        ("cuda_nvrtc", "libnvrtc.so.13", "libnvrtc.so.13"),
        ("cuda_nvrtc", "libnvrtc.so.9.alt", "nothing"),
    ):
        folder = tmp_path / "nvidia" / package / "lib"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(STANDINS / source)
    code = f"""
import sys
from farandole.base.config import Config
from farandole.engine import cuda
sys.path.append({str(tmp_path)!r})
for one in cuda.libraries(Config(cuda_library={HERE["FARANDOLE_CUDA_LIBRARY"]!r})):
    print(one.title, one.usable, one.source.name, one.version, one.path.removeprefix({str(tmp_path)!r}))
"""
    assert run(code).splitlines()[1:] == [
        "NVRTC True PACKAGE 13.0 /nvidia/cuda_nvrtc/lib/libnvrtc.so.13",
        "NCCL True PACKAGE 2.28.9 /nvidia/nccl/lib/libnccl.so.2",
    ]
