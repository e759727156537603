# A large suite for horovod.torch in one job: dtypes, dimensions, operations, mistakes, names, process sets, gradients.
# Touches horovod.torch alone; `horovodrun -np 2 python torch_suite.py` runs it, as others run theirs in one job.
"""The arithmetic. Each case is a method; methods that `over` makes are one case for each of its values."""

from __future__ import annotations

import functools
import itertools
import sys
import tempfile
import unittest
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import horovod.torch as hvd

FLOATS = [torch.float16, torch.float32, torch.float64]
SUMMED = [torch.int32, torch.int64, *FLOATS]
MOVED = [torch.uint8, torch.int8, torch.int16, *SUMMED]
DIMENSIONS = (1, 2, 3)
MISMATCH = (hvd.HorovodInternalError, RuntimeError)


def over(**values: Any) -> Callable[[Any], Any]:
    """A class decorator's mark: one method for each combination of the values."""

    def mark(method: Any) -> Any:
        method.over = values
        return method

    return mark


def word(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value).removeprefix("torch.").removeprefix("ReduceOp.")


def expanded(cls: Any) -> Any:
    """Makes the methods that `over` asks for."""
    for name, method in list(vars(cls).items()):
        if not hasattr(method, "over"):
            continue
        delattr(cls, name)
        for chosen in itertools.product(*method.over.values()):
            more = dict(zip(method.over, chosen, strict=True))
            case = lambda self, method=method, more=more: method(self, **more)  # noqa: E731
            setattr(cls, "_".join([name, *(word(value).lower() for value in chosen)]), case)
    return cls


class Suite(unittest.TestCase):
    """What the cases share."""

    def setUp(self) -> None:
        hvd.init(process_sets="dynamic")
        self.rank, self.size = hvd.rank(), hvd.size()
        warnings.simplefilter("ignore", DeprecationWarning)

    def tearDown(self) -> None:
        hvd.barrier()

    def of(self, rank: int, dtype: torch.dtype, dimensions: int, length: int = 5) -> torch.Tensor:
        """A rank's tensor: whole numbers, so that sums are exact in every type."""
        generator = torch.Generator().manual_seed(1000 * dimensions + rank)
        return torch.randint(1, 4, (length,) * dimensions, generator=generator).to(dtype)

    def all(self, dtype: torch.dtype, dimensions: int) -> torch.Tensor:
        return torch.stack([self.of(rank, dtype, dimensions) for rank in range(self.size)])

    def same(self, found: torch.Tensor, wanted: torch.Tensor) -> None:
        self.assertEqual(found.dtype, wanted.dtype)
        self.assertEqual(found.shape, wanted.shape)
        if not torch.equal(found, wanted):
            self.fail(f"{found} is not {wanted}")

    def near(self, found: Any, wanted: Any) -> None:
        tolerance = 1e-3 if found.dtype == torch.float16 else 1e-5
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)

    def check_allreduce(self) -> None:
        self.assertEqual(hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), self.size)

    def fails(self, kinds: Any, call: Callable[[], Any]) -> None:
        with self.assertRaises(kinds):
            call()
        self.check_allreduce()

    def sets(self) -> Iterator[Any]:
        """Process sets that this rank is in; they are gone after the loop."""
        for ranks in ([self.size - 1], list(range(self.size))[:1]):
            one = hvd.add_process_set(ranks)
            if one.included():
                yield one
            hvd.remove_process_set(one)


REDUCED: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    hvd.Sum: lambda all: all.sum(0),
    hvd.Min: lambda all: all.amin(0),
    hvd.Max: lambda all: all.amax(0),
    hvd.Product: lambda all: all.prod(0),
    hvd.Average: lambda all: all.sum(0) / len(all),
}
TWICE: dict[str, Callable[[torch.Tensor, str], int]] = {
    "allreduce": lambda t, name: hvd.allreduce_async(t, name=name),
    "allgather": lambda t, name: hvd.allgather_async(t, name=name),
    "broadcast": lambda t, name: hvd.broadcast_async(t, 0, name=name),
    "alltoall": lambda t, name: hvd.alltoall_async(t, name=name),
    "reducescatter": lambda t, name: hvd.reducescatter_async(t, name=name),
    "grouped_allreduce": lambda t, name: hvd.grouped_allreduce_async([t], name=name),
}


