# The memory that the core uses: exports that must be kept, memory that may not be written, elements of another type.
# Touches the native engine in worlds of one, and in worlds whose other rank never comes.
from __future__ import annotations

import array
import gc
import mmap
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alarms import interrupted

from farandole.base.config import Config
from farandole.engine.interface import DType, Kind, Request
from farandole.engine.library import LIBRARY, load
from farandole.engine.native import NativeEngine

SOURCE = Path(__file__).parents[3] / "src"

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the native library is not built")


class Lender:
    """Its memory lives as long as the capsule that it gives."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.lent: list[weakref.ref[np.ndarray]] = []

    def __dlpack__(self) -> Any:
        copy = self.values.copy()
        self.lent.append(weakref.ref(copy))
        return copy.__dlpack__()

    def alive(self) -> bool:
        gc.collect()
        return self.lent[-1]() is not None


class Newer:
    """A tensor of DLPack 1, which says what it is."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None) -> Any:
        return self.values.__dlpack__(max_version=max_version)


def test_a_tensor_of_dlpack_is_held_until_its_outcome_is_taken(waiting: NativeEngine) -> None:
    lender = Lender(np.ones(4, np.float32))
    [handle] = waiting.submit([Request(Kind.ALLREDUCE, "d", lender, np.zeros(4, np.float32), DType.FLOAT32)])
    assert lender.alive()
    assert not waiting.poll(handle)
    with pytest.raises(TimeoutError, match="ALLREDUCE d was not done"):
        waiting.wait(handle, 0.0)
    assert lender.alive()
    waiting.close()
    assert not lender.alive()


def test_a_tensor_of_dlpack_goes_with_its_outcome(engine: NativeEngine) -> None:
    lender = Lender(np.ones(4, np.float32))
    output = np.zeros(4, np.float32)
    [handle] = engine.submit([Request(Kind.ALLREDUCE, "d", lender, output, DType.FLOAT32)])
    assert engine.wait(handle).output.tolist() == [1.0] * 4
    assert not lender.alive() and engine.pending == 0


def test_an_interrupted_call_keeps_its_buffer_export(waiting: NativeEngine) -> None:
    lender = Lender(np.ones(4, np.float32))
    with interrupted(0.05):
        waiting.run(Request(Kind.ALLREDUCE, "d", lender, np.zeros(4, np.float32), DType.FLOAT32))
    assert waiting.pending == 1 and lender.alive()


@pytest.mark.parametrize(
    "kind", [bytearray, lambda size: array.array("B", bytes(size)), lambda size: mmap.mmap(-1, size)]
)
def test_memory_that_could_move_is_held_until_the_operation_is_done(waiting: NativeEngine, kind: Any) -> None:
    memory = kind(4096)
    waiting.submit([Request(Kind.ALLREDUCE, "b", memory, memory, DType.UINT8)])
    with pytest.raises(BufferError):
        memory.close() if isinstance(memory, mmap.mmap) else memory.extend(b"more")
    waiting.close()
    memory.close() if isinstance(memory, mmap.mmap) else memory.extend(b"more")


LEFT = """
import gc, weakref
import numpy as np
from farandole.base.config import Config
from farandole.engine.interface import Kind, Request
from farandole.engine.native import NativeEngine
engine = NativeEngine(Config(), 0, [0, 0])
values = np.ones(3, np.float32)
alive = weakref.ref(values)
engine.submit([Request(Kind.ALLREDUCE, "x", values, values)])
engine.itself = engine
del engine, values
gc.collect()
print(alive() is not None)
"""


def in_another_process(program: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100)


def test_collecting_a_cycle_with_an_open_engine_keeps_pending_memory() -> None:
    done = in_another_process(LEFT)  # the core's object stays, and works on that memory
    assert done.stdout.strip() == "True", done.stderr


def test_the_format_of_a_buffer_is_read(engine: NativeEngine) -> None:
    halves = np.array([0.5, 1.5, 2.0], np.float32)
    assert Request(Kind.ALLREDUCE, "f", memoryview(halves)).elements() == DType.FLOAT32  # type: ignore[arg-type]
    assert Request(Kind.ALLREDUCE, "f", bytearray(3)).elements() == DType.UINT8
    assert Request(Kind.ALLREDUCE, "f", array.array("d", [1.0])).elements() == DType.FLOAT64
    output = np.zeros(3, np.float32)
    engine.run(Request(Kind.ALLREDUCE, "f", memoryview(halves), output, prescale=2.0))  # type: ignore[arg-type]
    assert output.tolist() == [1.0, 3.0, 4.0]
    gathered = engine.run(Request(Kind.ALLGATHER, "g", memoryview(halves))).output  # type: ignore[arg-type]
    assert gathered.dtype == np.float32 and gathered.tolist() == halves.tolist()
    with pytest.raises(ValueError, match="Lender does not name its element type"):
        engine.run(Request(Kind.ALLREDUCE, "f", Lender(halves), output))


