"""`make release`: builds the sdist and the wheels, checks them, and adds notes, a bill of materials and checksums.
Writes dist/ and build/; starts git, pip, compilers and the checkers; uploads only with --publish."""

from __future__ import annotations

import argparse
import datetime
import email
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import notes
from stages import ROOT
from wheel import DIST, PLATFORMS, PYTHON, PYTHONS, TAG, WORK, run


def git(*arguments: str) -> str:
    """The output of a git command for this tree."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(
            f"release: git {arguments[0]} failed, and a release is made from a git checkout: {done.stderr.strip()}"
        )
    return done.stdout.rstrip()


def say(line: str) -> None:
    print(f"release: {line}", flush=True)


def refusals(version: str, changelog: str) -> list[str]:
    """Why this tree may not be published."""
    return notes.refusals(version, git("status", "--porcelain"), git("tag", "--points-at", "HEAD").split(), changelog)


def build_wheels() -> None:
    """Builds the wheels like `make wheel`: they are checked with auditwheel, and one is tried in a new environment."""
    if subprocess.run([PYTHON, ROOT / "scripts" / "wheel.py"]).returncode != 0:
        sys.exit("release: no wheels (see above)")


def build_source(version: str) -> None:
    """Builds the sdist, and from it, in a new directory and a new environment, a wheel with the library."""
    run([PYTHON, "-m", "build", "--sdist", "--no-isolation", "--outdir", DIST, ROOT])
    sdist = DIST / f"farandole-{version}.tar.gz"
    fresh = WORK / "from-sdist"
    shutil.rmtree(fresh, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(fresh, filter="data")
    folder = fresh / f"farandole-{version}"
    run([PYTHON, "-m", "build", "--wheel", "--outdir", fresh, folder], log=WORK / "from-sdist.log")
    (built,) = fresh.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        for name in ("farandole/engine/_native/libfarandole.so", "farandole/engine/bridge.abi3.so"):
            assert name in archive.namelist(), f"{built.name} has no {name}"
    say(f"{sdist.relative_to(ROOT)}: {sdist.stat().st_size / 1e6:.1f} MB, builds {built.name} by itself")


def packages(version: str) -> list[Path]:
    """The files to upload. The wheels that only depend on farandole are for private indexes and are not included."""
    wheels = [DIST / f"farandole-{version}-{PYTHONS}-{TAG}_{machine}.whl" for machine in PLATFORMS]
    return [DIST / f"farandole-{version}.tar.gz", *wheels]


def audit_abi(wheel: Path) -> str:
    """The output of abi3audit for the extension module."""
    run([PYTHON.with_name("abi3audit"), "--strict", wheel])
    return "passed"


def check(paths: list[Path]) -> None:
    """Checks that the index accepts the metadata, and that extensions use only Python's stable ABI."""
    run([PYTHON, "-m", "twine", "check", "--strict", *paths])
    say("twine check --strict: passed")
    for path in paths:
        if path.suffix == ".whl":
            say(f"abi3audit of {path.name}: {audit_abi(path)}")


def llvm_release() -> str:
    """The LLVM release of the C++ library that the cross compiler links."""
    output = run([PYTHON, "-m", "ziglang", "c++", "--version"])
    found = re.search(r"clang version (\d+\.\d+\.\d+)", output)
    assert found is not None, output
    return found.group(1)


def requirements(wheel: Path) -> list[str]:
    """The requirements of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []


def digests(paths: list[Path]) -> dict[str, str]:
    """SHA-256 by file name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def describe(version: str, text: str, paths: list[Path]) -> None:
    """Writes notes, bill of materials and checksums."""
    from cyclonedx.schema import SchemaVersion  # here: a tree is refused without them too
    from cyclonedx.validation.json import JsonStrictValidator

    (DIST / f"farandole-{version}.notes.md").write_text(text)
    when = datetime.datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), datetime.UTC).isoformat()
    bill = json.dumps(notes.bill(version, when, requirements(paths[-1]), llvm_release(), digests(paths)), indent=2)
    wrong = JsonStrictValidator(SchemaVersion.V1_7).validate_str(bill)
    assert wrong is None, wrong
    (DIST / f"farandole-{version}.cdx.json").write_text(bill + "\n")
    every = sorted(path for path in DIST.iterdir() if path.is_file())
    (DIST / "SHA256SUMS").write_text(notes.sums(digests(every)))
    for path in sorted(DIST.iterdir()):
        say(f"  {path.relative_to(ROOT)}: {path.stat().st_size} bytes")


def main() -> None:
    """Without options it does everything except the upload, and prints at the end why a release would be refused."""
    parser = argparse.ArgumentParser(prog="release.py", description="Builds and checks a release in dist/.")
    parser.add_argument("--strict", action="store_true", help="stop at once if this tree may not be published")
    parser.add_argument("--publish", action="store_true", help="the same, and upload with twine at the end")
    options = parser.parse_args()
    version, changelog = (ROOT / "VERSION").read_text().strip(), (ROOT / "CHANGELOG.md").read_text()
    reasons = refusals(version, changelog)
    if reasons and (options.strict or options.publish):
        sys.exit("\n".join(f"release: refused: {reason}" for reason in reasons))
    try:
        text = notes.notes(changelog, version)
    except ValueError as error:
        sys.exit(f"release: {error}")
    os.environ["SOURCE_DATE_EPOCH"] = git("log", "-1", "--format=%ct")  # so that the same commit gives the same files
    shutil.rmtree(DIST, ignore_errors=True)
    WORK.mkdir(parents=True, exist_ok=True)
    build_wheels()
    build_source(version)
    paths = packages(version)
    check(paths)
    describe(version, text, paths)
    for reason in reasons:
        say(f"to publish: {reason}")
    if options.publish:
        run([PYTHON, "-m", "twine", "upload", "--non-interactive", *paths])
        say(f"farandole {version} is uploaded")
    else:
        say("nothing was uploaded; make release PUBLISH=1 does it")


if __name__ == "__main__":
    main()
