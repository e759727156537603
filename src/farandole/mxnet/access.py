# MXNet's arrays as plain memory: waits until MXNet has done what it was told to do with them, and asks for the place.
# Touches two functions of MXNet's public C interface, and engine.
"""MXNet's engine has no public way to say later that an operation has ended, or that it has failed.

So a collective is none of its operations: the call waits for the arrays, and returns when the collective is done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

from ..engine import Request, Span
from ..private.mxnet_names import library
from .framework import mx

_library: Any = library()


def locate(requests: Iterable[Request]) -> None:
    """Fills in where the arrays of the requests lie; they stay there until MXNet is told something else."""
    for request in requests:
        for span, written in ((request.input, False), (request.output, True)):
            if isinstance(span, Span):
                span.address = _address(span.owner, written)


def _address(array: Any, written: bool) -> int:
    array.wait_to_read()
    if written:
        mx.base.check_call(_library.MXNDArrayWaitToWrite(array.handle))
    pointer = ctypes.c_void_p()
    # Brings back to rows what oneDNN's operations have left in a layout of their own.
    mx.base.check_call(_library.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer.value or 0