def test_elements_of_another_size_or_type_are_refused(engine: NativeEngine) -> None:
    floats = np.ones(4, np.float32)
    for first, output in ((bytearray(4), floats), (floats, bytearray(4)), (floats, np.zeros(4)), (np.ones(4), floats)):
        with pytest.raises(ValueError, match=r"elements have 4 bytes .*those of the memory have"):
            engine.run(Request(Kind.ALLREDUCE, "s", first, output, DType.FLOAT32))
    with pytest.raises(ValueError, match="the request's dtype is 8, that of the tensor 5"):
        engine.run(Request(Kind.ALLREDUCE, "s", Lender(np.ones(4, np.int32)), floats, DType.FLOAT32))
    with pytest.raises(ValueError, match="code 5 with 64 bits"):
        engine.run(Request(Kind.ALLREDUCE, "s", Lender(np.ones(4, np.complex64)), floats, DType.FLOAT32))
    with pytest.raises(ValueError, match="of the memory have 4"):
        engine.run(Request(Kind.ALLREDUCE, "s", floats, floats, pieces=np.zeros((1, 2), np.int32)))
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(ValueError, match="of the memory have 2"):
        engine.run(Request(Kind.ALLREDUCE, "s", np.ones(4, ml_dtypes.bfloat16), floats, DType.FLOAT32))
    assert engine.pending == 0 and engine.calls == 0


def test_read_only_memory_is_refused_as_output(engine: NativeEngine) -> None:
    fixed = np.ones(4, np.float32)
    fixed.flags.writeable = False
    try:
        fixed.__dlpack__(max_version=(1, 0))
    except (TypeError, BufferError):
        pytest.skip("this NumPy knows only the older DLPack")
    with pytest.raises(ValueError, match="cannot be written to: it is read-only"):
        engine.run(Request(Kind.ALLREDUCE, "r", np.ones(4, np.float32), Newer(fixed), DType.FLOAT32))
    written = Newer(np.zeros(4, np.float32))
    engine.run(Request(Kind.ALLREDUCE, "r", Newer(fixed), written, DType.FLOAT32))
    assert written.values.tolist() == [1.0] * 4
    with pytest.raises(ValueError, match="cannot be written to"):
        engine.run(Request(Kind.ALLREDUCE, "r", bytes(4), bytes(4)))


def test_an_addition_of_arrays_that_do_not_fit_is_refused() -> None:
    library = load()
    out = np.zeros(4, np.float32)
    library.add(DType.FLOAT32, np.ones(4, np.float32), np.ones(4, np.float32), out)
    assert out.tolist() == [2.0] * 4
    ones = np.ones(4, np.float32)
    for left, right, into in ((ones, ones[:2], out), (ones, ones, out[:1]), (ones[:3], ones, out)):
        with pytest.raises(ValueError, match="same number of elements"):
            library.add(DType.FLOAT32, left, right, into)
    with pytest.raises(ValueError, match="same number of elements"):
        library.add(DType.FLOAT32, ones, None, out)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="those of the memory have 8"):
        library.add(DType.FLOAT32, ones, ones, np.zeros(4))
    for dtype in (-1, 99):
        with pytest.raises(ValueError, match=f"no data type {dtype}"):
            library.add(dtype, ones, ones, out)


WITHOUT_MEMORY = """
import resource
from farandole.base.config import Config
from farandole.engine.native import NativeEngine
engine = NativeEngine(Config(), 0, [0])
engine.start(5.0)
engine.trace(True)
resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.getrlimit(resource.RLIMIT_AS)[1]))
full, size = [], 1 << 20
while size > 1 << 14:
    try:
        full.append(bytearray(size))
    except MemoryError:
        size >>= 1
said = "nothing"
try:
    engine.trace_drain()
except MemoryError:
    said = "MemoryError"
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
full.clear()
print(said, flush=True)
engine.close()
"""


def test_missing_memory_is_a_memory_error() -> None:
    done = in_another_process(WITHOUT_MEMORY)
    assert (done.returncode, done.stdout.strip()) == (0, "MemoryError"), done.stderr

    class Endless:
        def __len__(self) -> int:
            return 1 << 60

        def __getitem__(self, index: int) -> int:
            raise AssertionError("nothing is read before there is memory for all of it")

    with pytest.raises(MemoryError):
        NativeEngine(Config(), 0, Endless())  # type: ignore[arg-type]
