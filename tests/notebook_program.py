# Runs notebooks for test_notebook.py, in a separate process: Jupyter's client leaves an event loop behind.
# Touches a Jupyter kernel, which starts workers.
"""`python notebook_program.py quickstart | troubleshooting`: AssertionError if the output of a cell is wrong."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from waiting import until

ROOT = Path(__file__).resolve().parents[1]


def output_of(cell: Any) -> str:
    """Everything below a cell."""
    return "".join(
        output.get("text", "") or str(output.get("data", {}).get("text/plain", "")) for output in cell.outputs
    )


def quickstart() -> None:
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "kept without outputs"
    NotebookClient(notebook, timeout=60).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "[0]<stdout>:rank 0 of 2 is done" in output_of(cells[1]) and "[1]<stdout>:rank 1 of 2 is done" in output_of(
        cells[1]
    )
    assert "[[3.0, 1.0], [3.0, 1.0]]" in output_of(cells[1]) and output_of(cells[2]) == "1"
    assert "[[3.0, 1.0], [3.0, 1.0]]" in output_of(cells[4])


def troubleshooting() -> None:
    make = nbformat.v4.new_code_cell
    cells = [
        "import farandole, time\nexecutor = farandole.Executor(2).start()",
        "def work():\n    raise LookupError('not in the cellar')\nexecutor.run(work)",
        "def nap():\n    print('asleep', flush=True)\n    time.sleep(60)\n"  # sleep: until it is interrupted
        "executor.run(nap)",
        "print('still there:', executor.run(int))\nexecutor.shutdown()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[make(text) for text in cells])
    client = NotebookClient(notebook, timeout=30)
    with client.setup_kernel():
        client.execute_cell(notebook.cells[0], 0)
        with pytest.raises(CellExecutionError, match="not in the cellar") as caught:
            client.execute_cell(notebook.cells[1], 1)
        assert "rank 0: Traceback" in str(caught.value) and "in work" in str(caught.value)

        def interrupt() -> None:
            until(lambda: "asleep" in output_of(notebook.cells[2]), 60.0)
            os.kill(client.km.provisioner.process.pid, signal.SIGINT)

        button = threading.Thread(target=interrupt)
        button.start()
        began = time.monotonic()
        with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
            client.execute_cell(notebook.cells[2], 2)
        button.join()
        assert time.monotonic() - began < 50, "as long as the cell takes if nobody interrupts it, or nearly so"
        client.execute_cell(notebook.cells[3], 3)
        assert "still there: [0, 0]" in output_of(notebook.cells[3])


if __name__ == "__main__":
    {"quickstart": quickstart, "troubleshooting": troubleshooting}[sys.argv[1]]()
