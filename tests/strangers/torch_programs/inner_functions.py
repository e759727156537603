"""Research code that calls internal functions: _allreduce_async with an output of its own, HorovodAllreduce.apply.
Ends with the numbers of the public functions."""

import torch

import horovod.torch as hvd
from horovod.torch.mpi_ops import HorovodAllreduce, _allreduce_async, synchronize

hvd.init()
total = float(sum(range(1, hvd.size() + 1)))
tensor = torch.full((4,), hvd.rank() + 1.0)
output = torch.empty_like(tensor)
handle = _allreduce_async(tensor, output, "inner", hvd.Sum, 1.0, 1.0, hvd.global_process_set)
assert isinstance(handle, int)
assert synchronize(handle).tolist() == [total] * 4 and output.tolist() == [total] * 4

x = torch.full((3,), 2.0, requires_grad=True)
y = HorovodAllreduce.apply(x, None, "inner.autograd", hvd.Sum, 1.0, 1.0, hvd.global_process_set)
y.sum().backward()
assert y.tolist() == [2.0 * hvd.size()] * 3 and x.grad.tolist() == [float(hvd.size())] * 3
