"""An elastic script that tries its own recovery: it raises HorovodInternalError, first on all ranks, then on one.
Ends with all batches done once after the rollbacks, in a job that is not elastic."""

import torch

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError

hvd.init()
last = hvd.size() - 1
state = hvd.elastic.TorchState(model=torch.nn.Linear(2, 1), batch=0, total=0.0)
resets, tries = [], []
state.register_reset_callbacks([lambda: resets.append((hvd.rank(), hvd.size()))])


@hvd.elastic.run
def train(state, length):
    tries.append(state.batch)
    while state.batch < length:
        state.total += hvd.allreduce(torch.ones(1), name="batch", op=hvd.Sum).item()
        state.batch += 1
        if state.batch == 3 and len(tries) == 1:
            raise HorovodInternalError("simulated")
        if state.batch == 5 and len(tries) == 2 and hvd.rank() == last:
            raise HorovodInternalError("simulated on one rank")
        if state.batch % 2 == 0:
            state.commit()
    return state.batch


place = (hvd.rank(), hvd.size())
assert train(state, 6) == 6
assert tries == [0, 2, 4] and resets == [place, place], (tries, resets)
assert state.total == 6.0 * hvd.size()
assert (hvd.rank(), hvd.size()) == place
