# Runs a framework without one of its private names at a time, each in a fork of a process that has imported it.
# Touches the framework, from which it takes names away, and farandole as users see it.
"""`python private_names_job.py FRAMEWORK` prints, for each name, what was warned of and what the case raised."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any


class Without:
    """An object of C++, which loses nothing, without one of its attributes."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner, self._name = inner, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._inner, name)


class Gone:
    """In a class, where a base class has the attribute as well."""

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        raise AttributeError("taken away")


def take_away(path: str) -> None:
    """As in a release that does not have it."""
    module, _, attributes = path.partition(":")
    *before, last = attributes.split(".")
    owner: Any = functools.reduce(getattr, before, importlib.import_module(module))
    if isinstance(owner, type):
        vars(owner).get("__annotations__", {}).pop(last, None)
        setattr(owner, last, Gone())
    else:
        try:
            delattr(owner, last)
        except (AttributeError, TypeError):
            holder: Any = functools.reduce(getattr, before[:-1], importlib.import_module(module))
            setattr(holder, before[-1], Without(owner, last))


def with_torch(path: str) -> None:
    """A training step by DDP and by DistributedOptimizer, with batch normalisation and a shared tensor."""
    import torch
    import torch.distributed as dist

    import farandole.torch as hvd
    import farandole.torch.distributed  # noqa: F401 (it registers the backend)

    def trains(model: Any, optimizer: Any) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            before = [param.detach().clone() for param in model.parameters()]
            optimizer.step()
            assert any(not torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))

    def model() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(4, 4), hvd.SyncBatchNorm(4), torch.nn.Linear(4, 1))

    def stepping(of: Any) -> Any:
        return torch.optim.SGD(of.parameters(), lr=0.1)

    if path.endswith("._set_default_backend"):  # torch makes no group at all without it
        hvd.init()
    else:
        dist.init_process_group("farandole", store=dist.HashStore(), rank=0, world_size=1)
        shared = torch.ones(1 << 20)
        if not path.endswith("._share_fd_cpu_"):  # by which torch itself shares
            shared.share_memory_()
        dist.all_reduce(shared)
        assert (shared == 1).all()
        wrapped = torch.nn.parallel.DistributedDataParallel(model())
        trains(wrapped, stepping(wrapped))
    assert dist.is_backend_available("farandole")
    plain = model()
    trains(plain, hvd.DistributedOptimizer(stepping(plain)))
    if dist.is_initialized():
        dist.destroy_process_group()
    hvd.shutdown()


def with_jax(path: str) -> None:
    """The binding is there, or says why it is not."""
    import farandole.jax  # noqa: F401


def with_ray(path: str) -> None:
    """What the trainers ask for, without a cluster."""
    from farandole.private import MISSING, ray_names

    class Reports:
        def __init__(self, theirs: Any) -> None:
            self.theirs = theirs

    missing = {name.partition("_kv_")[2] for name in MISSING}
    if "put" in missing:
        ray_names.keep(b"key", b"value", b"space")
    if "get" in missing:
        assert ray_names.kept(b"key", b"space") is None
    if "del" in missing:
        ray_names.forget(b"key", b"space")
    if any(name.endswith("train_fn_utils") for name in MISSING):
        ray_names.wrap_reports(Reports)  # outside of a train function it would raise


def objects_of_lightning() -> None:
    """A trainer without what ElasticCallback needs of it: it says so."""
    from lightning.pytorch import Trainer

    from farandole.private import lightning_names

    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    for call, owner, name in (
        (lightning_names.checkpoint, trainer, "_checkpoint_connector"),
        (lightning_names.loader_states, trainer.fit_loop, "_combined_loader_states_to_load"),
    ):
        delattr(owner, name)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                call(owner)
            except RuntimeError as error:
                assert name in str(error)
            else:
                raise AssertionError(f"nothing was raised without {name}")
        assert any("ElasticCallback raises RuntimeError" in str(one.message) for one in seen), name


CASES: dict[str, Callable[[str], None]] = {"torch": with_torch, "jax": with_jax, "ray": with_ray}


# What the cases make the framework import by itself, once for all: with all of its names.
LATE = {
    "torch": ("torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.distributed.tensor"),
    "jax": ("jax.extend.core", "jax.interpreters.mlir", "jax.interpreters.batching", "jax.numpy", "jax.ffi"),
}


def alone(run: Callable[[], Any]) -> Any:
    """What `run` gives, in a fork of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(run()).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(said) if code == 0 else {"code": code}


def names_of(framework: str) -> dict[str, str]:
    """The names that are there, and what is said to happen without them."""
    importlib.import_module(f"farandole.private.{framework}_names")
    private = importlib.import_module("farandole.private")
    return {path: name.without for path, name in private.FOUND.items()}


def without(framework: str, path: str) -> dict[str, Any]:
    """What the case says when this name is missing."""
    take_away(path)
    raised = ""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            CASES[framework](path)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
    return {"raised": raised, "warned": [str(one.message) for one in seen if f"{path} is missing" in str(one.message)]}


if __name__ == "__main__":
    chosen = sys.argv[1]
    importlib.import_module(chosen)
    if chosen == "lightning":
        objects_of_lightning()
        sys.exit()
    for module in LATE.get(chosen, ()):
        importlib.import_module(module)
    table = alone(functools.partial(names_of, chosen))
    print(json.dumps({path: [table[path], alone(functools.partial(without, chosen, path))] for path in table}))
