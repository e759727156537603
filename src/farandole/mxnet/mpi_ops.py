# Names that other programs import from horovod.mxnet.mpi_ops: the operations, and the object behind them.
# Touches compat and the package's public names.
"""The same objects under this module's name, so that programs can import from either."""

from __future__ import annotations

from .. import mxnet as _common
from ..bindings.compat import HorovodBasics
from ..operations.pending import chosen_op as handle_average_backwards_compatibility

__all__ = [*_common.__all__, "handle_average_backwards_compatibility"]

globals().update({name: getattr(_common, name) for name in _common.__all__})

_basics = HorovodBasics()
