# The test bed: several hosts on this machine, as namespaces joined by veth pairs, for tests with a real network.
# Touches namespaces, `ip`, `tc`, sshd, and one directory per bed under /run.
"""`with bed.hosts(2, ssh=True) as (one, two): one.run(["ssh", "host2", "hostname"])`. See README.md here."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waiting import lives, this_process, until

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLACE = Path("/run/farandole-beds")
HOME = "/run/home"  # of root, in every host
PYTHON = [sys.executable, "-S", "-E"]
# The folders of `ip`, `tc` and `sshd` are not always in root's PATH.
PATH = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What a bed needs, and Debian's packages for it.
TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
SSH_TOOLS = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}
_numbers = itertools.count()


@dataclass(frozen=True)
class Network:
    """One network: every host has an interface (eth0, eth1, ... in the order of the networks) and an address on it.

    Without `connects` the interfaces are up, but nothing that is sent there arrives; with `same_address` all hosts have
    the same address on it, as bridges of container engines do.
    """

    prefix: str = "10.77.1"
    connects: bool = True
    same_address: bool = False

    def address(self, index: int) -> str:
        return f"{self.prefix}.{1 if self.same_address else index + 1}"


@dataclass(frozen=True)
class Counters:
    """Bytes that a host's interface has sent and received, headers included."""

    sent: int
    received: int

    def __sub__(self, before: Counters) -> Counters:
        return Counters(self.sent - before.sent, self.received - before.received)


