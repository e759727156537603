"""A library that serves whichever framework is there: imports in try blocks, capabilities asked before they are used.
Ends with the binding for PyTorch, and with clear words where there is none."""

import importlib

from horovod.common.util import check_extension, extension_available, gloo_built, is_version_greater_equal_than

try:
    import mxnet
    import horovod.mxnet as mx_hvd
except ImportError:
    mxnet = mx_hvd = None
try:
    import horovod.chainer as chainer_hvd
except ImportError:
    chainer_hvd = None
try:
    import horovod.torch as hvd

    HOROVOD_AVAILABLE = True
except (ImportError, ModuleNotFoundError):
    HOROVOD_AVAILABLE = False

import torch

assert HOROVOD_AVAILABLE and chainer_hvd is None and (mxnet is None) == (mx_hvd is None)
assert extension_available("torch") and gloo_built()
check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
assert importlib.util.find_spec("horovod") is not None
import horovod

assert is_version_greater_equal_than(horovod.__version__, "0.21.0")
assert hvd.__version__ == horovod.__version__
_HVD = hvd.torch if hasattr(hvd, "torch") else hvd
_HVD.init()
if _HVD.size() > 1:
    assert _HVD.allreduce(torch.ones(2), name="guarded").tolist() == [1.0, 1.0]
try:
    _HVD.rank()
except ValueError:
    raise AssertionError("initialized") from None
_HVD.shutdown()
try:
    _HVD.rank()
    raise AssertionError("shut down")
except ValueError as error:
    assert "initialized" in str(error)
_HVD.init()
assert _HVD.size() >= 1
