"""What few scripts use: groups of gradients, a predivide factor, Adasum, closures, find_unused parameters, a timeline.
Ends with the numbers of the plain way."""

import os
import tempfile

import torch

import horovod.torch as hvd

os.environ.setdefault("HOROVOD_TIMELINE", "DYNAMIC")
hvd.init()
torch.set_num_threads(1)


def make():
    torch.manual_seed(30)
    layers = torch.nn.ModuleDict({"used": torch.nn.Linear(3, 3), "other": torch.nn.Linear(3, 3)}).double()
    return layers


def forward(model, rank):
    x = torch.full((2, 3), 1.0 + rank, dtype=torch.float64)
    out = model["used"](x)
    return (out if rank == 0 else model["other"](out)).square().mean()  # rank 0 does not use all of it


def train(wrap, ranks):
    model = make()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(2):

        def closure():
            optimizer.zero_grad()
            total = 0.0
            for rank in ranks:
                loss = forward(model, rank) / len(ranks)
                loss.backward()
                total += loss.item()
            return total

        optimizer.step(closure)
    return [p.detach() for p in model.parameters()]


wanted = train(lambda optimizer, model: optimizer, range(hvd.size()))
handle, timeline = tempfile.mkstemp()
os.close(handle)
hvd.start_timeline(timeline, mark_cycles=False)
for options in (
    {},
    {"groups": 2},
    {"num_groups": 1},
    {"gradient_predivide_factor": 2.0},
    {"compression": hvd.Compression.none, "op": hvd.Average},
):
    found = train(
        lambda optimizer, model, options=options: hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), **options
        ),
        [hvd.rank()],
    )
    for ours, theirs in zip(found, wanted):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
hvd.stop_timeline()
hvd.barrier()
assert hvd.rank() != 0 or os.path.getsize(timeline) > 2
os.remove(timeline)

if hvd.size() & (hvd.size() - 1) == 0:  # where Horovod can do it
    vector = torch.tensor([1.0, 0.0]) if hvd.rank() % 2 == 0 else torch.tensor([0.0, 1.0])
    if hvd.size() == 2:
        assert hvd.allreduce(vector, op=hvd.Adasum).tolist() == [1.0, 1.0]  # orthogonal: the sum
        assert hvd.allreduce(torch.ones(2), op=hvd.Adasum).tolist() == [1.0, 1.0]  # parallel: the average
for bad in (
    lambda: hvd.DistributedOptimizer(
        torch.optim.SGD(make().parameters(), 0.1), op=hvd.Sum, gradient_predivide_factor=2.0
    ),
    lambda: hvd.DistributedOptimizer(torch.optim.SGD(make().parameters(), 0.1), backward_passes_per_step=0),
    lambda: hvd.DistributedOptimizer(torch.optim.SGD(make().parameters(), 0.1), [("a", make()["used"].weight)] * 2),
    lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum),
    lambda: hvd.broadcast_parameters(make().parameters(), root_rank=0),
    lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS(make().parameters()), root_rank=0),
):
    try:
        bad()
        raise AssertionError("no ValueError")
    except ValueError:
        pass
