# The command that starts a job on the hosts of a bed with the real launcher; it runs inside the first host.
# Touches nothing.
"""`hosts[0].run(launch(["host1", "host2"], code), ENVIRONMENT)`: `code` is Python that each rank runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import bed

SOURCE = str(bed.ROOT / "src")
ENVIRONMENT = {"PYTHONPATH": SOURCE}


def launch(places: Sequence[str], code: str, *options: str) -> list[str]:
    """`farandole run` with one rank in each of these places; `words` are the arguments of each rank."""
    slots = ",".join(f"{name}:{places.count(name)}" for name in dict.fromkeys(places))
    start = [sys.executable, "-m", "farandole", "run", "-np", str(len(places)), "-H", slots]
    return [*start, sys.executable, "-c", code, *options]
