# Every private name of Ray that this package uses, with what it is for and what happens without it.
# Touches Ray.
"""Names are looked up when this file is imported. Callers use the functions here and know no private name."""

from __future__ import annotations

from . import find

_METRICS = ("`result.metrics` without a checkpoint", "it has what Ray keeps: reports that came with a checkpoint")
_put = find("ray.experimental.internal_kv:_internal_kv_put", *_METRICS)
_get = find("ray.experimental.internal_kv:_internal_kv_get", *_METRICS)
_delete = find("ray.experimental.internal_kv:_internal_kv_del", *_METRICS)

_REPORTS = (
    "`ray.train.report` while a worker of an elastic run is replaced",
    "it waits there until that worker has come back",
)
_get_train = find("ray.train.v2._internal.execution.train_fn_utils:get_train_fn_utils", *_REPORTS)
_set_train = find("ray.train.v2._internal.execution.train_fn_utils:set_train_fn_utils", *_REPORTS)


def store_value(key: bytes, value: bytes, space: bytes) -> None:
    """Stores a value for all processes of the cluster."""
    if _put is not None:
        _put(key, value, overwrite=True, namespace=space)


def stored_value(key: bytes, space: bytes) -> bytes | None:
    """The stored value, or None."""
    found: bytes | None = None if _get is None else _get(key, namespace=space)
    return found


def delete_value(key: bytes, space: bytes) -> None:
    """Removes the stored value."""
    if _delete is not None:
        _delete(key, namespace=space)


def wrap_reports(kind: type) -> None:
    """Wraps the object that `ray.train.report` uses in an object of this class, unless it has this class already."""
    if _get_train is not None and _set_train is not None:
        original = _get_train()
        if not isinstance(original, kind):
            _set_train(kind(original))
