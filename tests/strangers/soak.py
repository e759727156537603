# Random programs over Horovod's functions, for all frameworks: what each rank calls, in which order, what came of it.
# Touches the bindings of tests/frameworks; which engine runs it, FARANDOLE_ENGINE says.
"""`horovodrun -np 2 python soak.py numpy,torch SEED COUNT`: a line of JSON for each program and rank, with a digest of
results and kinds of errors. Two engines must say the same: run it on both, and compare. `--say` prints the calls."""

from __future__ import annotations

import hashlib
import importlib
import json
import random
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import farandole
from farandole.engine.interface import DType

NUMBERS = ["UINT8", "INT8", "INT16", "INT32", "INT64", "FLOAT16", "FLOAT32", "FLOAT64"]
FLOATS = ["FLOAT16", "FLOAT32", "FLOAT64"]
REDUCTIONS = ["Sum", "Average", "Min", "Max", "Product"]
WITH_HANDLES = ("numpy", "torch")
MOVING = ("allgather", "broadcast", "alltoall", "object", "gathered_object")
BINDINGS = {
    "torch": ("torch_binding", "TorchBinding"),
    "tensorflow": ("tensorflow_binding", "EagerBinding"),
    "jax": ("jax_binding", "EagerBinding"),
}


class NumPyBinding:
    """The functions of the package itself."""

    hvd: Any = farandole

    def tensor(self, values: Any, dtype: DType) -> Any:
        return np.ascontiguousarray(values)

    def array(self, tensor: Any) -> Any:
        return np.asarray(tensor)


def binding(name: str) -> Any:
    """The framework by its name."""
    if name == "numpy":
        return NumPyBinding()
    module, cls = BINDINGS[name]
    return getattr(importlib.import_module(module), cls)()


# --- What is called --------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """One operation as all its members call it; `wrong` says how one of them calls it otherwise."""

    kind: str
    framework: str
    seed: int
    members: list[int]
    name: str | None = None
    dtype: str = "FLOAT32"
    op: str = "Sum"
    shapes: list[tuple[int, ...]] = field(default_factory=list)  # of one tensor, or of a group's
    rows: list[int] = field(default_factory=list)  # by member: allgather
    splits: list[list[int]] | None = None  # by member: alltoall
    root: int = 0  # a member's place
    scales: tuple[float, float] = (1.0, 1.0)
    in_place: bool = False
    grouped: bool = False
    wrong: str = ""
    culprit: int = 0  # a member's place


def drawn(rng: random.Random, frameworks: list[str], size: int, number: int, asynchronous: bool) -> Call:
    """A call."""
    some = [name for name in frameworks if name in WITH_HANDLES] if asynchronous else frameworks
    framework = rng.choice(some)
    members = list(range(size)) if rng.random() < 0.75 else sorted(rng.sample(range(size), rng.randint(1, size)))
    kinds = ["allreduce"] * 4 + ["allgather", "broadcast", "alltoall", "reducescatter"] * 2
    kinds += [] if asynchronous else ["object", "gathered_object", "barrier"]
    call = Call(rng.choice(kinds), framework, rng.randrange(1 << 30), members)
    call.name = f"call.{number}" if asynchronous or rng.random() < 0.5 else None
    moves = call.kind in MOVING
    call.dtype = rng.choice(["BOOL", *NUMBERS] if moves else NUMBERS)
    call.op = rng.choice(["Sum", "Average"] if call.kind == "reducescatter" else REDUCTIONS)
    if call.dtype not in FLOATS and call.op == "Average":
        call.op = "Sum"
    if not moves and rng.random() < 0.25 and call.dtype in FLOATS:
        call.scales = (rng.choice([0.5, 1.0, 3.0]), rng.choice([0.25, 1.0, 1.5]))
    call.grouped = call.kind in ("allreduce", "allgather", "reducescatter") and rng.random() < 0.25
    longest = rng.choice([3, 17, 300, 5000])
    for _ in range(rng.randint(1, 4) if call.grouped else 1):
        least = 0 if call.kind == "allreduce" else 1
        shape = tuple(rng.randint(0, 4) for _ in range(rng.randint(least, 3)))
        call.shapes.append((rng.randint(0, longest), *shape[1:]) if shape else ())
    call.rows = [rng.randint(0, 6) for _ in members]
    if call.kind == "alltoall":
        call.splits = [[rng.randint(0, 4) for _ in members] for _ in members]
        if rng.random() < 0.3:
            call.splits = None
    call.root = rng.randrange(len(members))
    call.in_place = call.kind in ("allreduce", "broadcast") and framework in WITH_HANDLES and rng.random() < 0.4
    if rng.random() < 0.15:
        _spoil(rng, call)
    return call


