# What an elastic training with Lightning must have left behind, wherever its ranks ran.
# Touches the files of lightning_elastic_job.py.
"""`survived(folder, deaths)` looks at them; the job itself runs in other processes."""

from __future__ import annotations

import json
from pathlib import Path

from waiting import in_time


def survived(scratch: Path, deaths: list[str]) -> list[int]:
    """Looks at what lightning_elastic_job.py has left; the number of ranks in each step."""
    end = json.loads((scratch / "end").read_text())
    assert set(end["seen"]) == {float(end["epoch"])}, end
    steps = [json.loads(line) for line in (scratch / "steps").read_text().splitlines()]
    for name in deaths:
        died = float((scratch / name).read_text())
        gone_on = min(at for at, _, _ in steps if at > died) - died
        print(f"Lightning went on {gone_on:.2f} s after the {name} death")
        in_time(gone_on, 5.0, f"going on after the {name} death")
    assert [path.name for path in (scratch / "csv").iterdir()] == ["version_0"]
    return [size for _, _, size in steps]
