# Finds out whether the kernel killed a process because the memory was full.
# Reads /dev/kmsg and the memory counters of this process's control group.
"""`Memory().cause(pid)` returns a text if the kernel killed this process for lack of memory, else ""."""

from __future__ import annotations

import contextlib
import os

OUT_OF_MEMORY = "killed by the kernel: out of memory"


class Memory:
    """Watches the kernel's log and counters from its construction on."""

    def __init__(self) -> None:
        self._counters = _counters()
        self._kills = _kills(self._counters)
        self._log = -1
        # The kernel's log names the killed process, but most users may not read the log.
        with contextlib.suppress(OSError):
            self._log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)

    def cause(self, pid: int) -> str:
        """OUT_OF_MEMORY if the kernel killed this process, or any of our control group since the last call."""
        before, self._kills = self._kills, _kills(self._counters)
        if self._named(pid) or self._kills > before:
            return OUT_OF_MEMORY
        return ""

    def _named(self, pid: int) -> bool:
        if self._log < 0:
            return False
        found = False
        words = f"Killed process {pid} ".encode()
        while True:
            try:
                record = os.read(self._log, 8192)
            except BrokenPipeError:
                continue  # records were overwritten before we read them
            except OSError:
                return found
            found = found or words in record


def _counters() -> list[str]:
    """The files that count the processes killed for memory in our control group, for both versions of cgroups."""
    found = []
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as table:
        for line in table:
            _, kinds, path = line.rstrip("\n").split(":", 2)
            if not kinds:
                found.append(f"/sys/fs/cgroup{path}/memory.events")
            elif "memory" in kinds.split(","):
                found.append(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    return found


def _kills(files: list[str]) -> int:
    count = 0
    for file in files:
        with contextlib.suppress(OSError, ValueError), open(file) as table:
            count += sum(int(line.split()[1]) for line in table if line.startswith("oom_kill "))
    return count
