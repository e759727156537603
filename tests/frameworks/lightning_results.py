# Checks the files that an elastic training with Lightning has written, wherever its ranks ran.
# Touches the files of lightning_elastic_job.py.
"""The job itself runs in other processes."""

from __future__ import annotations

import json
from pathlib import Path

from waiting import in_time


def check_and_return_world_sizes(scratch: Path, deaths: list[str]) -> list[int]:
    """Checks samples, restart times and logs. Returns the number of ranks in each step."""
    end = json.loads((scratch / "end").read_text())
    assert set(end["seen"]) == {float(end["epoch"])}, end
    steps = [json.loads(line) for line in (scratch / "steps").read_text().splitlines()]
    for name in deaths:
        died = float((scratch / name).read_text())
        pause = min(at for at, _, _ in steps if at > died) - died
        print(f"Lightning went on {pause:.2f} s after the {name} death")
        in_time(pause, 5.0, f"continuing after the {name} death")
    assert [path.name for path in (scratch / "csv").iterdir()] == ["version_0"]
    return [size for _, _, size in steps]
