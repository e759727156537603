# Every private name of torch that this package uses, with what it is for and what happens without it.
# Touches torch; imports nothing else.
"""Names are looked up when this file is imported. Callers use the functions here and know no private name.

The import happens when farandole.torch is imported, or when torch.distributed makes our first group; not with torch.

Torch calls private methods of a process group in Python (`_set_group_name`, `_allgather_base` and others in our
torch/distributed/group.py, operations.py and composed.py). If it calls a method that our groups lack, it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import find, has, of

_number = find(
    "torch._C:_current_graph_task_id",
    "telling DDP's buckets from other allreduces",
    "DDP's buckets are not brought into shared memory, and their failures are raised as RuntimeError",
)
_node = find(
    "torch._C:_current_autograd_node",
    "telling a backward pass from what follows it",
    "failures of DDP's buckets are raised as RuntimeError",
)
_queue = find(
    "torch.autograd:Variable._execution_engine.queue_callback",
    "a call at the end of a backward pass",
    "the last gradients of a backward pass are sent by step(); failures of DDP's buckets are raised as RuntimeError",
)
_copy = find("torch:_foreach_copy_", "copying many gradients in one call", "they are copied one by one")
_share = find(
    "torch:UntypedStorage._share_fd_cpu_",
    "the file of a tensor in shared memory",
    "DDP's buckets and shared tensors are reduced through copies, as others are",
)
_batch_norm = find(
    "torch.nn.modules.batchnorm:_BatchNorm",
    "the base class of batch normalisations",
    "SyncBatchNorm derives from BatchNorm1d, and batch normalisations of other classes than torch's are not recognised",
)
_default_store = find(
    "torch.distributed.distributed_c10d:_get_default_store",
    "the store in which the members of a new group meet",
    "new_group raises RuntimeError; the default group works",
)
# autoload.py uses it during torch's own import. torch registers a scheme only once, and already has "env".
find(
    "torch.distributed.rendezvous:_rendezvous_handlers",
    "meeting without MASTER_ADDR and MASTER_PORT",
    "init_process_group needs MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, as with torch's own backends",
)
_pairing = [
    find(
        f"torch.distributed:ProcessGroup.{name}",
        "a group with two backends",
        '"cpu:farandole,cuda:nccl" raises RuntimeError; "farandole" alone takes CUDA tensors too',
    )
    for name in ("_register_backend", "_set_default_backend", "_set_group_name", "_get_backend")
]
_coalescing = [
    find(
        f"torch.distributed:ProcessGroup.{name}",
        "coalescing on CUDA together with our backend",
        "it raises RuntimeError",
    )
    for name in ("_start_coalescing", "_end_coalescing")
]
# Since 2.15 torch attaches its flight recorder to each group whose backend does not record by itself. This fails if the
# group is an object in Python.
_recording = find(
    "torch.distributed.distributed_c10d:_FR_SELF_RECORDING_BACKENDS",
    "keeping torch's flight recorder from groups in Python",
    "there is no such recorder",
    expected=False,
)


def backward_pass() -> int:
    """The number of the backward pass that runs on this thread; -1 if there is none."""
    return -1 if _number is None else int(_number())


def in_backward_hook() -> bool:
    """Whether a node of a backward pass runs on this thread, such as one that stores a parameter's gradient."""
    return _node is not None and _node() is not None


def after_backward(call: Callable[[], None]) -> bool:
    """Calls `call` at the end of this thread's backward pass, before `backward` returns. False if it cannot."""
    if _queue is None:
        return False
    _queue(call)
    return True


def copy_each(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    """Copies each source to its target."""
    if _copy is not None:
        _copy(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def share_storage(storage: Any) -> tuple[int, int]:
    """Moves the storage to shared memory; gives descriptor and size. Raises RuntimeError if this is impossible."""
    if _share is None:
        raise RuntimeError("this release of torch does not report the file of a shared tensor")
    fd, size = _share(storage)
    return int(fd), int(size)


def batch_norm_class() -> Any:
    """The base class of batch normalisations."""
    if _batch_norm is not None:
        return _batch_norm
    from torch import nn

    return nn.BatchNorm1d


def batch_norms() -> tuple[type, ...]:
    """Classes whose objects are batch normalisations."""
    if _batch_norm is not None:
        return (_batch_norm,)
    from torch import nn

    return (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def default_store() -> Any:
    """The store of the default group."""
    if _default_store is None:
        raise RuntimeError("this release of torch does not report the default group's store, which new groups need")
    return _default_store()


def group_around(made: Any, kind: Any, device: Any, name: str, group: Any) -> None:
    """Makes `made` the backend of `group`, a process group of torch, for this device."""
    if None in _pairing:
        raise RuntimeError(
            "this release of torch cannot combine two backends in a group; use only the backend farandole"
        )
    register, set_default, set_name, _ = _pairing
    if hasattr(made, "_set_sequence_number_for_group"):  # torch calls it for its own groups
        made._set_sequence_number_for_group()
    set_default(group, kind)
    register(group, device, kind, made)
    set_name(group, name)


def backend_of(group: Any, device: Any) -> Any:
    """The backend of a process group of torch for the device."""
    return _pairing[3](group, device)


def coalesce(group: Any, device: Any, begin: bool) -> Any:
    """Begins or ends a series of operations that torch's own group sends together."""
    call = _coalescing[0 if begin else 1]
    if call is None:
        raise RuntimeError("this release of torch cannot coalesce operations of a group with two backends")
    return call(group, device)


_OWN_HOOKS = (
    "hooks",
    "_profile_name",
)  # endings of the attributes in which torch.optim keeps hooks of scripts


def is_hook(attribute: str) -> bool:
    """Whether the attribute of an optimizer contains hooks of the script, or torch's name for profiling its steps.

    If torch uses other names, a copy has the hooks of the original, and a pickle must be able to contain them.
    """
    return attribute.endswith(_OWN_HOOKS)


def runs_hooks_itself(step: Callable[..., Any]) -> Callable[..., Any]:
    """For a `step` that calls the wrapped class's step, which runs the hooks: torch must not wrap it again.

    If torch uses another mark, the hooks of a step are called twice.
    """
    step.hooked = True  # type: ignore[attr-defined]
    return step


def step_with_scaler(kind: type) -> None:
    """GradScaler steps optimizers of this class on every rank, even if their gradients are infinite.

    Torch reads this attribute of the optimizer. If it does not, the agreement in `before_scaler` is sufficient, except
    with FARANDOLE_AUTOLOAD=0: then ranks with finite gradients wait for ranks that do not step.
    """

    def change(optimizer: Any, value: bool) -> None:
        """The wrapped class's constructor sets it; this has no effect."""

    kind._step_supports_amp_scaling = property(lambda optimizer: True, change)  # type: ignore[attr-defined]


_TIMEOUT = (
    "the time limit of NCCL together with our backend and of parts of a group",
    "NCCL's own, and the whole group's",
)
find("torch._C._distributed_c10d:Backend.Options._timeout", *_TIMEOUT)


def set_timeout(options: Any, timeout: Any) -> None:
    """Sets the timeout of operations of a backend with these options."""
    if has(options, "_timeout", *_TIMEOUT):
        options._timeout = timeout


def timeout_of(options: Any) -> Any:
    """Reads the timeout; None if it is not available."""
    return of(options, "_timeout", *_TIMEOUT)


def leave_unrecorded(backend: str) -> None:
    """Excludes groups of this backend from torch's flight recorder."""
    if _recording is not None:
        _recording.add(backend)
