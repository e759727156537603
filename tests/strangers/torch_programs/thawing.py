"""Layers that train only later, groups of parameters that are added before and after wrapping, closures, a compiled
model, tied weights. Ends with the weights of one process."""

import copy
import io

import torch
import torch.nn as nn

import horovod.torch as hvd

hvd.init()
r, n = hvd.rank(), hvd.size()
torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
ref = copy.deepcopy(net)
for p in net[0].parameters():
    p.requires_grad = False
o = hvd.DistributedOptimizer(
    torch.optim.Adam(filter(lambda p: p.requires_grad, net.parameters()), lr=0.01),
    named_parameters=[(k, v) for k, v in net.named_parameters() if v.requires_grad],
)
X = torch.randn(6, n, 5, 4, dtype=torch.double)


def step(i):
    o.zero_grad(set_to_none=True)
    net(X[i, r]).pow(2).mean().backward()
    o.step()


step(0)
step(1)
for p in net[0].parameters():
    p.requires_grad = True
sd = copy.deepcopy(o.state_dict())
plain = torch.optim.Adam(net[2].parameters(), lr=0.01)
plain.load_state_dict(sd)
plain.add_param_group({"params": list(net[0].parameters()), "lr": 0.001})
o = hvd.DistributedOptimizer(plain, named_parameters=net.named_parameters())
step(2)
step(3)
p = torch.optim.Adam(ref[2].parameters(), lr=0.01)
for i in range(4):
    if i == 2:
        p.add_param_group({"params": list(ref[0].parameters()), "lr": 0.001})
    p.zero_grad()
    for k in range(n):
        (ref(X[i, k]).pow(2).mean() / n).backward()
    p.step()
for a, b in zip(net.parameters(), ref.parameters()):
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
# add_param_group on the distributed optimizer itself
extra = nn.Linear(2, 1).double()
hvd.broadcast_parameters(extra.state_dict(), 0)
o.add_param_group({"params": extra.parameters(), "lr": 0.1})
o.zero_grad()
extra(net(X[4, r])).sum().backward()
o.step()
g = hvd.allgather(extra.weight.detach()[None])
assert torch.equal(g[0], g[1])
b = io.BytesIO()
torch.save({"o": o.state_dict(), "m": net.state_dict()}, b)
b.seek(0)
torch.load(b)
copy.deepcopy(o)
# closure
o2 = hvd.DistributedOptimizer(torch.optim.SGD(ref.parameters(), lr=0.1), named_parameters=ref.named_parameters())


def closure():
    o2.zero_grad()
    loss = ref(X[5, r]).pow(2).mean()
    loss.backward()
    return loss


before = ref(X[5, r]).pow(2).mean().item()
assert float(o2.step(closure)) == before
w = hvd.allgather(ref[0].weight.detach()[None])
assert torch.equal(w[0], w[1])
# compile
c = torch.compile(ref, backend="eager")
o2.zero_grad()
c(X[5, r]).sum().backward()
o2.step()
w = hvd.allgather(ref[0].weight.detach()[None])
assert torch.equal(w[0], w[1])
# attributes that other programs read
assert o2._handles == {} and len(o2._requires_update) == 4 and set(o2._allreduce_delay.values()) == {1}
assert o2.backward_passes_per_step == 1 and isinstance(o2, torch.optim.SGD)
# DistributedOptimizer without named_parameters, several groups, weight tying
emb = nn.Embedding(5, 3)
out = nn.Linear(3, 5, bias=False)
out.weight = emb.weight
hvd.broadcast_parameters(emb.state_dict(), 0)
o3 = hvd.DistributedOptimizer(torch.optim.SGD([emb.weight], lr=0.1))
out(emb(torch.tensor([r, 2]))).sum().backward()
o3.step()
w = hvd.allgather(emb.weight.detach()[None])
assert torch.equal(w[0], w[1])