def _spoil(rng: random.Random, call: Call) -> None:
    """One member calls it in another way, or all make the same mistake."""
    ways = {
        "allreduce": ["dtype", "shape", "dimensions", "op", "scale", "no such set"],
        "reducescatter": ["dtype", "shape", "op", "no such operation"],
        "allgather": ["dtype", "columns", "dimensions"],
        "alltoall": ["dtype", "dimensions", "long splits"],
        "broadcast": ["dtype", "shape", "root", "no such root"],
    }
    if call.kind not in ways or call.grouped:
        return
    call.wrong = rng.choice(ways[call.kind])
    if len(call.members) == 1 and not call.wrong.startswith(("no such", "long")):
        call.wrong = ""
    if call.wrong in ("op", "scale", "dtype", "root") and call.dtype == "BOOL":
        call.wrong = ""
    call.culprit = rng.randrange(len(call.members))


@dataclass
class Program:
    """Blocks of calls: one after the other, or all begun before any is waited for, each rank in its own order."""

    blocks: list[tuple[bool, list[Call]]]
    joins: list[int]  # how many allreduces each rank has before it joins; none: nobody does


def program_of(seed: int, frameworks: list[str], size: int) -> Program:
    """The same on all ranks."""
    rng = random.Random(seed)
    blocks, number = [], 0
    for _ in range(rng.randint(2, 5)):
        asynchronous = rng.random() < 0.5 and bool(set(frameworks) & set(WITH_HANDLES))
        calls = []
        for _ in range(rng.randint(1, 6)):
            calls.append(drawn(rng, frameworks, size, number, asynchronous))
            number += 1
        blocks.append((asynchronous, calls))
    joins = rng.sample(range(size + 2), size) if rng.random() < 0.2 else []
    return Program(blocks, joins)


# --- What a rank does ------------------------------------------------------------------------------------------------


