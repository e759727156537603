"""A large table of word vectors whose gradients are sparse: a step sends the rows it touched, not the table.
Makes its own sentences and touches nothing else. `horovodrun -np 2 python examples/torch_sparse_embedding.py`"""

import argparse

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--words", type=int, default=20000)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=64, help="sentences per rank and step")
parser.add_argument("--dense", action="store_true", help="send whole tables, to compare")
options = parser.parse_args()

hvd.init()
hvd.set_seed(1)
TOPICS, LENGTH, WIDTH = 8, 12, 64
topic_of = torch.randint(TOPICS, (options.words,))  # every word belongs to a topic, the same on all ranks
by_topic = [torch.nonzero(topic_of == topic).flatten() for topic in range(TOPICS)]
draw = torch.Generator().manual_seed(100 + hvd.rank())  # and every rank reads other sentences


def sentences(count):
    """Common words are common: most words of a sentence come from the first of its topic."""
    topics = torch.randint(TOPICS, (count,), generator=draw)
    places = torch.rand(count, LENGTH, generator=draw) ** 4
    words = [by_topic[topic][(row * len(by_topic[topic])).long()] for topic, row in zip(topics, places, strict=True)]
    return torch.stack(words), topics


class Classifier(nn.Module):
    """The mean of a sentence's word vectors, and a layer that names its topic."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(options.words, WIDTH, mode="mean", sparse=True)
        self.topic = nn.Linear(WIDTH, TOPICS)

    def forward(self, words):
        return self.topic(self.table(words))


model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=hvd.scale_lr(2.0))
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), sparse_as_dense=options.dense
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

rows = 0
for _ in range(options.steps):
    words, topics = sentences(options.batch)
    optimizer.zero_grad()
    cross_entropy(model(words), topics).backward()
    optimizer.step()
    grad = model.table.weight.grad
    rows += grad.coalesce().indices().shape[1] if grad.is_sparse else options.words

hvd.check_equal(model)
words, topics = sentences(1000)
with torch.no_grad():
    right = hvd.allreduce((model(words).argmax(dim=1) == topics).float().mean())
if hvd.rank() == 0:
    print(f"accuracy {right:.1%} after {options.steps} steps on {hvd.size()} ranks", flush=True)
    print(f"a step changed {rows / options.steps:.0f} of {options.words} rows of the table", flush=True)
