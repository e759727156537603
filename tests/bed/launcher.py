# A job over ssh, started from the first host of a bed with the launcher's own parts, and the words to do so.
# Touches nothing; what it returns runs inside a host.
"""`hosts[0].run(launch(["host1", "host2"], code), ENVIRONMENT)`: `code` is Python that each rank runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import bed

SOURCE = str(bed.ROOT / "src")
ENVIRONMENT = {"PYTHONPATH": SOURCE}
# The launcher's own work without its command line: {command, hosts, env, directory, package} as JSON.
LAUNCH = """
import json, os, sys
from farandole.launch import job, output, slots, ssh
told = json.loads(sys.argv[1])
plan = job.Plan(
    command=told["command"], places=slots.places(told["hosts"]),
    hosts=["" if name == "host1" else name for name in told["hosts"]],
    environ={**os.environ, **told["env"]}, directory=told["directory"], way=ssh.Way(sys.executable, told["package"]))
with job.Job(plan, output.Raw((sys.stdout.buffer, sys.stderr.buffer))) as running:
    sys.exit(running.wait(60))
"""


def launch(places: Sequence[str], *command: str, directory: str = "/", package: str = SOURCE, **env: str) -> list[str]:
    """The words that start a job from the first host."""
    words = [sys.executable, "-c", *command]
    told = {"command": words, "hosts": places, "env": env, "directory": directory, "package": package}
    return [sys.executable, "-c", LAUNCH, json.dumps(told)]
