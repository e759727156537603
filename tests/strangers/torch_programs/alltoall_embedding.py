"""A recommender's exchange: each rank owns rows of a table; indices go out and rows come back by alltoall with splits.
Ends with looked-up rows and their gradients as if the table were whole."""

import torch

import horovod.torch as hvd

hvd.init()
size, rank = hvd.size(), hvd.rank()
per_rank, width = 5, 3
table = torch.arange(size * per_rank * width, dtype=torch.float64).reshape(-1, width)
own = table[rank * per_rank : (rank + 1) * per_rank].clone().requires_grad_()
wanted = torch.randint(0, size * per_rank, (7 + rank,), generator=torch.Generator().manual_seed(rank))

order = torch.argsort(wanted, stable=True)
asked = wanted[order]
splits = torch.bincount(asked // per_rank, minlength=size).to(torch.int32)
requests, counts = hvd.alltoall(asked, splits=splits, name="indices")
assert counts.dtype == torch.int32 and int(counts.sum()) == len(requests)
answers = own[requests - rank * per_rank]
rows, back = hvd.alltoall(answers, splits=counts, name="rows")
assert back.tolist() == splits.tolist()
result = torch.empty_like(rows)
result[order] = rows
assert torch.equal(result.detach(), table[wanted])

weights = torch.arange(1.0, len(wanted) + 1, dtype=torch.float64)[:, None]
(result * weights).sum().backward()
whole = table.clone().requires_grad_()
loss = 0.0
for other in range(size):
    theirs = torch.randint(0, size * per_rank, (7 + other,), generator=torch.Generator().manual_seed(other))
    loss = loss + (whole[theirs] * torch.arange(1.0, len(theirs) + 1, dtype=torch.float64)[:, None]).sum()
loss.backward()
torch.testing.assert_close(own.grad, whole.grad[rank * per_rank : (rank + 1) * per_rank])

even = hvd.alltoall(torch.full((size * 2,), rank))  # without splits: one tensor, no pair
assert even.tolist() == [other for other in range(size) for _ in range(2)]
handle = hvd.alltoall_async(torch.full((size,), rank))
output, received = hvd.synchronize(handle)
assert output.tolist() == list(range(size)) and received.tolist() == [1] * size