@expanded
class Reductions(Suite):
    @over(op=list(REDUCED), dtype=SUMMED)
    def test_allreduce(self, op: Any, dtype: torch.dtype) -> None:
        for dimensions in DIMENSIONS:
            everything = self.all(dtype, dimensions)
            if op == hvd.Average and not dtype.is_floating_point:
                continue
            wanted = REDUCED[op](everything).to(dtype)
            mine = self.of(self.rank, dtype, dimensions)
            same = self.near if op == hvd.Average else self.same  # thirds are not exact
            same(hvd.allreduce(mine, op=op), wanted)
            self.same(mine, self.of(self.rank, dtype, dimensions))
            same(hvd.synchronize(hvd.allreduce_async(mine, op=op, name=f"named.{dimensions}")), wanted)

    @over(dtype=SUMMED)
    def test_allreduce_inplace(self, dtype: torch.dtype) -> None:
        for dimensions in DIMENSIONS:
            mine = self.of(self.rank, dtype, dimensions)
            self.assertIs(hvd.allreduce_(mine, op=hvd.Sum), mine)
            self.same(mine, self.all(dtype, dimensions).sum(0).to(dtype))

    @over(dtype=SUMMED)
    def test_allreduce_async_fused(self, dtype: torch.dtype) -> None:
        tensors = [self.of(self.rank, dtype, dimensions) for dimensions in DIMENSIONS for _ in range(10)]
        handles = [hvd.allreduce_async(tensor, op=hvd.Sum) for tensor in tensors]
        for index, handle in reversed(list(enumerate(handles))):
            hvd.poll(handle)
            self.same(hvd.synchronize(handle), self.all(dtype, DIMENSIONS[index // 10]).sum(0).to(dtype))

    @over(dtype=[torch.int32, *FLOATS], where=["prescale_factor", "postscale_factor"])
    def test_allreduce_scaled(self, dtype: torch.dtype, where: str) -> None:
        mine = self.of(self.rank, dtype, 2) * 2
        wanted = (self.all(dtype, 2).sum(0) * 2 / 2).to(dtype)
        self.same(hvd.allreduce(mine, op=hvd.Sum, **{where: 0.5}), wanted)

    @over(dtype=SUMMED)
    def test_grouped_allreduce(self, dtype: torch.dtype) -> None:
        mine = [self.of(self.rank, dtype, dimensions) for dimensions in DIMENSIONS]
        wanted = [self.all(dtype, dimensions).sum(0).to(dtype) for dimensions in DIMENSIONS]
        for found in (
            hvd.grouped_allreduce(mine, op=hvd.Sum),
            hvd.synchronize(hvd.grouped_allreduce_async(mine, op=hvd.Sum, name="group")),
            hvd.grouped_allreduce_([tensor.clone() for tensor in mine], op=hvd.Sum),
        ):
            self.assertEqual(len(found), 3)
            for one, other in zip(found, wanted, strict=True):
                self.same(one, other)

    @over(op=[hvd.Sum, hvd.Average], dtype=SUMMED)
    def test_reducescatter(self, op: Any, dtype: torch.dtype) -> None:
        if op == hvd.Average and not dtype.is_floating_point:
            return
        for rows in (self.size, 2 * self.size + 1, 1, 0):
            ones = torch.ones((rows, 3), dtype=dtype)
            mine = rows // self.size + (self.rank < rows % self.size)
            wanted = torch.full((mine, 3), self.size if op == hvd.Sum else 1, dtype=dtype)
            self.same(hvd.reducescatter(ones, op=op), wanted)
        many = hvd.grouped_reducescatter([torch.ones(self.size, dtype=dtype)] * 2, op=op)
        self.assertEqual([len(one) for one in many], [1, 1])

    def test_allreduce_average_argument(self) -> None:
        self.same(hvd.allreduce(torch.ones(2), average=False), torch.full((2,), float(self.size)))
        self.same(hvd.allreduce(torch.ones(2), average=True), torch.ones(2))
        self.fails(ValueError, lambda: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum))

    def test_allreduce_scalar_and_empty(self) -> None:
        self.same(hvd.allreduce(torch.tensor(2.0), op=hvd.Sum), torch.tensor(2.0 * self.size))
        self.same(hvd.allreduce(torch.zeros(0, 3), op=hvd.Sum), torch.zeros(0, 3))

    def test_allreduce_process_sets(self) -> None:
        for one in self.sets():
            self.same(hvd.allreduce(torch.full((2,), 3.0), op=hvd.Sum, process_set=one), torch.full((2,), 3.0))

    def test_allreduce_large(self) -> None:
        self.same(hvd.allreduce(torch.ones(1 << 20), op=hvd.Sum), torch.full((1 << 20,), float(self.size)))

    def test_allreduce_large_and_small_together(self) -> None:
        handles = [hvd.allreduce_async(torch.ones(n), op=hvd.Sum) for n in (1 << 18, 1, 1000, 0, 1 << 16)]
        self.assertEqual([len(hvd.synchronize(handle)) for handle in handles], [1 << 18, 1, 1000, 0, 1 << 16])

    def test_allreduce_fp16_compression(self) -> None:
        found = hvd.allreduce(torch.full((3,), 1.5), compression=hvd.Compression.fp16, op=hvd.Sum)
        self.same(found, torch.full((3,), 1.5 * self.size))

    def test_allreduce_bfloat16(self) -> None:  # Horovod refuses it
        self.same(hvd.allreduce(torch.ones(3, dtype=torch.bfloat16)), torch.ones(3, dtype=torch.bfloat16))

    def test_adasum(self) -> None:
        if self.size & (self.size - 1):
            return
        self.near(hvd.allreduce(torch.full((4,), 2.0), op=hvd.Adasum), torch.full((4,), 2.0))

    def test_orders_that_differ(self) -> None:
        names = [f"any.order.{n}" for n in range(8)][:: 1 if self.rank % 2 else -1]
        handles = {
            name: hvd.allreduce_async(torch.full((2,), float(name[-1])), op=hvd.Sum, name=name) for name in names
        }
        for name, handle in handles.items():
            self.assertEqual(hvd.synchronize(handle).tolist(), [float(name[-1]) * self.size] * 2)

    def test_sparse(self) -> None:
        mine = torch.sparse_coo_tensor(torch.tensor([[0, self.rank + 1]]), torch.tensor([1.0, 2.0]), (self.size + 1,))
        found = hvd.sparse_allreduce_async(mine, name="sparse", op=hvd.Sum)().to_dense()
        self.same(found, torch.tensor([float(self.size)] + [2.0] * self.size))

    def test_join(self) -> None:
        for _ in range(self.rank):
            hvd.allreduce(torch.ones(1), name="uneven", op=hvd.Sum)
        self.assertEqual(hvd.join(), self.size - 1)

    def test_join_refuses_others(self) -> None:
        if self.rank == 0:
            hvd.join()
        else:
            with self.assertRaises(MISMATCH):
                hvd.allgather(torch.ones(2), name="while joined")
            hvd.join()
        self.check_allreduce()


@expanded
class Movements(Suite):
    @over(dtype=[torch.bool, *MOVED])
    def test_allgather(self, dtype: torch.dtype) -> None:
        for dimensions in DIMENSIONS:
            mine = self.of(self.rank, dtype, dimensions)
            wanted = torch.cat([self.of(rank, dtype, dimensions) for rank in range(self.size)])
            self.same(hvd.allgather(mine), wanted)
            self.same(hvd.synchronize(hvd.allgather_async(mine, name=f"gathered.{dimensions}")), wanted)

    @over(dtype=MOVED)
    def test_allgather_variable(self, dtype: torch.dtype) -> None:
        rows = [3, 0, 7, 1, 9, 2, 5, 4]
        mine = torch.full((rows[self.rank], 2), self.rank).to(dtype)
        wanted = torch.cat([torch.full((rows[rank], 2), rank).to(dtype) for rank in range(self.size)])
        self.same(hvd.allgather(mine), wanted)
        found = hvd.grouped_allgather([mine, mine.new_ones(1)])
        self.same(found[0], wanted)
        self.same(found[1], mine.new_ones(self.size))

    @over(dtype=[torch.bool, *MOVED])
    def test_broadcast(self, dtype: torch.dtype) -> None:
        for dimensions, root in itertools.product(DIMENSIONS, range(self.size)):
            mine, wanted = self.of(self.rank, dtype, dimensions), self.of(root, dtype, dimensions)
            self.same(hvd.broadcast(mine, root), wanted)
            self.same(mine, self.of(self.rank, dtype, dimensions))
            self.assertIs(hvd.broadcast_(mine, root), mine)
            self.same(mine, wanted)

    @over(dtype=MOVED)
    def test_alltoall(self, dtype: torch.dtype) -> None:
        self.same(hvd.alltoall(torch.full((self.size,), self.rank).to(dtype)), torch.arange(self.size).to(dtype))
        splits = [rank + 1 for rank in range(self.size)]
        mine = torch.full((sum(splits), 2), self.rank).to(dtype)
        found, received = hvd.alltoall(mine, splits=torch.tensor(splits, dtype=torch.int32))
        each = self.rank + 1
        self.assertEqual(received.tolist(), [each] * self.size)
        self.same(found, torch.cat([torch.full((each, 2), rank).to(dtype) for rank in range(self.size)]))

    def test_alltoall_of_one(self) -> None:
        splits = [4] + [0] * (self.size - 1) if self.rank == self.size - 1 else [0] * self.size
        found, received = hvd.alltoall(torch.ones(sum(splits)), splits=splits)
        self.assertEqual(len(found), 4 if self.rank == 0 else 0)
        self.assertEqual(received.tolist(), [0] * (self.size - 1) + [4 if self.rank == 0 else 0])

    def test_allgather_of_nothing(self) -> None:
        self.same(hvd.allgather(torch.zeros(0, 2)), torch.zeros(0, 2))

    def test_process_sets(self) -> None:
        for one in self.sets():
            mine = torch.full((2,), float(self.rank))
            self.same(hvd.allgather(mine, process_set=one), mine)
            self.same(hvd.broadcast(mine, self.rank, process_set=one), mine)
            self.same(hvd.alltoall(mine, process_set=one), mine)
            self.same(hvd.reducescatter(mine, process_set=one), mine)
            hvd.barrier(process_set=one)
            self.assertEqual(hvd.broadcast_object(self.rank, self.rank, process_set=one), self.rank)

    def test_objects(self) -> None:
        self.assertEqual(hvd.broadcast_object({"a": [self.rank]}, 0), {"a": [0]})
        self.assertEqual(hvd.allgather_object([self.rank] * self.rank), [[rank] * rank for rank in range(self.size)])

    def test_async_of_all_kinds(self) -> None:
        ones = torch.ones(self.size)
        handles = [begin(ones, f"mixed.{name}") for name, begin in TWICE.items()]
        for handle in handles[::-1]:
            self.assertIsNotNone(hvd.synchronize(handle))


@expanded
class Mistakes(Suite):
    @over(what=list(TWICE))
    def test_the_same_name_twice_is_an_error(self, what: str) -> None:
        """The rank that waits last has the first one pending, whatever the others do."""
        ones, begin = torch.ones(self.size), TWICE[what]
        if self.rank == 0:
            handle = begin(ones, f"{what}.twice")
            with self.assertRaises(ValueError):
                begin(ones, f"{what}.twice")
            hvd.barrier()
        else:
            hvd.barrier()
            handle = begin(ones, f"{what}.twice")
        hvd.synchronize(handle)
        self.check_allreduce()

    @over(what=["shape", "dtype", "rank", "op", "scale"])
    def test_allreduce(self, what: str) -> None:
        if self.size == 1:
            return
        odd = self.rank % 2
        shape: Any = {"shape": (3 + odd,), "rank": ((2, 2), (4,))[odd]}.get(what, (4,))
        dtype = (torch.float32, torch.int32)[odd] if what == "dtype" else torch.float32
        more: dict[str, Any] = {"op": (hvd.Sum, hvd.Max)[odd]} if what == "op" else {}
        more |= {"prescale_factor": 1.0 + odd} if what == "scale" else {}
        for _ in range(2):  # and again by the same name
            self.fails(MISMATCH, lambda: hvd.allreduce(torch.ones(shape, dtype=dtype), name="wrong", **more))
        self.same(hvd.allreduce(torch.ones(2), name="wrong"), torch.ones(2))

    @over(what=["rank", "rows", "dtype"])
    def test_allgather(self, what: str) -> None:
        if self.size == 1:
            return
        odd = self.rank % 2
        shape: Any = {"rank": ((2, 2), (2,))[odd], "rows": (2, 2 + odd)}.get(what, (2,))
        dtype = (torch.float32, torch.int32)[odd] if what == "dtype" else torch.float32
        self.fails(MISMATCH, lambda: hvd.allgather(torch.ones(shape, dtype=dtype), name="wrong.gather"))

    @over(what=["shape", "dtype", "root"])
    def test_broadcast(self, what: str) -> None:
        if self.size == 1:
            return
        odd = self.rank % 2
        dtype = (torch.float32, torch.int32)[odd] if what == "dtype" else torch.float32
        tensor = torch.ones(2 + odd * (what == "shape"), dtype=dtype)
        self.fails(MISMATCH, lambda: hvd.broadcast(tensor, odd * (what == "root"), name="wrong.broadcast"))

    def test_no_such_root(self) -> None:
        self.fails(ValueError, lambda: hvd.broadcast(torch.ones(1), self.size))

    def test_alltoall_splits(self) -> None:
        short, large = [1] * (self.size - 1), [2] * self.size
        self.fails(ValueError, lambda: hvd.alltoall(torch.ones(self.size), splits=torch.tensor(short)))
        self.fails(ValueError, lambda: hvd.alltoall(torch.ones(self.size), splits=torch.tensor(large)))
        self.fails(ValueError, lambda: hvd.alltoall(torch.ones(self.size), splits=torch.ones(self.size)))
        if self.size > 1:
            self.fails(ValueError, lambda: hvd.alltoall(torch.ones(self.size + 1)))

    def test_scalars(self) -> None:
        for call in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
            self.fails((ValueError, *MISMATCH), functools.partial(call, torch.tensor(1.0)))

    def test_reducescatter_operations(self) -> None:
        for op in (hvd.Min, hvd.Max, hvd.Adasum):
            kinds = (ValueError, NotImplementedError, *MISMATCH)
            self.fails(kinds, functools.partial(hvd.reducescatter, torch.ones(4), op=op))

    def test_not_contiguous_and_unknown_types(self) -> None:
        self.fails(ValueError, lambda: hvd.allreduce(torch.ones(3, 2).t()))
        self.fails(ValueError, lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64)))

    def test_handles(self) -> None:
        self.assertIsNone(hvd.synchronize(123456789))
        with self.assertRaises(ValueError):
            hvd.poll(123456789)

    def test_process_sets(self) -> None:
        one = hvd.add_process_set([0])
        with self.assertRaises(ValueError):
            hvd.add_process_set([0])
        if not one.included():
            with self.assertRaises(ValueError):
                hvd.allreduce(torch.ones(1), process_set=one)
            with self.assertRaises(ValueError):
                one.rank()
        self.assertTrue(hvd.remove_process_set(one))
        self.assertFalse(hvd.remove_process_set(one))
        with self.assertRaises(ValueError):
            hvd.allreduce(torch.ones(1), process_set=one)
        with self.assertRaises(ValueError):
            hvd.ProcessSet(["a"])

    def test_timeline(self) -> None:
        with tempfile.NamedTemporaryFile() as file:
            hvd.start_timeline(file.name)
            hvd.allreduce(torch.ones(2), name="timed")
            hvd.stop_timeline()
            hvd.barrier()
            self.assertEqual(b"timed" in Path(file.name).read_bytes(), True)


def main(*suites: type[unittest.TestCase]) -> int:
    """Runs all cases, as often as the first argument says, and prints how many went wrong."""
    torch.set_num_threads(1)
    wrong = 0
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
        loader = unittest.TestLoader()
        tests = unittest.TestSuite(loader.loadTestsFromTestCase(suite) for suite in suites)
        result = unittest.TextTestRunner(verbosity=0).run(tests)
        wrong += len(result.failures) + len(result.errors)
        print(f"cases: {result.testsRun}, wrong: {len(result.failures) + len(result.errors)}", flush=True)
    hvd.shutdown()
    return 1 if wrong else 0
