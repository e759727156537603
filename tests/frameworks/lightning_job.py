# One rank of the tests with Lightning: runs the cases on DDP with Gloo, then on ours, and compares.
# Touches Lightning, torch and the folder SCRATCH, where each rank leaves a JSON file.
"""`python lightning_job.py compared|own [CASE...]` under the launcher: one process runs many cases."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
import warnings
from typing import Any

import torch
from torch import distributed as dist

import farandole.autoload

farandole.autoload.register()  # what torch's import does after `pip install`
assert not any(name.startswith(("lightning.", "pytorch_lightning")) for name in sys.modules)
warnings.filterwarnings("ignore")


def differences(found: Any, wanted: Any, where: str = "") -> None:
    """AssertionError with the place of the first difference that is more than rounding."""
    if isinstance(wanted, dict):
        assert sorted(map(str, found)) == sorted(map(str, wanted)), f"{where}: {sorted(found)} != {sorted(wanted)}"
        for name in wanted:
            differences(found[name], wanted[name], f"{where}.{name}")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), f"{where}: {found} != {wanted}"
        for index, value in enumerate(wanted):
            differences(found[index], value, f"{where}[{index}]")
    elif isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=lambda text: f"{where}: {text}")
    elif isinstance(wanted, float):
        assert abs(found - wanted) <= 1e-4 * max(1.0, abs(wanted)), f"{where}: {found} != {wanted}"
    else:
        assert found == wanted, f"{where}: {found} != {wanted}"


def main() -> None:
    """Leaves {case: None or what went wrong, ...} of this rank."""
    if sys.argv[1] == "compared":
        from lightning_cases import CASES as cases
    else:
        from lightning_own_cases import OWN as cases
    from lightning_models import RANK, SCRATCH

    faulthandler.dump_traceback_later(float(os.environ.get("PATIENCE", "240")), exit=True)  # says where it hangs
    chosen = sys.argv[2:] or list(cases)
    results: dict[str, Any] = {}
    wanted: dict[str, Any] = {}
    seconds: dict[str, float] = {}

    def attempt(name: str, kind: str) -> None:
        began = time.monotonic()
        try:
            found = cases[name](kind) if kind != "own" else cases[name]()
            if kind == "ddp":
                wanted[name] = found
            else:
                if kind == "ours":
                    differences(found, wanted[name], name)
                results[name] = None
        except Exception:
            results[name] = f"{kind}: {traceback.format_exc()}"
        seconds[f"{name} {kind}"] = round(time.monotonic() - began, 2)

    if sys.argv[1] == "compared":
        for name in chosen:
            attempt(name, "ddp")
        dist.destroy_process_group()
    for name in chosen:
        if results.get(name) is None:
            attempt(name, "ours" if sys.argv[1] == "compared" else "own")
    (SCRATCH / f"{sys.argv[1]}-{RANK}.json").write_text(json.dumps(results))
    (SCRATCH / f"{sys.argv[1]}-{RANK}.seconds").write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
