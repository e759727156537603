"""Images per second of a model on made-up data, with the options and the output of Horovod's synthetic benchmark.
Touches no data and needs no torchvision: the models are here. `horovodrun -np 2 python examples/torch_synthetic.py`"""

import argparse
import statistics
import time

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Residual(nn.Module):
    """Two convolutions and a shortcut around them."""

    def __init__(self, channels, out, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        same = stride == 1 and channels == out
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(width, blocks, classes=1000):
    """A residual network: four stages, each half as large and twice as wide as the one before."""
    layers = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage, count in enumerate(blocks):
        out = width * 2**stage
        for block in range(count):
            layers.append(Residual(channels, out, stride=2 if stage > 0 and block == 0 else 1))
            channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


MODELS = {
    "resnet18": lambda: resnet(64, (2, 2, 2, 2)),
    "resnet34": lambda: resnet(64, (3, 4, 6, 3)),
    "tiny": lambda: resnet(16, (1, 1, 1, 1)),
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as 16-bit numbers")
parser.add_argument("--model", default="resnet18", choices=MODELS, help="model to measure")
parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
parser.add_argument("--image-size", type=int, default=224, help="height and width of an image")
parser.add_argument("--num-warmup-batches", type=int, default=10, help="steps before the clock starts")
parser.add_argument("--num-batches-per-iter", type=int, default=10, help="steps per measurement")
parser.add_argument("--num-iters", type=int, default=10, help="measurements")
parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
parser.add_argument("--use-adasum", action="store_true", help="reduce gradients with Adasum")
args = parser.parse_args()

hvd.init()
device = torch.device("cpu") if args.no_cuda else hvd.device()
kind = "GPU" if device.type == "cuda" else "CPU"

model = MODELS[args.model]().to(device)
# Adasum needs no larger learning rate for more ranks.
rate = 0.01 if args.use_adasum else 0.01 * hvd.size()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=rate),
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
labels = torch.randint(1000, (args.batch_size,), device=device)


def log(line):
    if hvd.rank() == 0:
        print(line, flush=True)


def seconds_of(steps):
    """How long that many steps take, what the GPU still has to do included."""
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


log(f"Model: {args.model}")
log(f"Batch size: {args.batch_size}")
log(f"Number of {kind}s: {hvd.size()}")
log("Running warmup...")
seconds_of(args.num_warmup_batches)
log("Running benchmark...")
rates = []
for number in range(args.num_iters):
    rates.append(args.batch_size * args.num_batches_per_iter / seconds_of(args.num_batches_per_iter))
    log(f"Iter #{number}: {rates[-1]:.1f} img/sec per {kind}")
mean, spread = statistics.fmean(rates), 1.96 * statistics.pstdev(rates)
log(f"Img/sec per {kind}: {mean:.1f} +-{spread:.1f}")
log(f"Total img/sec on {hvd.size()} {kind}(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")
