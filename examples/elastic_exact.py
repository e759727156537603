"""Elastic training that is exact: every sample once per epoch, and identical weights, whichever ranks join or leave.
farandole run -np 2 --min-np 1 --max-np 4 python examples/elastic_exact.py --checkpoints /tmp/digits"""

import argparse
import hashlib

import farandole.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--shards", type=int, default=8, help="parts of a step, a power of two")
parser.add_argument("--workers", type=int, default=0, help="processes that load data, for each rank")
parser.add_argument("--checkpoints", metavar="DIRECTORY", help="where to keep the last three, and to begin from")
options = parser.parse_args()

hvd.init()
torch.manual_seed(1)

digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32).flatten(1)
data = TensorDataset(images, torch.tensor(digits.target))
# 8 samples for each shard; a step is 8 shards, whatever the number of ranks.
loader = hvd.elastic.ElasticDataLoader(
    data, batch_size=8, seed=1, virtual_size=options.shards, num_workers=options.workers
)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
steps = hvd.elastic.VirtualSteps(model, optimizer, virtual_size=options.shards)


def loss_of(image, label):
    return cross_entropy(model(image), label)


@hvd.elastic.run
def learn(state):
    while state.loader.epoch < options.epochs:
        for shards in state.loader:
            state.loss = steps.step(shards, loss_of)
            state.commit()
        if options.checkpoints:
            hvd.elastic.save_to(state, options.checkpoints)  # in the background


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, loss=0.0)
if options.checkpoints:
    hvd.elastic.load_from(state, options.checkpoints)
learn(state)

if hvd.rank() == 0:
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())).hexdigest()
    print(f"loss {state.loss:.4f} after {loader.epoch} epochs, weights {digest[:16]}", flush=True)