class Host:
    """One host of a bed."""

    def __init__(self, bed: Bed, index: int) -> None:
        self._bed = bed
        self._index = index
        self._sshd: subprocess.Popen[bytes] | None = None
        self.name = f"host{index + 1}"
        self.addresses = [network.address(index) for network in bed.networks]
        self.files = bed.files / self.name  # inside the host it is /run/host
        self._holder, self.pid = bed.hold(self._spec())

    @property
    def address(self) -> str:
        """The host's address on the first network."""
        return self.addresses[0]

    def start(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, cwd: str | Path = "/", **more: Any
    ) -> subprocess.Popen[Any]:
        """Starts a command in this host. It has a clean environment and `env`; `more` is for Popen.

        Signals sent to the returned process reach the command, SIGKILL too.
        """
        clean = {"PATH": PATH, "HOME": HOME, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        arguments = [*PYTHON, str(HERE / "enter.py"), str(self.pid), str(cwd), *map(str, command)]
        more.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.Popen(arguments, env={**clean, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}, **more)

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | Path = "/",
        timeout: float = 60.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end. With `check` a failure is an AssertionError with its output."""
        process = self.start(command, env, cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with process:
            try:
                output, complained = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        done = subprocess.CompletedProcess(list(command), process.returncode, output, complained)
        assert not check or done.returncode == 0, f"{self.name}: {done}"
        return done

    def processes(self) -> dict[int, str]:
        """The living processes of this host, by their ids outside; without its first process and its sshd."""
        own = {self.pid, *self._sshd_pids()}
        found = {}
        inode = os.stat(f"/proc/{self.pid}/ns/pid").st_ino
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{entry}/ns/pid").st_ino == inode and int(entry) not in own and _lives(entry):
                    found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def own_files(self) -> list[Path]:
        """All files in this host's own /tmp, /run, /dev/shm and home, as paths that this process can open; without
        the machine's directories that are shown there (the checkout may lie in /tmp)."""
        top = Path(f"/proc/{self.pid}/root")
        shown = [Path(path) for path in (*self._visible(), "/run/host", HOME)]
        given = {top / path.relative_to("/") for target in shown for path in (target, *target.parents)}
        found: list[Path] = []
        for place in ("tmp", "run", "dev/shm", HOME.lstrip("/")):
            device = (top / place).stat().st_dev
            for folder, folders, files in os.walk(top / place):
                folders[:] = [name for name in folders if _device(Path(folder, name)) == device]
                found += [Path(folder, name) for name in (*folders, *files)]
        return [path for path in found if path not in given]

    def outside(self, pid: int) -> int:
        """The id outside of a process whose id inside is `pid`."""
        for number in self.processes():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{number}/status").read_text().partition("NSpid:")[2].partition("\n")[0]
                if line.split()[-1:] == [str(pid)]:
                    return number
        raise ProcessLookupError(f"{self.name} has no process {pid}")

    def counters(self, network: int = 0) -> Counters:
        """The bytes that the interface has sent and received so far."""
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name.strip() == f"eth{network}":
                arguments = rest.split()
                return Counters(sent=int(arguments[8]), received=int(arguments[0]))
        raise AssertionError(f"{self.name} has no eth{network}")

    def shape(self, rate: str, network: int = 0, queue: str = "burst 256kb latency 20ms") -> None:
        """Limits the link to a rate such as "1gbit" in each direction. Packets that do not fit into its queue are lost,
        as on a real network."""
        for pid, interface in ((self.pid, f"eth{network}"), (self._bed.switch, self._port(network))):
            line = f"qdisc replace dev {interface} root tbf rate {rate} {queue}"
            self._bed.call(pid, "tc", line)

    def lost(self, network: int = 0) -> int:
        """How many packets a shaped link has dropped, both ways."""
        found = 0
        for pid, interface in ((self.pid, f"eth{network}"), (self._bed.switch, self._port(network))):
            said = self._bed.call(pid, "tc", f"qdisc show dev {interface} root", options=["-s"])
            found += int(said.partition("dropped ")[2].partition(",")[0])
        return found

    def unshape(self, network: int = 0) -> None:
        """Removes the limit."""
        for pid, interface in ((self.pid, f"eth{network}"), (self._bed.switch, self._port(network))):
            self._bed.call(pid, "tc", f"qdisc del dev {interface} root")

    def link(self, up: bool, network: int = 0) -> None:
        """Sets the interface down or up: the host sees that the carrier is lost. Bed.partition drops packets
        silently.
        """
        self._bed.call(self._bed.switch, "ip", f"link set {self._port(network)} {'up' if up else 'down'}")

    def kill(self) -> None:
        """Kills everything in the host, its sshd too; the host itself stays and can run commands again."""
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.write(b"k")
        self._holder.stdin.flush()
        assert self._holder.stdout.readline() == b"done\n"
        until(lambda: not self.processes(), 5.0, lambda: f"still there: {self.processes()}", every=0.001)
        self._reap_sshd()

    def start_sshd(self) -> None:
        """Starts the host's sshd; returns when it listens."""
        self._reap_sshd()
        program = shutil.which("sshd", path=PATH)
        self._sshd = self.start([str(program), "-D", "-e", "-f", "/run/host/sshd_config"], stderr=subprocess.PIPE)
        sshd = self._sshd
        until(lambda: self.listening(22) or sshd.poll() is not None, 30.0, f"sshd of {self.name}")
        if not self.listening(22):
            assert sshd.stderr is not None
            raise RuntimeError(f"sshd of {self.name} does not start: {sshd.stderr.read()!r}")

    def listening(self, port: int | None = None) -> list[tuple[str, int]]:
        """The TCP addresses (IPv4) on which processes of this host listen."""
        found = []
        for line in Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:]:
            arguments = line.split()
            place, _, number = arguments[1].partition(":")
            if arguments[3] == "0A" and port in (None, int(number, 16)):
                octets = bytes.fromhex(place)[:: -1 if sys.byteorder == "little" else 1]
                found.append((".".join(map(str, octets)), int(number, 16)))
        return found

    def close(self) -> None:
        """Ends the host; returns when no process of it is left."""
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.wait()
        self._holder.stdout.close()
        self._reap_sshd()

    def _spec(self) -> dict[str, Any]:
        bed = self._bed
        home = bed.files / "home" if bed.shared_home else self.files / "home"
        binds = [(self.files, "/run/host"), (home, HOME), (bed.files / "hosts", "/etc/hosts")]
        binds.append((bed.files / "passwd", "/etc/passwd"))
        return {
            "name": self.name,
            "visible": self._visible(),
            "binds": [(str(source), target) for source, target in binds],
        }

    def _visible(self) -> list[str]:
        """The paths as written, and the paths that their symbolic links lead to."""
        paths = [ROOT, Path(sys.prefix), Path(sys.base_prefix), *self._bed.visible]
        return sorted({str(name) for path in paths for name in (path, path.resolve())})

    def _port(self, network: int) -> str:
        return f"p{network}-{self._index}"

    def _sshd_pids(self) -> list[int]:
        """The program that waits for connections (a child of what we started); its sessions are not among them."""
        if self._sshd is None:
            return []
        with contextlib.suppress(OSError):
            return [*map(int, Path(f"/proc/{self._sshd.pid}/task/{self._sshd.pid}/children").read_text().split())]
        return []

    def _reap_sshd(self) -> None:
        if self._sshd is not None:
            self._sshd.kill()
            self._sshd.wait()
            assert self._sshd.stderr is not None
            self._sshd.stderr.close()
            self._sshd = None


