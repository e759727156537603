"""Hosts in network namespaces, joined by links of a set rate: an allreduce between them, and plain TCP.
Needs root, `ip`, `tc`, `unshare` and `nsenter`. The kernel removes the namespaces when their processes end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...launch.slots import rank_numbers
from ...rendezvous.secret import Secret
from . import processes
from .measure import Contender, race
from .plan import Plan, Row, row
from .processes import PYTHON, Failed, Process
from .rank_pools import RANK, RankPool, RankPools
from .report import STREAMS

RATE = "1gbit"
PROGRAMS = ("ip", "tc", "unshare", "nsenter")
NETWORK = "10.78.1"
PORT = 29611


def missing_requirement() -> str:
    """Why hosts cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "hosts: not measured: network namespaces need root"
    missing = [name for name in PROGRAMS if processes.find(name) is None]
    return f"hosts: not measured: {', '.join(missing)} not found" if missing else ""


class Hosts:
    """`count` hosts and a switch: namespaces of waiting processes, which the kernel ends together with this process."""

    def __init__(self, count: int, folder: Path) -> None:
        folder.mkdir()
        self.count = count
        self.addresses = [f"{NETWORK}.{number + 1}" for number in range(count)]
        self._holders: list[Process] = []
        try:
            for number in range(count + 1):
                self._holders.append(self._hold(folder / f"holder.{number}"))
            self._connect()
        except BaseException:
            self.close()
            raise

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs a command in a host."""
        return [str(processes.find("nsenter")), f"--net=/proc/{self._holders[host].pid}/ns/net", *command]

    def close(self) -> None:
        """Removes them."""
        for holder in self._holders:
            holder.end()

    def _hold(self, said: Path) -> Process:
        holder = Process([str(processes.find("unshare")), "--net", "cat"], said)
        ours = os.readlink("/proc/self/ns/net")
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(f"/proc/{holder.pid}/ns/net") != ours:
                    return holder
            if holder.ended() or time.monotonic() > deadline:
                holder.end(0)
                raise Failed(f"a network namespace cannot be made here: {holder.printed()}")
            time.sleep(0.005)

    def _batch(self, host: int, program: str, *lines: str) -> None:
        processes.says(self.inside(host, [str(processes.find(program)), "-batch", "-"]), "\n".join(lines) + "\n")

    def _connect(self) -> None:
        switch = self.count
        line = "link add name switch type bridge forward_delay 0 mcast_snooping 0"
        self._batch(switch, "ip", line, "link set dev switch up")
        limit = f"root tbf rate {RATE} burst 256kb latency 20ms"
        for host, address in enumerate(self.addresses):
            pid = self._holders[host].pid
            line = f"link add p{host} type veth peer name eth0 netns {pid}"
            self._batch(switch, "ip", line, f"link set p{host} master switch", f"link set p{host} up")
            self._batch(host, "ip", "link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up")
            self._batch(host, "tc", f"qdisc replace dev eth0 {limit}")
            self._batch(switch, "tc", f"qdisc replace dev p{host} {limit}")


@contextlib.contextmanager
def ours(pools_by_size: RankPools, hosts: Hosts, per_host: int, algorithm: str) -> Iterator[RankPool]:
    """Our ranks on these hosts, without a launcher: a hub in the first of them, and a process per rank."""
    names = [f"host{host}" for host in range(hosts.count) for _ in range(per_host)]
    secret = Secret.create()
    descriptor = secret.to_descriptor()
    module = "farandole.torch" if processes.has_torch() else "farandole"

    def start(folder: Path) -> list[Process]:
        size = len(names)
        words = [PYTHON, "-m", "farandole.tools.bench.hub", str(descriptor), str(size), f"tcp:{hosts.addresses[0]}"]
        hub = Process(hosts.inside(0, words), folder / "hub", pass_fd=descriptor)
        deadline = time.monotonic() + 20
        while not (address := hub.printed()) and not hub.ended() and time.monotonic() < deadline:
            time.sleep(0.01)
        found = [hub]
        for one in rank_numbers(names):
            more = {
                **one.environment(),
                "FARANDOLE_RENDEZVOUS": address,
                "FARANDOLE_SECRET_FD": str(descriptor),
                "FARANDOLE_ALLREDUCE_ALGORITHM": algorithm,
            }
            command = hosts.inside(one.rank // per_host, [PYTHON, *RANK, "horovod", str(folder), "--module", module])
            found.insert(-1, Process(command, folder / f"said.{one.rank}", more, descriptor))
        return found  # the hub must end last

    try:
        pool = pools_by_size.open(f"farandole {algorithm}", len(names), start)
        try:
            yield pool
        finally:
            pool.close()
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def others(pools_by_size: RankPools, hosts: Hosts, library: str, per_host: int) -> Iterator[RankPool]:
    """Gloo's ranks, or plain streams, on these hosts."""
    size = hosts.count * per_host
    meet = f"tcp://{hosts.addresses[0]}:{PORT}" if library == "gloo" else ""
    meet = meet or ",".join(f"{address}:{PORT + 1}" for address in hosts.addresses)

    def start(folder: Path) -> list[Process]:
        found = []
        for rank in range(size):
            words = [PYTHON, *RANK, library, str(folder), "--rank", str(rank), "--size", str(size), "--meet", meet]
            more = {"GLOO_SOCKET_IFNAME": "eth0"}
            found.append(Process(hosts.inside(rank // per_host, words), folder / f"said.{rank}", more))
        return found

    pool = pools_by_size.open(library, size, start)
    try:
        yield pool
    finally:
        pool.close()


def measure(plan: Plan, pools_by_size: RankPools, folder: Path) -> Iterator[Row]:
    """Allreduce on each shape of hosts and ranks, and plain TCP that sends 2(N-1)/N of its bytes from each host."""
    if reason := missing_requirement():
        pools_by_size.note(reason)
        return
    pools_by_size.clear()
    for count, per_host in plan.host_shapes:
        hosts = Hosts(count, folder / f"hosts.{count}.{per_host}")
        try:
            yield from shape(plan, pools_by_size, hosts, per_host)
        finally:
            hosts.close()


def shape(plan: Plan, pools_by_size: RankPools, hosts: Hosts, per_host: int) -> Iterator[Row]:
    """One shape. All pools are started first, and one works at a time."""
    interface = "torch" if processes.has_torch() else "numpy"
    command = {"kind": "reused", "dtype": "float32", "count": 1}
    allreduce = {"operation": "allreduce", "interface": interface, "bytes": plan.host_bytes}
    carried = plan.host_bytes * 2 * (hosts.count - 1) // hosts.count
    with contextlib.ExitStack() as open_pools:
        runners = []
        for algorithm in ("direct", "ring"):
            pool = open_pools.enter_context(ours(pools_by_size, hosts, per_host, algorithm))
            runners.append(Contender(f"farandole {algorithm}", pool, allreduce))
        if interface == "torch":
            pool = open_pools.enter_context(others(pools_by_size, hosts, "gloo", per_host))
            runners.append(Contender("Gloo", pool, allreduce))
        streams = open_pools.enter_context(others(pools_by_size, hosts, "streams", 1))
        for operation, name in (("both", STREAMS[0]), ("one", STREAMS[1]), ("all", STREAMS[2])):
            if operation == "all" and hosts.count == 2:
                continue  # with two hosts it is the same as plain TCP in both directions
            plain = {"operation": operation, "interface": "numpy", "bytes": carried}
            runners.append(Contender(name, streams, plain))
        values, checked = race(pools_by_size, runners, plan.repeats, command)
    more = {"bytes": plan.host_bytes, "hosts": hosts.count, "rate": RATE, "checked": checked}
    yield row("hosts", "allreduce", hosts.count * per_host, "s", values, **more)
