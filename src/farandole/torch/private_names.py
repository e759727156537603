# Every private name of torch that this package uses, with what it is for and what happens without it.
# Touches torch; nobody else does so by private names.
"""Names are looked for when this file is imported; functions stand for them, so that callers know no private name."""

from __future__ import annotations

from collections.abc import Callable

from ..private_names import find

_number = find(
    "torch._C._current_graph_task_id",
    "telling DDP's buckets from other allreduces",
    "DDP's buckets are not brought into shared memory, and their failures are raised as RuntimeError",
)
_node = find(
    "torch._C._current_autograd_node",
    "telling the backward pass from what follows it",
    "failures of DDP's buckets are raised as RuntimeError",
)
_engine = find(
    "torch.autograd.Variable._execution_engine",
    "a call at the end of a backward pass",
    "the last gradients of a backward pass are sent by step(), and failures of DDP's buckets are raised as RuntimeError",
)


def backward_pass() -> int:
    """The number of the backward pass that runs on this thread; -1 without one."""
    return -1 if _number is None else int(_number())


def in_backward_hook() -> bool:
    """Whether a node of a backward pass runs on this thread, such as one that stores a parameter's gradient."""
    return _node is not None and _node() is not None


def after_backward(call: Callable[[], None]) -> bool:
    """Calls when the backward pass of this thread has ended, before `backward` returns; False where that cannot be."""
    if _engine is None:
        return False
    _engine.queue_callback(call)
    return True
