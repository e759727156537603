# Copies variables and objects from one rank to all.
# Touches TensorFlow, naming, ops, work and objects.
"""Scripts call these once before training, so that all ranks begin with the same values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..bindings.work import Work
from ..engine.interface import Kind
from ..operations import objects, requests
from ..world.groups import ProcessSet, global_process_set
from ..world.runtime import runtime
from . import naming
from .framework import tf
from .ops import run


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Copies the root's values to all variables: at once in eager mode, otherwise when the returned operation runs.

    `inplace` is accepted for compatibility.
    """
    return _broadcast(variables, root_rank, "broadcast_variables", process_set)[1]


def _broadcast(variables: Sequence[Any], root_rank: int, prefix: str, process_set: ProcessSet) -> tuple[list[Any], Any]:
    """The root's values, and the operation that assigns them to the variables."""
    variables = list(variables)
    _, ranks = runtime.world.groups.members(process_set)
    requests.member(root_rank, ranks, "root_rank")
    if not variables:
        return [], tf.group()
    if not tf.executing_eagerly():
        prefix = naming.in_graph("HorovodBroadcast", prefix, None, ignore_name_scope=False)
    # By index, not by name: Keras numbers its layers, and a rank may have made other layers before.
    names = tuple(f"{prefix}.{index}" for index in range(len(variables)))
    work = Work(Kind.BROADCAST, process_set=process_set, root=root_rank, names=names)
    values = run(work, [tf.stop_gradient(_read(variable)) for variable in variables])
    return values, tf.group(*[_assigned(variable, value) for variable, value in zip(variables, values, strict=True)])


def _read(variable: Any) -> Any:
    return tf.convert_to_tensor(variable)


def _assigned(variable: Any, value: Any) -> Any:
    done = variable.assign(value)
    return done if done is not None and hasattr(done, "op") and not tf.executing_eagerly() else tf.no_op()


def broadcast_(
    variables: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Copies the root's values to the variables in place. In eager mode, does it at once and returns the variables.

    In a graph it gives the new values; evaluating these also assigns them.
    """
    single = not isinstance(variables, (list, tuple))
    prefix = naming.checked(name) or "broadcast_variables"
    values, done = _broadcast([variables] if single else variables, root_rank, prefix, process_set)
    if tf.executing_eagerly():
        return variables
    with tf.control_dependencies([done]):
        results = [tf.identity(value) for value in values]
    return results[0] if single else results


def broadcast_global_variables(root_rank: int) -> Any:
    """An operation that copies the root's values to all global variables; only for graphs with sessions."""
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables() works only in graphs for sessions; in eager mode call "
            "broadcast_variables(model.variables, root_rank=0)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Copies the root's values to all variables after a session was made. `device` is accepted for compatibility."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Adds the operation to the graph, before the graph is finalised."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs the operation."""
        session.run(self.bcast_op)


# Objects are sent outside the graph: no session is needed, and a given one is not used.


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object on every rank; objects of other ranks are ignored. `session` is accepted for compatibility."""
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """A function that gives the root's object on every rank."""

    def give(obj: Any = None) -> Any:
        return objects.broadcast_object(obj, root_rank, name, process_set)

    return give


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's object, in the order of ranks. `session` is accepted for compatibility."""
    return objects.allgather_object(obj, name, process_set)
