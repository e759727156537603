"""No optimizer wrapper: gradients are averaged after backward, one handle each, grouped, and in place; then poll.
Ends with the same numbers each way."""

import torch

import horovod.torch as hvd

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)).double()
x = torch.randn(6 * hvd.size(), 5, dtype=torch.float64)
model(x).square().mean().backward()
wanted = [p.grad.clone() for p in model.parameters()]


def own():
    model.zero_grad()
    model(x[hvd.rank() * 6 : (hvd.rank() + 1) * 6]).square().mean().backward()
    return [p.grad for p in model.parameters()]


def average_gradients_one_by_one(grads):
    handles = [hvd.allreduce_async_(grad, name="grad.%d" % i) for i, grad in enumerate(grads)]
    while not all(hvd.poll(handle) for handle in handles):
        pass
    return [hvd.synchronize(handle) for handle in handles]


def average_gradients_grouped(grads):
    return hvd.grouped_allreduce(grads, name="together")


def average_gradients_in_a_flat_buffer(grads):
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    hvd.allreduce_(flat, name="flat", op=hvd.Sum)
    flat /= hvd.size()
    return [part.view_as(grad) for part, grad in zip(flat.split([g.numel() for g in grads]), grads)]


def average_gradients_in_place(grads):
    for grad in grads:
        grad.copy_(hvd.allreduce(grad, average=True))  # an argument that was deprecated
    return grads


def average_gradients_scaled(grads):
    factor = 1.0 / hvd.size()
    return [hvd.allreduce(grad, op=hvd.Sum, prescale_factor=factor, name="s%d" % i) for i, grad in enumerate(grads)]


def average_gradients_compressed(grads):
    return [hvd.allreduce(grad, compression=hvd.Compression.fp16) for grad in grads]


for way in (
    average_gradients_one_by_one,
    average_gradients_grouped,
    average_gradients_in_a_flat_buffer,
    average_gradients_in_place,
    average_gradients_scaled,
):
    for ours, theirs in zip(way(own()), wanted):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
for ours, theirs in zip(average_gradients_compressed(own()), wanted):
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)

biggest = hvd.allreduce(torch.tensor([hvd.rank(), -hvd.rank()]), op=hvd.Max)
assert biggest.tolist() == [hvd.size() - 1, 0]
assert hvd.synchronize(10**9) is None  # a handle that nobody knows
try:
    hvd.poll(10**9)
    raise AssertionError("poll knows no such handle")
except ValueError:
    pass
