"""Word vectors with sparse gradients: as they are, made dense by the optimizer, and reduced by hand.
Ends with the rows that one process would have changed."""

import torch
import torch.nn as nn

import horovod.torch as hvd

hvd.init()
torch.set_num_threads(1)
words = [torch.randint(0, 20, (6, 3), generator=torch.Generator().manual_seed(rank)) for rank in range(hvd.size())]


def make():
    torch.manual_seed(5)
    bag = nn.EmbeddingBag(20, 4, mode="sum", sparse=True).double()
    return bag, nn.Linear(4, 1).double()


def loss_of(bag, head, rank):
    return head(bag(words[rank])).square().mean()


alone, head = make()
plain = torch.optim.SGD([*alone.parameters(), *head.parameters()], lr=0.1)
for _ in range(3):
    plain.zero_grad()
    (sum(loss_of(alone, head, rank) for rank in range(hvd.size())) / hvd.size()).backward()
    plain.step()

for as_dense in (False, True):
    bag, ours = make()
    optimizer = torch.optim.SGD([*bag.parameters(), *ours.parameters()], lr=0.1)
    named = [("bag." + n, p) for n, p in bag.named_parameters()] + [
        ("head." + n, p) for n, p in ours.named_parameters()
    ]
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, sparse_as_dense=as_dense)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(bag, ours, hvd.rank()).backward()
        optimizer.step()
    torch.testing.assert_close(bag.weight, alone.weight, rtol=1e-9, atol=1e-9)

bag, ours = make()
loss_of(bag, ours, hvd.rank()).backward()
handle = hvd.sparse_allreduce_async(bag.weight.grad, name="sparse.by.hand", op=hvd.Average)
reduced = handle()  # a function, not a number
bag.zero_grad()
twin, its_head = make()
(sum(loss_of(twin, its_head, rank) for rank in range(hvd.size())) / hvd.size()).backward()
torch.testing.assert_close(reduced.to_dense(), twin.weight.grad.to_dense(), rtol=1e-9, atol=1e-9)
