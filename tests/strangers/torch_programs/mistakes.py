"""What goes wrong in scripts, and what they catch: shapes and types that differ, a name twice, a wrong root.
Ends with the job going on after each of them."""

import torch

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError

hvd.init()
rank, size = hvd.rank(), hvd.size()


def fails(kinds, call):
    try:
        call()
    except kinds:
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size  # the job goes on
        return
    raise AssertionError("no error")


mismatch = (HorovodInternalError, RuntimeError)
if size > 1:
    fails(mismatch, lambda: hvd.allreduce(torch.ones(2 + rank), name="shape"))
    fails(mismatch, lambda: hvd.allreduce(torch.ones(2, dtype=[torch.float32, torch.int32][rank % 2]), name="type"))
    fails(mismatch, lambda: hvd.broadcast(torch.ones(1), root_rank=rank % 2, name="root"))
    fails(mismatch, lambda: hvd.allgather(torch.ones(2, 2 + rank), name="rows"))
    fails(mismatch, lambda: hvd.allreduce(torch.ones(2), op=[hvd.Sum, hvd.Max][rank % 2], name="op"))
fails(ValueError, lambda: hvd.broadcast(torch.ones(1), root_rank=size, name="no such root"))
fails(ValueError, lambda: hvd.alltoall(torch.ones(3), splits=[3] + [1] * (size - 1), name="splits"))
fails(ValueError, lambda: hvd.allreduce(torch.ones(4, 2).t(), name="not contiguous"))


class Sparsifying(hvd.optimizer._DistributedOptimizer, torch.optim.SGD):
    def _allreduce_grad_async(self, p):
        raise AssertionError("never called")


layer = torch.nn.Linear(1, 1)
fails(NotImplementedError, lambda: Sparsifying(layer.parameters(), layer.named_parameters(), hvd.Compression.none))
handles = [hvd.allreduce_async(torch.ones(1), name="twice")]
try:
    handles.append(hvd.allreduce_async(torch.ones(1), name="twice"))
except ValueError as error:
    assert "twice" in str(error)
for handle in handles:
    hvd.synchronize(handle)
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
