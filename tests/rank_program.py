# A rank for tests of joining: `python rank_program.py MODE`. Started by farandole.launch; has no engine.
# Touches the rendezvous room; kills itself in some modes.
"""Joins, sends and receives a greeting over every link, prints one line of JSON, leaves."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

from local_ranks import StubEngine

from farandole.base.config import Config
from farandole.base.errors import HorovodInternalError
from farandole.rendezvous import mesh


def die_at(method: str) -> None:
    """Kills this process when `join` calls that method."""

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(mesh._Joining, method, die)


def prepare(mode: str, config: Config) -> None:
    victim = config.rank == config.size - 1
    if mode == "wait" and victim:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        print("ready", flush=True)
        signal.sigwait([signal.SIGUSR1])
    elif mode == "absent" and victim:
        sys.exit(9)
    elif mode.startswith("die:") and victim:
        die_at(mode.removeprefix("die:"))
    elif mode.startswith("few:") and victim:
        limit = len(os.listdir("/proc/self/fd")) + int(mode.removeprefix("few:"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def main() -> int:
    config = Config.from_environment()
    prepare(sys.argv[1], config)
    stub = StubEngine(config.rank)
    try:
        session = mesh.join(config)
    except HorovodInternalError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 3
    session.hand_over(stub)
    session.serve(stub)
    stub.send_greetings()
    stub.receive_greetings()
    kinds = {peer: kind for peer, (_, kind) in stub.links.items()}
    print(json.dumps({"hosts": session.hosts, "kinds": kinds, "generation": session.generation}), flush=True)
    session.close()
    stub.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