class Rank:
    """Runs programs and notes what came of each call."""

    def __init__(self, frameworks: list[str], say: bool) -> None:
        self.frameworks = frameworks
        self.bindings = {name: binding(name) for name in frameworks}
        farandole.init(process_sets="dynamic")
        self.rank, self.size = farandole.rank(), farandole.size()
        self.say = say
        self.sets: dict[tuple[int, ...], Any] = {tuple(range(self.size)): farandole.global_process_set}
        subsets = [[index for index in range(self.size) if bits >> index & 1] for bits in range(1, 1 << self.size)]
        for ranks in subsets:
            if len(ranks) < self.size:
                self.sets[tuple(ranks)] = farandole.add_process_set(ranks)

    def values(self, call: Call, member: int, shape: tuple[int, ...], part: int, dtype: str) -> Any:
        """Numbers whose sums round, and never overflow."""
        rng = np.random.default_rng([call.seed, member, part])
        kind = np.dtype(dtype.lower())
        if kind.kind == "b":
            return np.asarray(rng.random(shape) < 0.5)
        if call.op == "Product":
            return np.asarray(rng.uniform(0.5, 1.5, shape)).astype(kind)
        low = 0 if kind.kind == "u" else -9
        return np.asarray(rng.normal(0.0, 3.0, shape) if kind.kind == "f" else rng.integers(low, 9, shape)).astype(kind)

    def tensors(self, call: Call, member: int) -> list[Any]:
        """This member's tensors."""
        wrong = call.wrong if member == call.culprit else ""
        dtype = ("FLOAT32" if call.dtype != "FLOAT32" else "INT32") if wrong == "dtype" else call.dtype
        found = []
        for part, shape in enumerate(call.shapes):
            if call.kind == "allgather":
                shape = (call.rows[member] + part, *shape[1:])
            if call.kind == "alltoall":
                rows = 2 * len(call.members) if call.splits is None else sum(call.splits[member])
                shape = (rows, *shape[1:])
            if wrong == "shape":
                shape = (shape[0] + 1 if shape else 2, *shape[1:])
            if wrong == "columns":
                shape = (*shape, 2) if len(shape) < 2 else (shape[0], shape[1] + 1, *shape[2:])
            if wrong == "dimensions":
                shape = (*(shape or (1,)), 1)
            array = self.values(call, member, shape, part, dtype)
            found.append(self.bindings[call.framework].tensor(array, DType[dtype]))
        return found

    def begin(self, call: Call, asynchronous: bool) -> Any:
        """Calls it; a handle if it is asynchronous."""
        hvd, member = self.bindings[call.framework].hvd, call.members.index(self.rank)
        wrong = call.wrong if member == call.culprit else ""
        common: dict[str, Any] = {"process_set": self.sets[tuple(call.members)]}
        if call.name is not None:
            common["name"] = call.name
        if call.wrong == "no such set":
            common["process_set"] = farandole.ProcessSet([0])  # never added
        if call.kind == "barrier":
            return farandole.barrier(process_set=common["process_set"])
        if call.kind == "object":
            return farandole.broadcast_object([call.seed, self.rank], call.members[call.root], **common)
        if call.kind == "gathered_object":
            return farandole.allgather_object({self.rank: call.rows[member]}, **common)
        tensors = self.tensors(call, member)
        first = tensors if call.grouped else tensors[0]
        words = "grouped_" * call.grouped + call.kind + "_" * (call.in_place and not asynchronous)
        words += "_async" * asynchronous + "_" * (call.in_place and asynchronous)
        function = getattr(hvd, words)
        if call.kind in ("allreduce", "reducescatter"):
            op = {"Sum": "Average", "Average": "Sum"}.get(call.op, "Sum") if wrong == "op" else call.op
            op = "Max" if call.wrong == "no such operation" else op
            before, after = call.scales
            scales = {"prescale_factor": before * (2.0 if wrong == "scale" else 1.0), "postscale_factor": after}
            return function(first, op=getattr(hvd, op), **scales, **common)
        if call.kind == "broadcast":
            root = call.members[(call.root + (wrong == "root")) % len(call.members)]
            return function(first, self.size if call.wrong == "no such root" else root, **common)
        if call.kind == "alltoall" and call.splits is not None:
            splits = list(call.splits[member])
            splits[0] += call.wrong == "long splits"
            return function(first, splits=splits, **common)
        return function(first, **common)

    def plain(self, value: Any, call: Call) -> Any:
        """A result as something that can be digested: types, shapes and bytes."""
        if isinstance(value, (list, tuple)) and call.kind not in MOVING[3:]:
            return [self.plain(one, call) for one in value]
        if isinstance(value, (dict, list)) or value is None:
            return repr(value)
        array = self.bindings[call.framework].array(value)
        return [array.dtype.name, list(array.shape), hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()]

    def attempt(self, call: Call, work: Any) -> Any:
        """What came of it: the result, or the kind of error."""
        try:
            return self.plain(work(), call)
        except Exception as error:
            if self.say:
                print(f"rank {self.rank}: {call.kind} {call.wrong}: {type(error).__name__}: {error}", file=sys.stderr)
            return f"error {type(error).__name__}"

    def block(self, asynchronous: bool, calls: list[Call], rng: random.Random) -> list[Any]:
        """Runs a block's calls; `rng` decides this rank's own order."""
        mine = [place for place, call in enumerate(calls) if self.rank in call.members]
        results: dict[int, Any] = {}
        if not asynchronous:
            for place in mine:
                results[place] = self.attempt(calls[place], lambda place=place: self.begin(calls[place], False))
            return [results.get(place) for place in range(len(calls))]
        handles: dict[int, Any] = {}
        for place in rng.sample(mine, len(mine)):
            call = calls[place]
            try:
                handles[place] = self.begin(call, True)
            except Exception as error:
                results[place] = f"error {type(error).__name__}"
        for place in rng.sample(list(handles), len(handles)):
            call = calls[place]
            hvd = self.bindings[call.framework].hvd
            if rng.random() < 0.3:
                hvd.poll(handles[place])
            results[place] = self.attempt(call, lambda call=call, place=place, hvd=hvd: hvd.synchronize(handles[place]))
        return [results.get(place) for place in range(len(calls))]

    def run(self, seed: int) -> list[Any]:
        """A program's results."""
        program = program_of(seed, self.frameworks, self.size)
        own = random.Random(f"{seed} {self.rank}")
        results: list[Any] = []
        for asynchronous, calls in program.blocks:
            if self.say:
                print(
                    f"rank {self.rank}: {'async' if asynchronous else 'in turn'}: {calls}", file=sys.stderr, flush=True
                )
            results.append(self.block(asynchronous, calls, own))
        if program.joins:
            for turn in range(program.joins[self.rank]):
                total = farandole.allreduce(
                    np.full(3, float(self.rank + turn)), op=farandole.Sum, name=f"uneven.{turn}"
                )
                results.append(total.tolist())
            results.append(["joined", farandole.join()])
        return results


def main() -> None:
    """A line per program."""
    frameworks, first, count = sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3])
    rank = Rank(frameworks, "--say" in sys.argv)
    for seed in range(first, first + count):
        results = rank.run(seed)
        errors = json.dumps(results).count('"error ')
        calls = sum(len(block) for block in results if isinstance(block, list))
        digest = hashlib.sha256(json.dumps(results).encode()).hexdigest()[:16]
        said: dict[str, Any] = {"seed": seed, "digest": digest, "errors": errors, "calls": calls}
        if "--say" in sys.argv:
            said["results"] = results
        print(json.dumps(said), flush=True)
    farandole.shutdown()


if __name__ == "__main__":
    main()