@dataclass
class Bed:
    """The hosts, and the switch between them. Use `hosts` to make one."""

    count: int
    networks: Sequence[Network]
    ssh: bool
    shared_home: bool
    visible: Sequence[Path]
    files: Path = field(init=False)
    hosts: list[Host] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.files = PLACE / f"{this_process()}-{next(_numbers)}"
        self._holder: subprocess.Popen[bytes] | None = None
        self._bridges = itertools.count()
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def partition(self, *groups: Sequence[Host], network: int = 0) -> None:
        """Hosts of different groups, and hosts in no group, cannot reach each other; packets are dropped silently."""
        for group in groups:
            bridge = self._new_bridge()
            for host in group:
                self.call(self.switch, "ip", f"link set {host._port(network)} master {bridge}")

    def heal(self, network: int = 0) -> None:
        """All hosts reach each other again."""
        for host in self.hosts:
            self.call(self.switch, "ip", f"link set {host._port(network)} master b{network}")

    def close(self) -> None:
        """Removes everything."""
        for host in self.hosts:
            host.close()
        if self._holder is not None:
            assert self._holder.stdin is not None and self._holder.stdout is not None
            self._holder.stdin.close()
            self._holder.wait()
            self._holder.stdout.close()
        shutil.rmtree(self.files, ignore_errors=True)
        with contextlib.suppress(OSError):
            PLACE.rmdir()  # works only if there is no other bed

    def hold(self, spec: dict[str, Any] | None) -> tuple[subprocess.Popen[bytes], int]:
        """Starts the process that holds a host (or the switch); it, and the number of the host's first process."""
        command = [*PYTHON, str(HERE / "inside.py"), json.dumps(spec)]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/")
        assert holder.stdin is not None and holder.stdout is not None
        lines = {holder.stdout.readline().decode().strip() for _ in range(2)}
        if "ready" not in lines:
            holder.stdin.close()
            holder.wait()
            holder.stdout.close()
            raise RuntimeError(f"a host cannot be made here: {' '.join(lines).strip() or 'see above'}")
        return holder, int((lines - {"ready"}).pop())

    def call(self, pid: int, program: str, *lines: str, options: Sequence[str] = ()) -> str:
        """Runs lines of `ip` or `tc` in the network of a process; what it prints."""
        command = ["nsenter", f"--net=/proc/{pid}/ns/net", str(shutil.which(program, path=PATH)), *options]
        done = subprocess.run([*command, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True)
        assert done.returncode == 0, (done.stderr, lines)
        return done.stdout

    def _make(self) -> None:
        while not self.files.exists():
            with contextlib.suppress(FileNotFoundError):  # another run has removed its last bed, and PLACE with it
                self.files.mkdir(parents=True, mode=0o700)
        self._write_files()
        self._holder, self.switch = self.hold(None)
        for number, network in enumerate(self.networks):
            if network.connects:
                self._new_bridge(f"b{number}")
        for index in range(self.count):
            self.hosts.append(Host(self, index))
        for host in self.hosts:
            self._connect(host)
        if self.ssh:
            for host in self.hosts:
                host.start_sshd()

    def _new_bridge(self, name: str = "") -> str:
        name = name or f"cut{next(self._bridges)}"
        line = f"link add {name} type bridge forward_delay 0 mcast_snooping 0"
        self.call(self.switch, "ip", line, f"link set {name} up")
        return name

    def _connect(self, host: Host) -> None:
        outer, inner = [], ["link set lo up"]
        for number, network in enumerate(self.networks):
            port = host._port(number)
            outer.append(f"link add {port} type veth peer name eth{number} netns {host.pid}")
            if network.connects:
                outer.append(f"link set {port} master b{number}")
            outer.append(f"link set {port} up")
            inner += [f"addr add {host.addresses[number]}/24 dev eth{number}", f"link set eth{number} up"]
        self.call(self.switch, "ip", *outer)
        self.call(host.pid, "ip", *inner)

    def _write_files(self) -> None:
        """Writes names, users, and for ssh the keys, configurations and known hosts."""
        # A name is the host's address on the first network that connects both hosts.
        network = next((one for one in self.networks if one.connects), self.networks[0])
        names = [(f"host{index + 1}", network.address(index)) for index in range(self.count)]
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names)]
        (self.files / "hosts").write_text("\n".join(lines) + "\n")
        users = Path("/etc/passwd").read_text().splitlines()
        root = "root:x:0:0:root:" + HOME + ":/bin/sh"
        sshd = [] if any(line.startswith("sshd:") for line in users) else ["sshd:x:998:65534::/run/sshd:/bin/false"]
        users = [root, *(line for line in users if not line.startswith("root:")), *sshd]
        (self.files / "passwd").write_text("\n".join(users) + "\n")
        homes = [self.files / "home"] if self.shared_home else [self.files / name / "home" for name, _ in names]
        for path in [*homes, *(self.files / name for name, _ in names)]:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.ssh:
            self._write_ssh(names, homes)

    def _write_ssh(self, names: Sequence[tuple[str, str]], homes: Sequence[Path]) -> None:
        _keygen(self.files / "key")
        public = (self.files / "key.pub").read_text()
        known = []
        for name, _ in names:
            place = self.files / name
            _keygen(place / "host_key")
            addresses = ",".join(network.address(int(name[4:]) - 1) for network in self.networks)
            known.append(f"{name},{addresses} {(place / 'host_key.pub').read_text()}")
            (place / "authorized_keys").write_text(public)
            (place / "sshd_config").write_text(
                "HostKey /run/host/host_key\nAuthorizedKeysFile /run/host/authorized_keys\nPidFile none\nUsePAM no\n"
                "PermitRootLogin prohibit-password\nPasswordAuthentication no\nStrictModes no\nUseDNS no\n"
            )
        for home in homes:
            place = home / ".ssh"
            place.mkdir(mode=0o700)
            shutil.copy(self.files / "key", place / "id_ed25519")
            (place / "known_hosts").write_text("".join(known))
            (place / "config").write_text("Host *\n  StrictHostKeyChecking yes\n  HashKnownHosts no\n")
            for file in place.iterdir():
                file.chmod(0o600)


