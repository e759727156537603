# The battery's binding to MXNet; run as a program, in MXNet's own environment, it is one rank of the battery.
# Touches MXNet, farandole.mxnet and the battery.
"""Two bindings: arrays of `mxnet.np` and of `mxnet.nd`."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace
from typing import Any

import mxnet as mx
import numpy as np
from battery.binding import BARRIER, IN_PLACE, JOIN, Binding, Table
from battery.run import common, run_forms

import farandole.mxnet as hvd
from farandole.engine.interface import Array, DType

# These pass `compression` to single operations, which Horovod has in other frameworks alone; or look at the line of the
# script that a warning points to, which is one of this file here.
NOT_HERE = ("allreduce with compression", "arguments of the wrong kind", "average and op")
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])  # as MXNet writes it


class NumpyBinding(Binding):
    offers = frozenset({BARRIER, IN_PLACE, JOIN})
    dtypes = tuple(dtype for dtype in DType if dtype not in (DType.UINT16, DType.INT16, DType.BFLOAT16))

    def __init__(self) -> None:
        mx.util.set_np()
        self.hvd: Any = SimpleNamespace(**{name: getattr(hvd, name) for name in hvd.__all__})

    def tensor(self, values: Any, dtype: DType = DType.FLOAT32) -> Any:
        return self.made(mx.np, values, dtype)

    def made(self, module: Any, values: Any, dtype: DType) -> Any:
        with warnings.catch_warnings(), mx.util.np_shape(True):
            warnings.simplefilter("ignore")  # MXNet looks for SciPy's matrices where they were once
            if dtype != DType.BFLOAT16:
                return module.array(np.asarray(values), dtype=dtype.name.lower())
            bits = np.asarray(values, np.float32).view(np.uint32) >> 16  # small whole numbers lose nothing
            array = module.empty(bits.shape, dtype=BFLOAT16)
            array._sync_copyfrom(bits.astype(np.uint16).view(BFLOAT16))
            return array

    def array(self, tensor: Any) -> Array:
        found: Array = tensor.asnumpy()
        if found.dtype != BFLOAT16:
            return found
        return (found.view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    def dtype_of(self, tensor: Any) -> DType:
        dtype = np.dtype(tensor.dtype)
        return DType.BFLOAT16 if dtype == BFLOAT16 else DType[dtype.name.upper()]

    def unusable(self) -> dict[str, Any]:
        return {"sparse": mx.nd.sparse.zeros("row_sparse", (4, 2))}


class ArrayBinding(NumpyBinding):
    dtypes = (*NumpyBinding.dtypes, DType.BFLOAT16)

    def __init__(self) -> None:
        super().__init__()
        mx.util.reset_np()

    def tensor(self, values: Any, dtype: DType = DType.FLOAT32) -> Any:
        return self.made(mx.nd, values, dtype)


BINDINGS = {"np": NumpyBinding, "nd": ArrayBinding}


def table(_: str) -> Table:
    """The common cases that MXNet can have, whatever the arrays."""
    cases = common()
    for name in NOT_HERE:
        del cases[name]
    return cases


if __name__ == "__main__":
    run_forms(sys.argv[1:], BINDINGS, table)
