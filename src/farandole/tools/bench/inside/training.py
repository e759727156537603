"""Training steps of three shapes: gpt (9 M parameters in 75 tensors), vgg (34 M in 10: communication-bound) and many
(0.4 M in 400: latency-bound). Uses torch and the library it is given; each rank has its own random batch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

from .libraries import Gloo, Horovod
from .library import Library
from .together import Together

WARM_STEPS = 3
Case = tuple[Any, Any, Any, Callable[[Any, Any], Any]]  # model, input, target, loss


def gpt(torch: Any) -> Case:
    """A small transformer."""
    nn = torch.nn
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(8192, 256), encoder, nn.Linear(256, 8192))
    loss = nn.functional.cross_entropy
    words, next_words = torch.randint(0, 8192, (4, 64)), torch.randint(0, 8192, (4 * 64,))
    return model, words, next_words, lambda out, target: loss(out.reshape(-1, 8192), target)


def vgg(torch: Any) -> Case:
    """Small images, large dense layers."""
    nn = torch.nn
    layers = []
    for before, after in ((3, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 100)]
    images, classes = torch.randn(16, 3, 32, 32), torch.randint(0, 100, (16,))
    return nn.Sequential(*layers), images, classes, nn.functional.cross_entropy


def many(torch: Any) -> Case:
    """A hundred small layers."""
    nn = torch.nn
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()) for _ in range(100)]
    return nn.Sequential(*blocks), torch.randn(16, 64), torch.randn(16, 64), nn.functional.mse_loss


CASES = {"gpt": gpt, "vgg": vgg, "many": many}


class Training:
    """The model that this rank trains now."""

    def __init__(self, library: Library, together: Together) -> None:
        self._library = library
        self._together = together
        self._name = ""
        self._model: Any = None
        self._optimizer: Any = None
        self._copies: list[Any] = []  # of the gradients

    def run(self, command: dict[str, Any]) -> dict[str, Any]:
        """`steps` steps: the seconds of each. The first question about a case also trains it warm."""
        if command["case"] != self._name:
            self._load(command["case"])
        self._together.wait()
        in_step, copied = command.get("in_step", False), command.get("copied", False)
        if copied and not self._copies:
            self._copies = [parameter.grad.clone() for parameter in self._parameters]
            from farandole.bindings.private.torch_names import copy_each

            self._copy = copy_each
        times = [self._step(in_step, copied) for _ in range(command["steps"])]
        return {"times": times, "bytes": self._bytes, "gradients": self._probe, "digest": self._digest()}

    def trace(self, command: dict[str, Any]) -> dict[str, Any]:
        """A timeline of some steps, written by rank 0; when the last one's phases began, in seconds since 1970."""
        hvd: Any = self._library.hvd  # type: ignore[attr-defined]
        if command["case"] != self._name:
            self._load(command["case"])
        self._together.wait()
        if self._library.rank == 0:
            hvd.start_timeline(command["path"])
        for _ in range(command["steps"]):
            marks = [time.time()]
            self._optimizer.zero_grad()
            loss = self._loss(self._model(self._input), self._target)
            marks.append(time.time())
            loss.backward()
            marks.append(time.time())
            self._optimizer.step()
            marks.append(time.time())
        if self._library.rank == 0:
            hvd.stop_timeline()
        return {"marks": marks}

    def _load(self, name: str) -> None:
        import torch

        self._torch = torch
        self._name = name
        self._model = self._optimizer = None  # frees the last one's memory
        self._copies = []
        torch.manual_seed(0)
        model = CASES[name](torch)[0]
        torch.manual_seed(1 + self._library.rank)
        _, self._input, self._target, self._loss = CASES[name](torch)
        self._parameters = list(model.parameters())
        self._bytes = sum(parameter.nbytes for parameter in self._parameters)
        optimizer = torch.optim.SGD(self._parameters, lr=0.001)
        if isinstance(self._library, Horovod):
            hvd = self._library.hvd
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        elif isinstance(self._library, Gloo):
            model = torch.nn.parallel.DistributedDataParallel(model)
        self._model, self._optimizer = model, optimizer
        self._step()
        self._probe = self._gradients()
        for _ in range(WARM_STEPS - 1):
            self._step()

    def _step(self, in_step: bool = False, copied: bool = False) -> float:
        """Seconds of one step; `in_step`: until the slowest rank has ended it; `copied`: the gradients are, once."""
        began = time.perf_counter()
        self._optimizer.zero_grad()
        self._loss(self._model(self._input), self._target).backward()
        if copied:
            self._copy(self._copies, [parameter.grad for parameter in self._parameters])
        self._optimizer.step()
        if in_step:
            self._together.wait()
        return time.perf_counter() - began

    def _gradients(self) -> list[float]:
        """Some of the averaged gradients of the first step, from every tensor."""
        found: list[float] = []
        for parameter in self._parameters:
            flat = parameter.grad.flatten()
            found += flat[:: max(1, flat.numel() // 7)].tolist()
        return found

    def _digest(self) -> str:
        """All bits of all parameters."""
        digest = hashlib.sha256()
        for parameter in self._parameters:
            digest.update(parameter.detach().numpy())
        return digest.hexdigest()
