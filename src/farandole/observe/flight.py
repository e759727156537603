# Writes last operations in the schema of torch's Flight Recorder, so that analysers for it can read them.
# Writes the files whose paths it gets.
"""`dump(record)` gives a dictionary of the schema, version 2.10. torch's own analyser reads pickle files whose names
end with the rank: `python -m torch.distributed.flight_recorder.fr_trace FOLDER`. Other programs read the same as JSON.

The schema knows the names of torch's backends alone, so ours are written as gloo's. It has one number for a collective
in its group: here the number of the bucket, times 1000, and the index in the bucket.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from farandole.observe.records import Operation, Record

VERSION = "2.10"
_NAMES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "broadcast": "broadcast", "alltoall": "all_to_all",
    "reducescatter": "reduce_scatter", "barrier": "barrier",
}  # fmt: skip
_DTYPES = {
    "bool": "Bool", "uint8": "Byte", "int8": "Char", "uint16": "UInt16", "int16": "Short", "int32": "Int",
    "int64": "Long", "float16": "Half", "float32": "Float", "float64": "Double", "bfloat16": "BFloat16",
}  # fmt: skip
_PLACES = 1000  # in a bucket


def dump(record: Record) -> dict[str, Any]:
    """The last operations of one rank, in the schema. Changes of process sets and joins are left out: it has none."""
    groups = {0: tuple(range(record.size)), **record.groups}
    return {
        "version": VERSION,
        "pg_config": {
            str(group): {"name": str(group), "desc": _described(group), "ranks": str(list(ranks))}
            for group, ranks in groups.items()
        },
        "pg_status": {
            str(group): _status([one for one in record.operations if one.group == group and not one.between_two])
            for group in groups
        },
        "entries": list(_entries(record, groups)),
    }


def write(folder: Path, ranks: Mapping[int, Record]) -> None:
    """Writes `rank_N` (pickle) into folder/flight_recorder and `rank_N.json` into folder/flight_recorder_json."""
    pickles, texts = folder / "flight_recorder", folder / "flight_recorder_json"
    pickles.mkdir(parents=True, exist_ok=True)
    texts.mkdir(exist_ok=True)
    for rank, record in ranks.items():
        found = dump(record)
        (pickles / f"rank_{rank}").write_bytes(pickle.dumps(found, protocol=2))
        (texts / f"rank_{rank}.json").write_text(json.dumps(found, indent=1) + "\n")


def _described(group: int) -> str:
    return "default_pg" if group == 0 else f"process set {group}"


def _status(operations: list[Operation]) -> dict[str, Any]:
    begun = [one.sequence for one in operations if one.begun_ns]
    done = [one.sequence for one in operations if one.done_ns and not one.code]
    return {
        "last_enqueued_collective": len(operations),
        "last_started_collective": max(begun, default=-1),
        "last_completed_collective": max(done, default=-1),
    }


def _entries(record: Record, groups: Mapping[int, tuple[int, ...]]) -> Iterator[dict[str, Any]]:
    last: dict[int, int] = {}  # group -> the number of the last collective
    transfers: dict[int, int] = {}
    for one in sorted(record.operations, key=lambda one: (not one.ready_ns, one.ready_ns, one.number)):
        members = groups.get(one.group, ())
        if one.between_two:
            transfers[one.group] = transfers.get(one.group, 0) + 1
            name = f"send {record.rank}->{one.peer}" if one.kind == "send" else f"recv {record.rank}<-{one.peer}"
        elif one.kind in _NAMES:
            before = last.get(one.group, 0)
            first = one.sequence * _PLACES
            last[one.group] = first if one.sequence and first > before else before + 1
            name = _NAMES[one.kind]
        else:
            continue
        yield _entry(one, record, name, last.get(one.group, 0), transfers.get(one.group, 0), max(1, len(members)))


def _entry(one: Operation, record: Record, name: str, sequence: int, transfer: int, members: int) -> dict[str, Any]:
    sizes = [list(one.shape)]
    result = [_result(one, members)]
    begun, done = one.begun_ns or one.ready_ns, one.done_ns
    return {
        "frames": [],
        "record_id": one.number,
        "pg_id": one.group,
        "process_group": (str(one.group), _described(one.group)),
        "collective_seq_id": sequence,
        "p2p_seq_id": transfer,
        "op_id": one.number,
        "profiling_name": f"gloo:{name}",
        "tensor_name": one.name,
        "time_created_ns": one.submitted_ns + record.epoch_offset_ns,
        "input_sizes": sizes,
        "input_dtypes": [_DTYPES.get(one.dtype, one.dtype)],
        "output_sizes": result,
        "output_dtypes": [_DTYPES.get(one.dtype, one.dtype)],
        "state": "completed" if done else "started" if begun else "scheduled",
        "time_discovered_started_ns": begun + record.epoch_offset_ns if begun else None,
        "time_discovered_completed_ns": done + record.epoch_offset_ns if done else None,
        "duration_ms": (done - begun) / 1e6 if begun and done else None,
        "retired": bool(done),
        "timeout_ms": 0,
        "is_p2p": one.between_two,
    }


def _result(one: Operation, members: int) -> list[int]:
    """The shape of the result; that of a gather or scatter as if all ranks had sent the same."""
    shape = list(one.shape)
    if one.kind == "allgather":
        return [math.prod(shape[:1]) * members, *shape[1:]]
    if one.kind == "reducescatter" and shape:
        return [shape[0] // members, *shape[1:]]
    return shape
