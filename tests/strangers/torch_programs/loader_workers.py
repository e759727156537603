"""A loader whose workers are forked after init(), with a sampler per rank and drop_last.
Ends with each sample seen by one rank."""

import torch
import torch.multiprocessing as mp
import torch.utils.data

import horovod.torch as hvd


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index, float(index) ** 2


hvd.init()
torch.set_num_threads(1)
kwargs = {"num_workers": 1}
if kwargs.get("num_workers", 0) > 0 and "fork" in mp.get_all_start_methods():
    kwargs["multiprocessing_context"] = "fork"
sampler = torch.utils.data.distributed.DistributedSampler(Squares(), num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(Squares(), batch_size=4, sampler=sampler, drop_last=True, **kwargs)
seen = torch.zeros(24, dtype=torch.int64)
total = torch.zeros(1, dtype=torch.float64)
for numbers, squares in loader:
    seen[numbers] += 1
    total += squares.sum()
    hvd.allreduce(squares.sum(), name="while.a.child.lives")
assert hvd.allreduce(seen, op=hvd.Sum).tolist() == [1] * 24
assert hvd.allreduce(total, op=hvd.Sum).item() == sum(i**2 for i in range(24))
