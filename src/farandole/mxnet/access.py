# Access to the memory of MXNet's arrays: waits until MXNet has finished with them, and gets their addresses.
# Touches two functions of MXNet's public C interface, and engine.
"""MXNet's engine has no public way to report later that an operation has ended or failed.

So collectives are not operations of MXNet: a call waits for the arrays, and returns when the collective is done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

from ..bindings.private.mxnet_names import library
from ..engine.interface import Request, Span
from .framework import mx

_library: Any = library()


def locate(requests: Iterable[Request]) -> None:
    """Sets the addresses of the requests' arrays. They are valid until MXNet is used on the arrays again."""
    for request in requests:
        for span, written in ((request.input, False), (request.output, True)):
            if isinstance(span, Span):
                span.address = _address(span.owner, written)


def _address(array: Any, written: bool) -> int:
    array.wait_to_read()
    if written:
        mx.base.check_call(_library.MXNDArrayWaitToWrite(array.handle))
    pointer = ctypes.c_void_p()
    # Operations of oneDNN may have left a special layout; this call changes it back to rows.
    mx.base.check_call(_library.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer.value or 0
