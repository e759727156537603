"""Two networks with an optimizer each; gradients of one flow through the other and are thrown away.
Ends with what one process does on the batches of all ranks."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import horovod.torch as hvd


def networks():
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    discriminator = nn.Sequential(nn.Linear(3, 6), nn.LeakyReLU(), nn.Linear(6, 1)).double()
    return generator, discriminator


def noise(step, rank):
    return torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def real(step, rank):
    return torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7000 + 100 * step + rank))


def steps(generator, discriminator, opt_g, opt_d, ranks):
    ones, zeros = torch.ones(5, 1, dtype=torch.float64), torch.zeros(5, 1, dtype=torch.float64)
    loss = F.binary_cross_entropy_with_logits
    for step in range(4):
        opt_d.zero_grad()
        for rank in ranks:
            fake = generator(noise(step, rank)).detach()
            value = loss(discriminator(real(step, rank)), ones) + loss(discriminator(fake), zeros)
            (value / len(ranks)).backward()
        opt_d.step()
        opt_g.zero_grad()
        for rank in ranks:
            for p in discriminator.parameters():
                p.requires_grad_(False)
            (loss(discriminator(generator(noise(step, rank))), ones) / len(ranks)).backward()
            for p in discriminator.parameters():
                p.requires_grad_(True)
        opt_g.step()


hvd.init()
torch.set_num_threads(1)
G, D = networks()
opt_g = hvd.DistributedOptimizer(torch.optim.Adam(G.parameters(), lr=0.01), named_parameters=G.named_parameters())
opt_d = hvd.DistributedOptimizer(torch.optim.Adam(D.parameters(), lr=0.02), named_parameters=D.named_parameters())
for net in (G, D):
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
steps(G, D, opt_g, opt_d, [hvd.rank()])

g, d = networks()
steps(g, d, torch.optim.Adam(g.parameters(), lr=0.01), torch.optim.Adam(d.parameters(), lr=0.02), range(hvd.size()))
for ours, theirs in zip([*G.parameters(), *D.parameters()], [*g.parameters(), *d.parameters()]):
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)
