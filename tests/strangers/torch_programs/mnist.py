"""The classic first script: a sampler per rank, named parameters, fp16 gradients, metrics averaged by name.
Ends with the weights of one process that saw every rank's batches."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import torch.utils.data.distributed

import horovod.torch as hvd

parser = argparse.ArgumentParser(description="MNIST example")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--momentum", type=float, default=0.5)
parser.add_argument("--fp16-allreduce", action="store_true", default=False)
parser.add_argument("--use-adasum", action="store_true", default=False)
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--no-cuda", action="store_true", default=True)
args = parser.parse_args([])
args.cuda = not args.no_cuda and torch.cuda.is_available()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, kernel_size=3)
        self.fc1 = nn.Linear(36, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = x.view(-1, 36)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
images, labels = torch.rand(48, 1, 8, 8), torch.randint(0, 10, (48,))
train_dataset = torch.utils.data.TensorDataset(images, labels)
train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)

torch.manual_seed(42 + hvd.rank())  # the broadcast has something to do
model = Net()
lr_scaler = hvd.size() if not args.use_adasum else 1
optimizer = optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=args.momentum)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=compression,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()


def metric_average(val, name):
    tensor = torch.tensor(val)
    avg_tensor = hvd.allreduce(tensor, name=name)
    return avg_tensor.item()


for epoch in range(1, args.epochs + 1):
    train(epoch)
model.eval()
own = list(train_sampler)
own_loss = F.nll_loss(model(images[own]), labels[own]).item()
test_loss = metric_average(own_loss, "avg_loss")

# One process with the batches of all ranks, in the same order.
torch.manual_seed(42)
alone = Net()
plain = optim.SGD(alone.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
for epoch in range(1, args.epochs + 1):
    orders = []
    for rank in range(hvd.size()):
        sampler = torch.utils.data.distributed.DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=rank)
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    for start in range(0, len(orders[0]), args.batch_size):
        plain.zero_grad()
        for order in orders:
            some = order[start : start + args.batch_size]
            (F.nll_loss(alone(images[some]), labels[some]) / hvd.size()).backward()
        plain.step()
for ours, theirs in zip(model.parameters(), alone.parameters()):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
alone.eval()
losses = [F.nll_loss(alone(images[order]), labels[order]).item() for order in orders]
assert abs(test_loss - sum(losses) / hvd.size()) < 1e-4, (test_loss, losses)
