"""Model parallel beside data parallel: a set per half of the model, an optimizer over a set, sets that come and go.
Ends with sums over the members alone."""

import torch

import horovod.torch as hvd

even = hvd.ProcessSet(range(0, 2, 2))
hvd.init(process_sets="dynamic")
torch.set_num_threads(1)
even_set = hvd.add_process_set(even)
last_set = hvd.add_process_set([hvd.size() - 1])
try:
    hvd.add_process_set([hvd.size() - 1])
    raise AssertionError("the same set twice")
except ValueError:
    pass
all_but_first = hvd.add_process_set(list(range(1, hvd.size()))) if hvd.size() > 2 else last_set
assert str(even_set).startswith("ProcessSet(process_set_id=")

if even_set.included():
    assert even_set.rank() == 0 and even_set.size() == 1
    assert hvd.allreduce(torch.tensor([2.0]), op=hvd.Sum, process_set=even_set).item() == 2.0
if all_but_first.included():
    total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum, process_set=all_but_first)
    assert total.item() == sum(range(1, hvd.size()))
    rows = hvd.allgather(torch.full((hvd.rank(), 2), float(hvd.rank())), process_set=all_but_first)
    assert rows.tolist() == [[float(rank)] * 2 for rank in range(1, hvd.size()) for _ in range(rank)]
    told = hvd.broadcast_object({"by": hvd.rank()}, root_rank=1, process_set=all_but_first)
    assert told == {"by": 1}
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1).double()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters(), process_set=all_but_first
    )
    model(torch.full((1, 2), float(hvd.rank()), dtype=torch.float64)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    mean = sum(range(1, hvd.size())) / (hvd.size() - 1)
    torch.testing.assert_close(model.weight.detach(), before - 0.5 * mean)

overall = hvd.allreduce(torch.tensor(1.0), op=hvd.Sum)
assert overall.item() == hvd.size()
assert hvd.remove_process_set(even_set) is True and even_set.process_set_id is None
assert hvd.remove_process_set(hvd.global_process_set) is False
assert hvd.remove_process_set(even_set) is False
