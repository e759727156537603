"""Local steps on each rank, weights averaged every second one; then one average over pairs of names and tensors.
Ends with the average of what the ranks did alone."""

import torch

import horovod.torch as hvd

hvd.init()
torch.set_num_threads(1)


def make():
    torch.manual_seed(12)
    model = torch.nn.Linear(3, 1).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def local_step(model, optimizer, rank, step):
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(9 * step + rank))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


model, optimizer = make()
for step in range(4):
    local_step(model, optimizer, hvd.rank(), step)
    if step % 2 == 1:
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                hvd.allreduce_(tensor, name="average." + name)

everyone = [make() for _ in range(hvd.size())]
for step in range(4):
    for rank, (m, o) in enumerate(everyone):
        local_step(m, o, rank, step)
    if step % 2 == 1:
        mean = {k: sum(m.state_dict()[k] for m, _ in everyone) / hvd.size() for k in model.state_dict()}
        for m, _ in everyone:
            m.load_state_dict(mean)
torch.testing.assert_close(model.weight, everyone[0][0].weight, rtol=1e-9, atol=1e-9)
torch.testing.assert_close(model.bias, everyone[0][0].bias, rtol=1e-9, atol=1e-9)
