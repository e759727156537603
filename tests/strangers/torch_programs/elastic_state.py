"""An elastic script under a launcher that changes nothing: TorchState, ElasticSampler, a commit per batch.
Ends with every sample once per epoch and the weights of one process."""

import torch
import torch.utils.data

import horovod.torch as hvd

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(9)
x = torch.randn(24, 3, dtype=torch.float64)
dataset = torch.utils.data.TensorDataset(torch.arange(24), x)
sampler = hvd.elastic.ElasticSampler(dataset, shuffle=True)
loader = torch.utils.data.DataLoader(dataset, batch_size=2, sampler=sampler)
model = torch.nn.Linear(3, 1).double()
first = {name: value.clone() for name, value in model.state_dict().items()}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
resets, seen = [], []


def on_state_reset():
    resets.append(hvd.size())
    for param_group in optimizer.param_groups:
        param_group["lr"] = 0.01 * hvd.size()


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 2):
        state.sampler.set_epoch(state.epoch)
        for batch_idx, (numbers, data) in enumerate(loader):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            seen.extend(numbers.tolist())
            state.sampler.record_batch(batch_idx, len(data))
            state.batch = batch_idx
            state.commit()
        state.batch = 0


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
assert state.epoch == 1 and resets == []
assert sorted(sum(hvd.allgather_object(seen), [])) == sorted(list(range(24)) * 2)
order = hvd.allgather_object(seen)

alone = torch.nn.Linear(3, 1).double()
alone.load_state_dict(first)
plain = torch.optim.SGD(alone.parameters(), lr=0.01 * hvd.size())
for start in range(0, len(seen), 2):
    plain.zero_grad()
    for rank in range(hvd.size()):
        (alone(x[order[rank][start : start + 2]]).square().mean() / hvd.size()).backward()
    plain.step()
torch.testing.assert_close(model.weight, alone.weight, rtol=1e-9, atol=1e-9)

# A rollback, as after a lost rank.
kept = model.weight.detach().clone()
state.epoch = 5
with torch.no_grad():
    model.weight.zero_()
state.restore()
assert state.epoch == 1 and torch.equal(model.weight, kept)
