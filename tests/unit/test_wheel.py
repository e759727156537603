"""The script that makes wheels: its compilers target the right platform, and its check refuses wheels with a wrong tag.
Writes into a temporary folder; `make wheel` (a stage of `make test`) builds the real ones."""

from __future__ import annotations

import importlib.metadata
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("elftools", reason="needs the packages of scripts/requirements/wheel.txt")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import wheel  # noqa: E402


@pytest.mark.parametrize("machine", wheel.PLATFORMS)
def test_the_cross_compiler_targets_its_platform(machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "WORK", tmp_path)
    toolchain = wheel.toolchain(machine)
    assert f"set(CMAKE_SYSTEM_PROCESSOR {machine})" in toolchain.read_text()
    assert f"-target {machine}-linux-gnu.2.28" in (toolchain.parent / "zig-c++").read_text()


def test_a_wheel_with_another_tag_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="linux_x86_64"):
        wheel.check(tmp_path / "farandole-0.1.0-cp311-abi3-linux_x86_64.whl", "x86_64")


def test_a_wheel_with_the_fault_injector_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "farandole-0.1.0-cp311-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("libfarandole.so", "libfarandole_chaos.so"):
            archive.writestr(f"farandole/engine/_native/{name}", b"")
    with pytest.raises(AssertionError, match="chaos"):
        wheel.check(path, "x86_64")


def unpack(path: Path, name: str, version: str) -> importlib.metadata.Distribution:
    """Unpacks a wheel that has only metadata, into its own folder, and returns the installed distribution."""
    assert path.name == f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path) as archive:
        assert all(file.startswith(f"{name}-{version}.dist-info/") for file in archive.namelist())
        archive.extractall(path.parent)
    (found,) = importlib.metadata.distributions(name=name.replace("_", "-"), path=[str(path.parent)])
    assert found.version == version
    return found


def test_the_replacement_of_horovod_has_its_extras_and_requires_farandole(tmp_path: Path) -> None:
    found = unpack(wheel.replacement_package(tmp_path), "horovod", "0.28.1+farandole")
    assert (found.requires or [])[0].startswith("farandole>=")
    extras = (
        "all-frameworks tensorflow tensorflow-cpu tensorflow-gpu keras pytorch mxnet spark pytorch-spark ray dev test"
    )
    assert found.metadata.get_all("Provides-Extra") == extras.split()


def test_the_replacement_of_lightning_horovod_requires_farandole_with_lightning(tmp_path: Path) -> None:
    found = unpack(wheel.lightning_replacement_package(tmp_path), "lightning_horovod", "0.1.0+farandole")
    assert [need.partition(">")[0] for need in found.requires or []] == ["farandole[lightning]"]
