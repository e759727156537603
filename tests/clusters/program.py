# What the ranks of the launchers' tests run: prints its rank, and sums a number over all ranks repeatedly.
# Touches farandole's public interface; prints one line of JSON per round.
"""`program.py NUMBER ROUNDS`: if the sum is not NUMBER times the size, a rank of another job has joined."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

import farandole as hvd


def listening() -> list[str]:
    """Sockets of this process that listen."""
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink() and os.path.exists(path)}
    found = []
    for table in ("tcp", "tcp6", "unix"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            listens = words[3] == "00010000" if table == "unix" else words[3] == "0A"
            if listens and f"socket:[{words[6 if table == 'unix' else 9]}]" in own:
                found.append(line.split()[6 if table == "unix" else 9])
    return found


inherited = listening()  # Open MPI's mpirun leaves its own sockets to its children
for _ in range(int(sys.argv[2])):
    hvd.init()
    total = hvd.allreduce(np.full(1000, float(sys.argv[1])), op=hvd.Sum, name="numbers")
    report = {
        "place": [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()],
        "total": sorted(set(total.tolist())),
        "listening": [line for line in listening() if line not in inherited],
    }
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    hvd.shutdown()
