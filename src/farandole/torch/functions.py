# Copies the state of models and optimizers from one rank to all. Functions for objects come from the NumPy layer.
# Touches torch, memory, ops, sharding, trees and objects.
"""Scripts call these once before training, so that all ranks begin with the same parameters and optimizer state."""

from __future__ import annotations

from typing import Any

import torch

from ..base import hints
from ..operations.objects import allgather_object, broadcast_object
from ..world.groups import ProcessSet, global_process_set
from ..world.runtime import runtime
from . import memory
from .ops import begin_broadcast, synchronize
from .sharding import Shares
from .trees import join, split

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(params: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Gives every rank the root's values, in place. `params`: `model.state_dict()`, or a list of tensors or pairs."""
    if isinstance(params, dict):
        pairs = sorted(params.items())
    elif isinstance(params, list):
        pairs = [item if isinstance(item, tuple) else (None, item) for item in params]
    else:
        raise ValueError(
            f"params is a {type(params).__name__}; expected a dict such as model.state_dict(), or a list of tensors or "
            "of (name, tensor), such as list(model.named_parameters())"
        )
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"params: {name!r} is a {type(tensor).__name__}, not a tensor; see broadcast_object")
    _broadcast_all(pairs, root_rank, process_set)
    hints.training.parameters_broadcast = True


def _broadcast_all(pairs: list[tuple[str | None, torch.Tensor]], root_rank: int, process_set: ProcessSet) -> None:
    """Broadcasts all at once. Waits for all of them, also after a failure, so that nothing stays pending."""
    under_way = []
    failure: Exception | None = None
    try:
        for name, tensor in pairs:
            values = tensor.detach()
            whole = values.contiguous()
            # A broadcast only copies bytes, so types that the engine does not know are sent as bytes.
            sent = whole if memory.supported(whole.dtype) else whole.reshape(-1).view(torch.uint8)
            begun = begin_broadcast(sent, root_rank, name, process_set, in_place=True)
            for request in begun.requests:
                request.device = -1  # state may be on the CPU on this rank and on a GPU on another
            under_way.append((begun.handle(), values, whole))
    except Exception as error:
        failure = error
    for handle, values, whole in under_way:
        try:
            synchronize(handle)
            if whole is not values:
                values.copy_(whole)
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives every rank the root's optimizer state and options. `model` is accepted for compatibility and not used.

    On other ranks the state need not exist yet: it is made from the root's.
    """
    del model
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("the state of torch.optim.LBFGS cannot be broadcast")
    # Each rank has a part of a sharded optimizer's state, so all ranks must ask for the whole.
    sharded = isinstance(getattr(optimizer, "_gradients", None), Shares)
    whole = optimizer.state_dict() if sharded or runtime.world.engine.rank == root_rank else {}
    if runtime.world.engine.rank == root_rank:
        rest, tensors = split(whole)
        kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        broadcast_object((rest, kinds), root_rank, "optimizer_state", process_set)
        _broadcast_all(_numbered(tensors), root_rank, process_set)
        return
    rest, kinds = broadcast_object(None, root_rank, "optimizer_state", process_set)
    tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in kinds]
    _broadcast_all(_numbered(tensors), root_rank, process_set)
    loaded = join(rest, tensors)
    optimizer.load_state_dict(loaded)
    if not sharded:
        _keep_types(optimizer.state_dict()["state"], loaded["state"])


def _keep_types(state: dict[Any, Any], loaded: dict[Any, Any]) -> None:
    """Undoes the conversions of load_state_dict: it gives tensors, also those inside of lists and dicts, the type of
    their parameter, and loses strings. The root's optimizer may use another type."""
    for key, value in loaded.items():
        if isinstance(value, dict):  # the state of one parameter; an optimizer may have other entries
            state[key].update(_as_given(value, state[key]))


def _as_given(value: Any, loaded: Any) -> Any:
    """The value of the root, with tensors on the devices that load_state_dict has chosen."""
    if isinstance(value, torch.Tensor):
        return loaded if value.dtype == loaded.dtype else value.to(loaded.device)
    if isinstance(value, dict):
        return {key: _as_given(one, loaded[key]) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_as_given(one, other) for one, other in zip(value, loaded, strict=True))
    return value


def _numbered(tensors: list[torch.Tensor]) -> list[tuple[str | None, torch.Tensor]]:
    return [(f"optimizer_state.{number}", tensor) for number, tensor in enumerate(tensors)]
