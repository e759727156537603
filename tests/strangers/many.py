# Runs scripts of a folder one after the other in this process, as each would run alone: a launch costs an import of the
# framework. Touches the scripts; each calls init() itself, and finds its own environment and arguments.
"""`horovodrun -np 2 python many.py folder script ...`: a line of JSON for each script that has ended well."""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from horovod.common.basics import HorovodBasics


def run_script(script: Path) -> None:
    """Runs a script, and then restores the arguments and variables of the process."""
    before, arguments = dict(os.environ), sys.argv
    sys.argv = [str(script)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = arguments
        os.environ.clear()
        os.environ.update(before)


def main(folder: Path, names: list[str]) -> int:
    basics: Any = HorovodBasics()
    for name in names:
        began = time.process_time()
        random.seed(0)
        try:
            run_script(folder / f"{name}.py")
            basics.shutdown()  # as the end of the process would
        except BaseException:
            print(json.dumps({"script": name, "wrong": traceback.format_exc()}), flush=True)
            return 1
        print(json.dumps({"script": name, "wrong": "", "seconds": time.process_time() - began}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
