# Row 35 and the secret: what another user of this machine can reach, and where the secret is not.
# Touches processes, sockets, /proc.
from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from local_ranks import engines, local_job
from waiting import until

from farandole.launch import local
from farandole.rendezvous.secret import Secret

pytestmark = [pytest.mark.security, pytest.mark.ranks]
NOBODY = 65534
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_nobody(act: Callable[[], int]) -> int:
    """Runs `act` as another user in a child; what it returned (0 to 100), or 101 for a permission error."""
    child = os.fork()
    if child == 0:
        code = 102
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            code = act()
        except PermissionError:
            code = 101
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@root
def test_row_35_another_user_cannot_reach_the_hub() -> None:
    with local_job(1) as place:
        path = place.hub.address.removeprefix("unix:")

        def probe_hub() -> int:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(5)
                sock.connect(path)
                return len(sock.recv(1))

        assert stat.S_IMODE(os.stat(place.directory).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert as_nobody(probe_hub) == 101
        # Even with every door of the file system open, the kernel tells whose process it is.
        above = [parent for parent in Path(path).parents if parent.name.startswith("farandole-")]
        before = {parent: stat.S_IMODE(parent.stat().st_mode) for parent in above}
        try:
            for parent in above:
                parent.chmod(before[parent] | 0o011)
            os.chmod(path, 0o666)
            assert as_nobody(probe_hub) == 0, "closed without a word"
        finally:
            for parent in above:
                parent.chmod(before[parent])
        with engines(place.join_all()):
            pass


@root
def test_row_35_another_user_cannot_read_the_secret() -> None:
    with local.start(["sleep", "60"], 1) as job:

        def steal() -> int:
            for fd in os.listdir(f"/proc/{job.pids[0]}/fd"):
                os.open(f"/proc/{job.pids[0]}/fd/{fd}", os.O_RDONLY)
            return 0

        assert as_nobody(steal) == 101


def test_row_32_the_secret_is_in_no_argument_and_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = Secret.create()
    monkeypatch.setattr(Secret, "create", classmethod(lambda cls: secret))
    code = "import os, time; print(os.environ['FARANDOLE_SECRET_FD'], flush=True); "
    code += "time.sleep(60)"  # sleep: until it is killed
    with local.start([sys.executable, "-c", code], 2) as job:
        until(lambda: job.stdout(0).strip().isdigit())
        for pid in job.pids:
            for file in ("environ", "cmdline"):
                data = Path(f"/proc/{pid}/{file}").read_bytes()
                for form in (secret.key, secret.key.hex().encode()):
                    assert form not in data
        inherited = Path(f"/proc/{job.pids[0]}/fd/{job.stdout(0).strip()}")
        assert inherited.read_bytes() == secret.key, "and yet the worker has it"


def test_the_secret_can_be_read_again_and_not_be_changed() -> None:
    secret = Secret.create()
    for make in (secret.to_descriptor, secret._to_unnamed_file):
        fd = make()
        try:
            assert Secret.read(fd) == secret == Secret.read(fd)
            with pytest.raises(OSError):
                os.pwrite(fd, b"x", 0)
            assert not os.get_inheritable(fd)
        finally:
            os.close(fd)


def test_a_wrong_descriptor_is_explained(tmp_path: Path) -> None:
    with open(tmp_path / "short", "w+b") as file:
        file.write(b"short")
        file.flush()
        with pytest.raises(ValueError, match=r"FARANDOLE_SECRET_FD.*farandole run"):
            Secret.read(file.fileno())
    with pytest.raises(ValueError, match="FARANDOLE_SECRET_FD=987654"):
        Secret.read(987654)
