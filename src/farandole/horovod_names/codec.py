# horovod.runner.common.util.codec: Python objects as text.
# The caller makes and reads the pickles; Farandole itself never reads them.
"""`dumps_base64(value)` and back. Read only text that you have written: a pickle may run any code."""

from __future__ import annotations

import base64
from typing import Any

from farandole.launch import calls


def dumps_base64(obj: Any, to_ascii: bool = True) -> str | bytes:
    """Pickles an object with cloudpickle and encodes it in base64."""
    encoded = base64.b64encode(calls.pack(obj))
    return encoded.decode("ascii") if to_ascii else encoded


def loads_base64(encoded: str | bytes) -> Any:
    """The object from the text of `dumps_base64`."""
    return calls.unpack(base64.b64decode(encoded))
