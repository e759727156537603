"""The synthetic benchmark: fp16 compression, random data, images per second with their spread, logs of rank 0 alone.
Ends with the same weights everywhere, and with a total that is size times a rank's."""

import timeit

import numpy as np
import torch
import torch.nn.functional as F

import horovod.torch as hvd

hvd.init()
torch.set_num_threads(1)
batch_size, num_warmup_batches, num_batches_per_iter, num_iters = 16, 2, 3, 3
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 24), torch.nn.ReLU(), torch.nn.Linear(24, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16, op=hvd.Average
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
data = torch.randn(batch_size, 3, 4, 4)
target = torch.LongTensor(batch_size).random_() % 10
messages = []


def benchmark_step():
    optimizer.zero_grad()
    output = model(data)
    loss = F.cross_entropy(output, target)
    loss.backward()
    optimizer.step()


def log(s, nl=True):
    if hvd.rank() != 0:
        return
    messages.append(s)


log("Number of CPUs: %d" % hvd.size())
timeit.timeit(benchmark_step, number=num_warmup_batches)
img_secs = []
for x in range(num_iters):
    time = timeit.timeit(benchmark_step, number=num_batches_per_iter)
    img_sec = batch_size * num_batches_per_iter / time
    log("Iter #%d: %.1f img/sec" % (x, img_sec))
    img_secs.append(img_sec)
img_sec_mean = np.mean(img_secs)
total = hvd.allreduce(torch.tensor(img_sec_mean), op=hvd.Sum)

assert len(messages) == (1 + num_iters if hvd.rank() == 0 else 0)
means = hvd.allgather(torch.tensor([img_sec_mean]))
assert abs(total - means.sum()) <= 1e-6 * total and total > 0
weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
everywhere = hvd.allgather(weights[None])
assert all(torch.equal(row, everywhere[0]) for row in everywhere)