def _keygen(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True)


def _device(path: Path) -> int | None:
    """The file system of a path; None if the path does not exist any more."""
    with contextlib.suppress(OSError):
        return path.lstat().st_dev
    return None


def _lives(pid: str) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def sweep() -> list[str]:
    """Removes the files of beds whose test process died. Returns their names. The kernel removes everything else."""
    found = []
    for place in PLACE.glob("*-*-*"):
        if not lives(place.name.rpartition("-")[0]):
            shutil.rmtree(place, ignore_errors=True)
            found.append(place.name)
    with contextlib.suppress(OSError):
        PLACE.rmdir()
    return found


@functools.cache
def missing_requirement(ssh: bool = False) -> str:
    """Why a bed cannot be made here, or nothing."""
    if os.geteuid() != 0:
        return "hosts in namespaces need root"
    tools = TOOLS | SSH_TOOLS if ssh else TOOLS
    missing = [f"{tool} (package {package})" for tool, package in tools.items() if not shutil.which(tool, path=PATH)]
    if missing:
        return f"hosts in namespaces need {', '.join(missing)}"
    try:
        Bed(2, [Network()], False, False, []).close()
    except (RuntimeError, AssertionError, OSError) as error:
        return f"this machine lets us make no hosts: {error}"
    return ""


@contextlib.contextmanager
def hosts(
    count: int,
    networks: Sequence[Network] = (Network(),),
    ssh: bool = False,
    shared_home: bool = False,
    visible: Sequence[Path] = (),
) -> Iterator[Bed]:
    """A bed of `count` hosts, named host1, host2, ...; where none can be made, the test is skipped with the reason.

    `ssh`: each host runs sshd, and root of each may log in to each with a key. `shared_home`: one home directory for
    all instead of one for each. `visible`: paths under /tmp, /run or /dev/shm that the hosts shall see.
    """
    import pytest

    if reason := missing_requirement(ssh):
        pytest.skip(reason)
    sweep()
    bed = Bed(count, networks, ssh, shared_home, visible)
    try:
        yield bed
    finally:
        bed.close()
