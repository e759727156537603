"""Reinforcement learning: episodes of different lengths, gathered; sums of returns divided by sums of counts.
Ends with the mean and spread over all episodes, and advantages normalised by them."""

import numpy as np
import torch

import horovod.torch as hvd

hvd.init()


def episodes(rank):
    random = np.random.RandomState(rank)
    return [random.randn(random.randint(3, 9)).astype(np.float32) for _ in range(2 + rank)]


def mpi_moments(x):
    total = hvd.allreduce(torch.tensor([x.sum(), float(len(x))], dtype=torch.float64), op=hvd.Sum, name="sum_count")
    mean = total[0] / total[1]
    square = hvd.allreduce(torch.as_tensor(((x - mean.item()) ** 2).sum(), dtype=torch.float64), op=hvd.Sum)
    return mean.item(), float((square / total[1]).sqrt()), int(total[1])


own = episodes(hvd.rank())
returns = np.array([episode.sum() for episode in own], np.float64)
mean, std, count = mpi_moments(returns)
everything = [episode for rank in range(hvd.size()) for episode in episodes(rank)]
expected = np.array([episode.sum() for episode in everything], np.float64)
assert count == len(expected)
np.testing.assert_allclose([mean, std], [expected.mean(), expected.std()], rtol=1e-9)

steps = hvd.allgather(torch.from_numpy(np.concatenate(own)), name="rewards")
np.testing.assert_array_equal(steps.numpy(), np.concatenate(everything))
lengths = hvd.allgather(torch.tensor([len(episode) for episode in own], dtype=torch.int32))
assert lengths.tolist() == [len(episode) for episode in everything]
nothing = hvd.allgather(torch.zeros(0 if hvd.rank() == 0 else 2, 3))
assert nothing.shape == (2 * (hvd.size() - 1), 3)
best = hvd.allreduce(torch.tensor(returns.max()), op=hvd.Max).item()
worst = hvd.allreduce(torch.tensor(returns.min()), op=hvd.Min).item()
assert best == expected.max() and worst == expected.min()
