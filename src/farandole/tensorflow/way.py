# Chooses how work runs: compiled operations in graphs, where available; otherwise callbacks and NumPy.
# Touches TensorFlow, compiled, host and work.
"""`carry_out(work, tensors, splits)` gives the outputs; both ways send the engine the same requests.

`compiled_now()` tells which way is used. `work_of(node)` reads the work of a compiled node. `collectives_before()`
gives the collectives that a function already has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..bindings.work import Work, own_name
from ..engine.interface import Kind, ReduceOp
from ..operations.pending import names_of
from ..world.groups import ProcessSet, global_process_set
from ..world.runtime import runtime
from . import compiled, host
from .framework import tf

# Types of nodes that are collectives, compiled or by callback. Nodes of _HOLDERS may contain collectives.
_COLLECTIVES = ("FarandoleCollective", "FarandoleAlltoall", "PyFuncStateless")
_HOLDERS = ("PartitionedCall", "While", "If", "Case")


def compiled_now() -> bool:
    """Whether calls made now become compiled nodes of a graph."""
    return not tf.executing_eagerly() and compiled.library() is not None


def carry_out(work: Work, tensors: Sequence[Any], splits: Any = None) -> list[Any]:
    """The outputs of the work on these tensors."""
    if not compiled_now():
        return host.carry_out(work, tensors, splits)
    library = compiled.library()
    host.shapes(work, tensors)  # raises for scalars where they are not allowed
    operation = work.kind.name.lower()
    if work.names is not None:
        # Each is sent as soon as it is ready, while the rest of the graph still runs.
        return [
            _node(library, work, [tensor], names_of(operation, name))[0]
            for tensor, name in zip(tensors, work.names, strict=True)
        ]
    names = names_of(operation, work.name, len(tensors) if work.grouped else None)
    if work.kind == Kind.ALLTOALL:
        rows = tf.constant(-1, tf.int64) if splits is None else tf.cast(splits, tf.int64)
        return list(
            library.farandole_alltoall(
                anchor=library.farandole_anchor(), tensor=tensors[0], splits=rows, **_attributes(work, names)
            )
        )
    return _node(library, work, tensors, names)


def collectives_before() -> list[Any]:
    """The nodes of a tf.function for what its program has done so far; none in a graph for sessions.

    Collectives need not wait for each other, but a rank that has joined cannot begin another one.
    """
    graph, found = tf.compat.v1.get_default_graph(), []
    while getattr(graph, "building_function", False):
        found += [node for node in graph.get_operations() if node.type in _COLLECTIVES or node.type.endswith(_HOLDERS)]
        graph = graph.outer_graph  # the graph outside a branch or a loop body
    return found


def _node(library: Any, work: Work, tensors: Sequence[Any], names: Sequence[str | None]) -> list[Any]:
    return list(
        library.farandole_collective(
            anchor=library.farandole_anchor(), tensors=list(tensors), **_attributes(work, names)
        )
    )


def _attributes(work: Work, names: Sequence[str | None]) -> dict[str, Any]:
    everyone = work.process_set is global_process_set
    return {
        "kind": int(work.kind),
        "tensor_names": [own_name("tensorflow", str(name)) for name in names],
        "bundle": work.grouped,
        "reduce_op": int(work.op),
        "root_rank": int(work.root),
        "process_set_id": work.process_set.process_set_id,
        # The world's size may change while the graph remains; the ranks of a process set do not.
        "ranks": [] if everyone else work.process_set.ranks,
        "scales": f"{work.scales[0].hex()} {work.scales[1].hex()}",
        "name": work.label,
    }


def work_of(node: Any) -> Work:
    """The work for which a node was made, without its names."""
    ranks = list(node.get_attr("ranks"))
    prescale, postscale = node.get_attr("scales").decode().split()
    return Work(
        Kind(node.get_attr("kind")),
        None,
        ReduceOp(node.get_attr("reduce_op")),
        (float.fromhex(prescale), float.fromhex(postscale)),
        (runtime.world.groups.find(ranks) or ProcessSet(ranks)) if ranks else global_process_set,
        node.get_attr("root_rank"),
        node.get_attr("bundle"),
    )
