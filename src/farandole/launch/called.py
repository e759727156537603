# An agent that another system's task has started: it has called the launcher, and knows the secret.
# Reads its environment, which is what its ranks get.
"""`main()` is what such a task starts: the line is its input and output, the secret behind a descriptor it is told."""

from __future__ import annotations

import os
import sys

from farandole.launch import agent, environment
from farandole.rendezvous.secret import Secret


def main() -> None:
    """Never returns."""
    mine = environment.forwarded(os.environ, other_host=False)
    base = {os.fsencode(name): os.fsencode(value) for name, value in mine.items()}
    agent.main(Secret.read(int(sys.argv[1])), base)
