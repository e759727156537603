# The names of horovod.spark.torch.util and horovod.spark.lightning.util.
# Touches launch.calls.
"""Objects as text, and as files in memory."""

from __future__ import annotations

import base64
import importlib.util
import io
from collections.abc import Callable
from typing import Any

from ...launch.calls import pack as serialize
from ...launch.calls import unpack as deserialize


def is_module_available(module_name: str) -> bool:
    """Whether a module is installed.

    >>> is_module_available("io"), is_module_available("no_such_module")
    (True, False)
    """
    return importlib.util.find_spec(module_name) is not None


def is_module_available_fn() -> Callable[[str], bool]:
    """`is_module_available`."""
    return is_module_available


def _serialize(obj: Any) -> str:
    return base64.b64encode(serialize(obj)).decode()


def _deserialize(text: str) -> Any:
    return deserialize(base64.b64decode(text))


def serialize_fn() -> Callable[[Any], str]:
    """A function that turns an object into text. The text is a pickle: load it only from sources that you trust."""
    return _serialize


def deserialize_fn() -> Callable[[str], Any]:
    """A function that turns such a text into an object."""
    return _deserialize


def save_into_bio(obj: Any, save_obj_fn: Callable[[Any, io.BytesIO], Any]) -> io.BytesIO:
    """A file in memory with what `save_obj_fn(obj, file)` writes, to be read from its beginning."""
    file = io.BytesIO()
    save_obj_fn(obj, file)
    file.seek(0)
    return file


def save_into_bio_fn() -> Callable[[Any, Callable[[Any, io.BytesIO], Any]], io.BytesIO]:
    """`save_into_bio`."""
    return save_into_bio
