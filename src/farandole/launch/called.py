# An agent that a task of another system started. The task has connected to the launcher and knows the secret.
# Reads its environment variables, which its ranks get.
"""Such a task starts `main()`. Its input and output are the connection; an argument names the secret's descriptor."""

from __future__ import annotations

import os
import sys

from farandole.launch import agent, environment
from farandole.rendezvous.secret import Secret


def main() -> None:
    """Runs the agent; never returns."""
    mine = environment.forwarded(os.environ, other_host=False)
    base = {os.fsencode(name): os.fsencode(value) for name, value in mine.items()}
    agent.main(Secret.read(int(sys.argv[1])), base)
