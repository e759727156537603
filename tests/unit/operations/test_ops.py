# The operations in a world of one, with either engine: results, arguments that are refused, handles, objects, sets.
# Touches the package's public functions; tests/ranks has what happens between ranks.
"""ops.py, reductions.py, arrays.py, objects.py, groups.py and basics.py."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farandole
from farandole import DType, ProcessSet

SUPPORTED = "bool, uint8, int8, uint16, int16, int32, int64, float16, float32, float64, bfloat16"
TYPES = [np.bool_, np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64]


@pytest.fixture(params=["native", "python"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of an engine that init() will use."""
    for variable in [name for name in os.environ if name.startswith(("FARANDOLE_", "HOROVOD_"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("FARANDOLE_ENGINE", request.param)
    yield request.param
    farandole.shutdown()


@pytest.fixture
def world(engine: str) -> None:
    """An initialised world of one that allows new process sets."""
    farandole.init(process_sets="dynamic")


@pytest.mark.usefixtures("world")
class TestResults:
    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (2, 5)])
    def test_every_type_and_shape_is_decoded_as_it_was_encoded(self, dtype: Any, shape: tuple[int, ...]) -> None:
        array = np.ones(shape, dtype=dtype)
        for result in (farandole.allreduce(array, op=farandole.Sum), farandole.broadcast(array, 0)):
            assert result is not array
            assert (result.dtype, result.shape) == (array.dtype, shape)
            np.testing.assert_array_equal(result, array)
        if shape:
            for result in (farandole.allgather(array), farandole.alltoall(array)):
                assert (result.dtype, result.shape) == (array.dtype, shape)
                np.testing.assert_array_equal(result, array)

    def test_the_default_is_the_average_and_scales_apply(self) -> None:
        assert farandole.allreduce(np.full(2, 3.0)).tolist() == [3.0, 3.0]
        assert farandole.allreduce(np.full(2, 3.0), prescale_factor=2.0, postscale_factor=5.0).tolist() == [30.0, 30.0]

    def test_in_place_gives_the_same_object(self) -> None:
        array = np.full(3, 2.0, dtype=np.float32)
        assert farandole.allreduce_(array, op=farandole.Sum, prescale_factor=2.0) is array
        assert array.tolist() == [4.0, 4.0, 4.0]
        assert farandole.broadcast_(array, 0) is array
        handle = farandole.allreduce_async_(array, op=farandole.Sum)
        assert farandole.synchronize(handle) is array

    def test_groups_of_tensors_give_tuples(self) -> None:
        arrays = [np.arange(3.0), np.arange(4, dtype=np.int32)]
        for results in (farandole.grouped_allreduce(arrays, op=farandole.Sum), farandole.grouped_allgather(arrays)):
            assert isinstance(results, tuple)
            for result, array in zip(results, arrays, strict=True):
                np.testing.assert_array_equal(result, array)
        scattered = farandole.grouped_reducescatter(arrays, op=farandole.Sum)
        assert [part.tolist() for part in scattered] == [array.tolist() for array in arrays]
        in_place = farandole.grouped_allreduce_(arrays, op=farandole.Sum)
        assert all(result is array for result, array in zip(in_place, arrays, strict=True))
        assert farandole.grouped_allreduce([]) == ()

    def test_alltoall_gives_the_splits_when_it_got_some(self) -> None:
        array = np.arange(10).reshape(5, 2)
        rows, splits = farandole.alltoall(array, splits=[3])
        assert rows.tolist() == array[:3].tolist()
        assert splits.tolist() == [3]
        rows, splits = farandole.synchronize(farandole.alltoall_async(array))
        assert (rows.tolist(), splits.tolist()) == (array.tolist(), [5])

    def test_large_results_are_unchanged_after_shutdown(self) -> None:
        array = np.arange(1 << 17, dtype=np.int64)
        result = farandole.allgather(array)
        part = result[5:]
        del result
        farandole.shutdown()
        np.testing.assert_array_equal(part, array[5:])

    def test_bfloat16_is_sent_as_uint16(self) -> None:
        one_and_two = np.array([0x3F80, 0x4000], dtype=np.uint16)
        result = farandole.allreduce(one_and_two, op=farandole.Sum, prescale_factor=2.0, dtype=DType.BFLOAT16)
        assert result.tolist() == [0x4000, 0x4080]

    def test_other_arrays_are_seen_without_a_copy(self) -> None:
        source = np.arange(3.0)

        class Foreign:
            """Has no more than DLPack."""

            def __dlpack__(self, **more: Any) -> Any:
                return source.__dlpack__(**more)

            def __dlpack_device__(self) -> tuple[int, int]:
                return self.device

            device = (1, 0)

        class Interface:
            __array_interface__ = source.__array_interface__

        for tensor in (Foreign(), Interface()):
            assert farandole.allreduce(tensor, op=farandole.Sum).tolist() == [0.0, 1.0, 2.0]
        assert farandole.allreduce(np.float32(2)).tolist() == 2.0
        Foreign.device = (2, 0)
        with pytest.raises(ValueError, match="only CPU"):
            farandole.allreduce(Foreign())

    def test_receiving_into_what_is_read_only_is_refused(self) -> None:
        array = np.ones(2)
        array.flags.writeable = False
        calls: list[Callable[[Any], Any]] = [farandole.allreduce_, lambda tensor: farandole.broadcast_(tensor, 0)]
        for call in calls:
            with pytest.raises(ValueError, match="read-only"):
                call(array)
        assert farandole.allreduce(array).tolist() == [1.0, 1.0]

    def test_barrier_and_join(self) -> None:
        farandole.barrier()
        assert farandole.join() == 0
        assert farandole.allreduce(np.ones(1)).tolist() == [1.0]

    def test_objects(self) -> None:
        value = {"weights": [1, 2, 3], "text": "é"}
        assert farandole.broadcast_object(value) == value
        assert farandole.allgather_object(value, name="objects") == [value]
        with pytest.raises(TypeError, match="pickle"):
            farandole.broadcast_object(threading.Lock())
        with pytest.raises(TypeError, match="pickle"):
            farandole.allgather_object(threading.Lock())
        assert farandole.allgather_object(None) == [None]


REFUSED: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("strided", lambda: farandole.allreduce(np.ones((4, 4))[:, 1]), ValueError, "not contiguous"),
    ("transposed", lambda: farandole.allgather(np.ones((4, 3)).T), ValueError, "not contiguous"),
    ("complex", lambda: farandole.allreduce(np.ones(2, np.complex64)), ValueError, SUPPORTED),
    ("objects", lambda: farandole.allgather(np.array([None])), ValueError, SUPPORTED),
    ("unsigned", lambda: farandole.allreduce(np.ones(2, np.uint32)), ValueError, SUPPORTED),
    ("big-endian", lambda: farandole.allreduce(np.ones(2, ">f4")), ValueError, SUPPORTED),
    ("a list", lambda: farandole.allreduce([1.0]), TypeError, "not list"),
    ("none", lambda: farandole.broadcast(None, 0), TypeError, "not NoneType"),
    (
        "bf16 storage",
        lambda: farandole.allreduce(np.ones(2), dtype=DType.BFLOAT16),
        ValueError,
        "needs an array of uint16",
    ),
    ("both", lambda: farandole.allreduce(np.ones(1), average=True, op=farandole.Sum), ValueError, "supersedes average"),
    ("op", lambda: farandole.allreduce(np.ones(1), op=17), ValueError, "Average, Sum, Adasum"),
    ("adasum", lambda: farandole.allreduce(np.ones(1, np.int32), op=farandole.Adasum), ValueError, "floating"),
    ("root", lambda: farandole.broadcast(np.ones(1), 1), ValueError, "root_rank=1 is not among the ranks [0]"),
    ("root -1", lambda: farandole.broadcast(np.ones(1), -1), ValueError, "root_rank=-1"),
    ("root text", lambda: farandole.broadcast(np.ones(1), "0"), ValueError, "expected a rank"),  # type: ignore[arg-type]
    ("scalar gather", lambda: farandole.allgather(np.float32(1)), ValueError, "tried to allgather a rank-zero"),
    ("scalar alltoall", lambda: farandole.alltoall(np.float32(1)), ValueError, "tried to alltoall a rank-zero"),
    (
        "scalar scatter",
        lambda: farandole.reducescatter(np.float32(1)),
        ValueError,
        "tried to reducescatter a rank-zero",
    ),
    (
        "scatter op",
        lambda: farandole.reducescatter(np.ones(1), op=farandole.Min),
        farandole.HorovodInternalError,
        "Reducescatter currently only supports",
    ),
    ("splits count", lambda: farandole.alltoall(np.ones(4), splits=[1, 2]), ValueError, "2 entries"),
    ("splits sum", lambda: farandole.alltoall(np.ones(4), splits=[5]), ValueError, "the array has 4"),
    ("splits sign", lambda: farandole.alltoall(np.ones(4), splits=[-1]), ValueError, "negative"),
    ("splits type", lambda: farandole.alltoall(np.ones(4), splits=[1.5]), ValueError, "whole numbers"),
    ("huge split", lambda: farandole.alltoall(np.ones(4), splits=[1 << 70]), ValueError, "the array has 4"),
    ("peer", lambda: farandole.send(np.ones(1), 3), ValueError, "peer=3"),
    ("huge tag", lambda: farandole.isend(np.ones(1), 0, tag=1 << 70), ValueError, "out of range"),
    ("set", lambda: farandole.allreduce(np.ones(1), process_set=ProcessSet([0])), ValueError, "is not registered"),
    ("zero in name", lambda: farandole.allreduce(np.ones(1), name="a\0b"), ValueError, "zero character"),
    ("poll", lambda: farandole.poll(12345), ValueError, "12345"),
]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("call", "kind", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_bad_arguments_are_refused_and_the_next_operation_works(
    call: Callable[[], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert message in str(caught.value)
    assert farandole.allreduce(np.ones(1)).tolist() == [1.0]


@pytest.mark.usefixtures("world")
class TestHandles:
    def test_handles_count_from_one_and_are_invalid_once_read(self) -> None:
        first, second = (farandole.allreduce_async(np.ones(2), name=name) for name in "ab")
        assert (first, second) == (1, 2)
        assert farandole.synchronize(second).tolist() == [1.0, 1.0]
        assert farandole.synchronize(second) is None
        with pytest.raises(ValueError, match="Handle 2"):
            farandole.poll(second)
        while not farandole.poll(first):
            pass
        assert farandole.synchronize(first).tolist() == [1.0, 1.0]

    def test_shutdown_starts_them_anew(self) -> None:
        assert farandole.allreduce_async(np.ones(2)) == 1
        farandole.shutdown()
        farandole.init()
        assert farandole.allreduce_async(np.ones(2)) == 1

    def test_average_warns_that_it_is_deprecated(self) -> None:
        with pytest.warns(DeprecationWarning, match="average") as seen:
            farandole.allreduce(np.ones(1), average=True)
        assert seen[0].filename == __file__

    def test_a_handle_is_valid_after_a_timeout(self) -> None:
        received = np.zeros(2)
        handle = farandole.irecv(received, 0, tag=5)
        with pytest.raises(farandole.FarandoleTimeout, match=r"0\.05 s"):
            farandole.synchronize(handle, timeout=0.05)
        farandole.send(np.ones(2), 0, tag=5)
        assert farandole.synchronize(handle) is received
        assert received.tolist() == [1.0, 1.0]


class TestSets:
    def test_a_registered_process_set_has_the_rank_of_this_process(self, world: None) -> None:
        assert ProcessSet([0]).size() is None
        assert farandole.global_process_set.ranks == [0]
        assert (farandole.global_process_set.rank(), farandole.global_process_set.included()) == (0, True)
        assert str(ProcessSet([2, 1])) == "ProcessSet(process_set_id=None, ranks=[1, 2], mpi_comm=None)"

    @pytest.mark.parametrize("ranks", [[0], [0, 0], [], [1], [-1], ["0"], 7, [0.5]])
    def test_impossible_and_duplicate_ones_are_refused(self, world: None, ranks: Any) -> None:
        with pytest.raises(ValueError, match=r"."):
            farandole.add_process_set(ranks)

    def test_mpi_communicators_are_refused(self, world: None) -> None:
        class Comm:
            def Get_rank(self) -> int:
                return 0

        with pytest.raises(NotImplementedError, match="MPI"):
            farandole.add_process_set(ProcessSet(Comm()))
        farandole.shutdown()
        with pytest.raises(ValueError, match="MPI"):
            farandole.init(comm=Comm())

    def test_the_global_and_unknown_ones_cannot_be_removed(self, world: None) -> None:
        assert farandole.remove_process_set(farandole.global_process_set) is False
        assert farandole.remove_process_set(ProcessSet([0])) is False

    def test_adding_needs_the_dynamic_mode(self, engine: str) -> None:
        farandole.init()
        with pytest.raises(ValueError, match="dynamic"):
            farandole.add_process_set([0])

    def test_init_refuses_unknown_arguments(self, engine: str) -> None:
        with pytest.raises(ValueError, match="static"):
            farandole.init(process_sets="static")
        with pytest.raises(ValueError, match="already registered"):
            farandole.init(process_sets=[ProcessSet([0])])
        assert not farandole.is_initialized()


class TestLife:
    def test_before_init_everything_says_so(self, engine: str) -> None:
        calls: list[Callable[[], Any]] = [
            farandole.rank,
            farandole.size,
            farandole.local_rank,
            farandole.cross_size,
            farandole.is_homogeneous,
            farandole.stop_timeline,
            farandole.barrier,
            lambda: farandole.allreduce(np.ones(1)),
            lambda: farandole.synchronize(1),
            lambda: farandole.add_process_set([0]),
        ]
        assert not farandole.is_initialized()
        for call in calls:
            with pytest.raises(farandole.NotInitialized, match="has not been initialized"):
                call()
        farandole.shutdown()

    def test_init_twice_and_shutdown_twice(self, engine: str) -> None:
        farandole.init()
        farandole.init()
        assert (farandole.rank(), farandole.size(), farandole.local_size(), farandole.cross_rank()) == (0, 1, 1, 0)
        assert farandole.is_homogeneous()
        farandole.shutdown()
        farandole.shutdown()
        assert not farandole.is_initialized()

    def test_init_again_and_again_leaves_nothing(self, engine: str) -> None:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(100 if engine == "native" else 10):
            farandole.init()
            assert farandole.allreduce(np.ones(3), op=farandole.Sum).tolist() == [1.0, 1.0, 1.0]
            farandole.shutdown()
        assert len(os.listdir("/proc/self/fd")) <= before

    def test_threads_may_all_call_init(self, engine: str) -> None:
        threads = [threading.Thread(target=farandole.init) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert farandole.size() == 1

    def test_only_the_list_of_all_ranks_is_the_world(self, engine: str) -> None:
        farandole.init(comm=[0])
        farandole.shutdown()
        for ranks in ([0, 1], [3]):
            with pytest.raises(ValueError, match="comm="):
                farandole.init(comm=ranks)

    def test_a_size_without_the_address_of_a_hub_is_refused(self, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOROVOD_SIZE", "2")
        with pytest.raises(ValueError, match="FARANDOLE_RENDEZVOUS"):
            farandole.init()

    def test_a_forked_child_is_refused_and_harmless(self, world: None) -> None:
        pending = farandole.irecv(np.zeros(1), 0, tag=1)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                farandole.allreduce(np.ones(1))
            except farandole.HorovodInternalError as error:
                status = 0 if "belongs to the parent" in str(error) and farandole.rank() == 0 else 2
            finally:
                farandole.shutdown()
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        farandole.send(np.ones(1), 0, tag=1)
        assert farandole.synchronize(pending).tolist() == [1.0]

    def test_what_moves_the_bytes(self) -> None:
        assert farandole.gloo_built() and farandole.gloo_enabled()
        assert not (farandole.mpi_built() or farandole.mpi_enabled() or farandole.cuda_built())
        assert farandole.nccl_built() == 0
        with pytest.raises(ValueError, match="MPI"):
            farandole.mpi_threads_supported()

    def test_the_timeline_from_the_start_and_on_request(
        self, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, second = tmp_path / "first.json", tmp_path / "second.json"
        monkeypatch.setenv("HOROVOD_TIMELINE", str(first))
        farandole.init()
        farandole.allreduce(np.ones(3), name="one")
        farandole.start_timeline(str(second), mark_cycles=True)
        farandole.allreduce(np.ones(3), name="two")
        farandole.stop_timeline()
        farandole.stop_timeline()
        farandole.allreduce(np.ones(3), name="three")
        for path, name in ((first, "one"), (second, "two")):
            text = path.read_text()
            json.loads(text)
            assert f"allreduce.{name}" in text
            assert "allreduce.three" not in text


def test_names_are_those_of_the_contract() -> None:
    from farandole.operations.pending import names_of

    assert names_of("allreduce", "w") == ["allreduce.w"]
    assert names_of("allreduce", None) == [None]
    assert names_of("allgather", "g", 2) == ["grouped_allgather.g_1of2", "grouped_allgather.g_2of2"]
    assert names_of("allgather", None, 2) == [None, None]


def test_the_constants_are_horovods() -> None:
    numbers = [farandole.Average, farandole.Sum, farandole.Adasum, farandole.Min, farandole.Max, farandole.Product]
    assert numbers == [0, 1, 2, 3, 4, 5]
    assert all(hasattr(farandole, name) for name in farandole.__all__)
