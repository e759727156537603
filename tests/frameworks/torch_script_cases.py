# How scripts use a DistributedOptimizer: every torch optimizer, closures, schedulers, scalers, copies, loaders.
# Touches farandole.torch as users see it. Run with torch_optimizer_cases.py.
"""More cases for the same job."""

from __future__ import annotations

import concurrent.futures
import copy
import gc
import io
import itertools
import multiprocessing
import os
import pickle
import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_job import (
    Branches,
    apply,
    backward,
    case,
    data,
    equal_everywhere,
    expected_grads,
    grads_of,
    loss_on,
    raises,
    same,
    small_model,
    synchronized,
    take_steps,
    wrap,
)

import farandole.torch as hvd
from farandole.world.runtime import runtime


def trained_by(kind: Any, make: Any, ranks: list[int], wrapped: bool) -> tuple[Any, list[torch.Tensor]]:
    """Three steps on the losses of these ranks; the optimizer and its parameters."""
    model = Branches(sparse=kind is torch.optim.SparseAdam)
    params: list[torch.Tensor]
    params = [model.words.weight] if kind is torch.optim.SparseAdam else list(model.parameters())
    if kind is getattr(torch.optim, "Muon", None):
        params = [param for param in params if param.dim() == 2]
    start = [param.detach().clone() for param in params]
    optimizer = make(params)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer)

    def closure() -> torch.Tensor:
        model.zero_grad()
        loss = sum(model([0, 1, 2, 3], [rank, 7]) for rank in ranks) / len(ranks)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert not any(torch.equal(a, b) for a, b in zip(start, params, strict=True)), "did not move"
    return optimizer, params


@case
def every_torch_optimizer() -> None:
    """Each class does on all ranks what it does in one process on the whole batch."""
    kinds = [kind for _, kind in sorted(vars(torch.optim).items()) if isinstance(kind, type)]
    kinds = [kind for kind in kinds if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer]
    assert len(kinds) >= 12
    for kind in kinds:

        def make(params: Any, kind: Any = kind) -> Any:
            return kind(params, lr=0.01)

        optimizer, params = trained_by(kind, make, [hvd.rank()], True)
        assert type(optimizer).__name__ == kind.__name__ and issubclass(type(optimizer), kind)
        plain, wanted = trained_by(kind, make, list(range(hvd.size())), False)
        same(params, wanted, 1e-9)
        equal_everywhere(nn.ParameterList(params))
        plain.load_state_dict(optimizer.state_dict())
        optimizer.load_state_dict(plain.state_dict())


@case
def options_of_torch_optimizers() -> None:
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        for options in ({"foreach": True}, {"fused": True}, {"foreach": False}, {"maximize": True}):

            def make(params: Any, kind: Any = kind, options: Any = options) -> Any:
                return kind(params, lr=0.01, **options)

            _, params = trained_by(kind, make, [hvd.rank()], True)
            same(params, trained_by(kind, make, list(range(hvd.size())), False)[1], 1e-9)
            equal_everywhere(nn.ParameterList(params))


@case
def clipping_after_synchronize() -> None:
    model = small_model()
    optimizer = wrap(model)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        assert torch.equal(hvd.allreduce(norm, op=hvd.Max), norm)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            apply(optimizer)
    equal_everywhere(model)
    optimizer.zero_grad()
    backward(model, 9)
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert any("skip_synchronize" in str(one.message) for one in caught)
    equal_everywhere(model)


@case
def zero_grad_while_under_way() -> None:
    model = small_model()
    optimizer = wrap(model)
    for _ in range(3):
        backward(model, 1)
        raises(AssertionError, "race condition", optimizer.zero_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert all(param.grad is not None and not param.grad.any() for param in model.parameters())
        optimizer.zero_grad(set_to_none=True)
        assert all(param.grad is None for param in model.parameters())
        optimizer.zero_grad()


@case
def several_optimizers() -> None:
    one, two = small_model(1), small_model(2)
    named, unnamed = wrap(one), wrap(two)  # the same names in both
    others = [small_model(seed) for seed in (3, 4)]
    more = [hvd.DistributedOptimizer(torch.optim.Adam(model.parameters())) for model in others]
    for step in range(4):
        sum(loss_on(model, 10 * step + hvd.rank()) for model in (one, two, *others)).backward()
        for optimizer in (more[1], named, more[0], unnamed)[:: 1 if hvd.rank() % 2 == 0 else -1]:
            optimizer.step()
            optimizer.zero_grad()
    for model in (one, two, *others):
        equal_everywhere(model)


@case
def schedulers_before_and_after() -> None:
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    early = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(inner)
    late = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        assert optimizer._handles
        optimizer.step()
        assert not optimizer._handles
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            early.step()
            late.step()
    assert optimizer.param_groups[0]["lr"] == 0.25**3
    equal_everywhere(model)


class OwnScaler(torch.amp.GradScaler):
    """A subclass, as libraries have them: it does something of its own and calls torch's methods."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[str] = []

    def unscale_(self, optimizer: Any) -> None:
        self.calls.append("unscale_")
        super().unscale_(optimizer)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("step")
        return super().step(optimizer, *args, **kwargs)


def scaled_step(order: str, optimizer: Any, scaler: Any, model: nn.Module) -> None:
    """After backward: the orders in which scripts unscale, clip and step."""
    if order == "step alone":
        scaler.step(optimizer)
        return
    if order == "synchronize first":
        optimizer.synchronize()
    scaler.unscale_(optimizer)
    if order == "unscale first":
        optimizer.synchronize()  # too late to be of use, and harmless
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert torch.equal(torch.nan_to_num(norm), hvd.allreduce(torch.nan_to_num(norm), op=hvd.Max))
    if order == "as without Horovod":
        scaler.step(optimizer)
    else:
        with optimizer.skip_synchronize():
            scaler.step(optimizer)


@case
def grad_scaler() -> None:
    orders = ("step alone", "synchronize first", "unscale first", "as without Horovod")
    for order, fused, optimizers_zero_grad in (
        *((order, fused, True) for order in orders for fused in (False, True)),
        ("step alone", False, False),
        ("as without Horovod", False, False),
    ):
        whole, model = small_model().float(), small_model().float()
        plain = torch.optim.SGD(whole.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused))
        scaler = (OwnScaler if fused else torch.amp.GradScaler)("cpu", init_scale=8.0)
        for step in range(8):
            (optimizer if optimizers_zero_grad else model).zero_grad()
            loss = model(data(hvd.rank()).float()).square().mean()
            before = [param.detach().clone() for param in model.parameters()]
            if step in (2, 5) and hvd.rank() == step % hvd.size():
                loss = loss * float("inf")  # all ranks must skip the step
            scaler.scale(loss).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                scaled_step(order, optimizer, scaler, model)
            scaler.update()
            equal_everywhere(model)
            if step in (2, 5):
                same(model.parameters(), before, 0.0)
                continue
            plain.zero_grad()
            for rank in range(hvd.size()):
                (whole(data(rank).float()).square().mean() / hvd.size()).backward()
            if order != "step alone":
                nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
            plain.step()
            same(model.parameters(), whole.parameters(), 1e-5)
        assert scaler.get_scale() == 2.0


@case
def mixed_precision_on_the_cpu() -> None:
    kinds = (torch.amp.GradScaler, OwnScaler)
    several: tuple[dict[str, Any], ...] = ({}, {"op": hvd.Adasum}, {"shard_optimizer_state": True})
    for kind, options in itertools.product(kinds, several):
        model = small_model().float()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
        scaler: Any = kind("cpu", init_scale=8.0)
        for step in range(4):
            optimizer.zero_grad()
            before = [param.detach().clone() for param in model.parameters()]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(data(hvd.rank()).float()).square().mean()
            if step == 2 and hvd.rank() == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if not options:  # each rank has other data: only reduced gradients are equal
                for param in model.parameters():
                    assert param.grad is not None
                    seen = torch.nan_to_num(param.grad)
                    assert torch.equal(seen, hvd.broadcast(seen, 0))
            scaler.step(optimizer)
            scaler.update()
            scales = hvd.allgather(torch.tensor([scaler.get_scale()]))
            assert scales.tolist() == [8.0 if step < 2 else 4.0] * hvd.size(), "found_inf is not the same everywhere"
            equal_everywhere(model)
            moved = any(not torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
            assert moved == (step != 2)
        assert kind is torch.amp.GradScaler or scaler.calls == ["unscale_", "step"] * 4


@case
def closures_and_hooks() -> None:
    model = small_model()
    optimizer = wrap(model)
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_on(model, hvd.rank())
        loss.backward()
        return loss

    for count in range(1, 4):
        assert isinstance(optimizer.step(closure), torch.Tensor)
        assert len(steps) == count
        optimizer.load_state_dict(optimizer.state_dict())
    equal_everywhere(model)


@case
def copies_and_pickles() -> None:
    model = small_model()
    optimizer = wrap(model, groups=2, gradient_predivide_factor=2.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    backward(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    for twin, other in (
        copy.deepcopy((model, optimizer)),
        pickle.loads(pickle.dumps((model, optimizer))),
        torch.load(file, weights_only=False),
        (model, copy.copy(optimizer)),
    ):
        assert type(other) is type(optimizer)
        assert str(other.state_dict()) == str(optimizer.state_dict())
        for step in range(3):
            synchronized(twin, other, step)
            apply(other)
        equal_everywhere(twin)


@case
def state_goes_around() -> None:
    model = small_model()
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_on(model, 1).backward()
    inner.step()
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    assert optimizer.state_dict()["state"][0]["step"] == 1  # the wrapped optimizer's state continues
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.load_state_dict(inner.state_dict())  # in the middle of a step
    assert not optimizer._handles
    take_steps(model, optimizer, 3)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert float(optimizer.state_dict()["state"][0]["step"]) == 4
    equal_everywhere(model)


@case
def training_goes_on_from_a_checkpoint() -> None:
    """Saved after three steps and loaded into new objects, the next three give the same bits."""

    def fresh(seed: int) -> tuple[nn.Module, Any, Any]:
        model = small_model(seed)
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters())
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def train(model: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            scheduler.step()

    first = fresh(1)
    train(*first, range(3))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    second = fresh(2 + hvd.rank())
    if hvd.rank() == 0:  # as scripts do: one rank loads, and the others get the values
        for part, state in zip(second[:2], torch.load(file), strict=False):
            part.load_state_dict(state)
    hvd.broadcast_parameters(second[0].state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(second[1], root_rank=0)
    second[2].load_state_dict(hvd.broadcast_object(first[2].state_dict(), 0))
    for one in (first, second):
        train(*one, range(3, 6))
    same(second[0].parameters(), first[0].parameters(), 0.0)
    assert str(second[1].state_dict()) == str(first[1].state_dict())


@case
def no_reference_keeps_it_alive() -> None:
    model = small_model()
    reference = weakref.ref(wrap(model))
    gc.collect()
    assert reference() is None
    optimizer = wrap(model)
    backward(model, 1)
    optimizer.step()
    equal_everywhere(model)


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Where the workers of a DataLoader run: it must not matter how they were started."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return data(row, 1)[0], os.getpid()


def seeded_by_rank(worker: int) -> None:
    torch.manual_seed(100 * hvd.rank() + worker)  # forked workers know whose they are


def epochs(workers: int, how: str | None) -> tuple[list[torch.Tensor], set[int]]:
    """Two epochs of training, and the processes that the rows came from."""
    model = small_model()
    optimizer = wrap(model)
    sampler: Any = torch.utils.data.distributed.DistributedSampler(Rows(), hvd.size(), hvd.rank())
    loader = torch.utils.data.DataLoader(
        Rows(),
        batch_size=4,
        sampler=sampler,
        num_workers=workers,
        multiprocessing_context=how,
        worker_init_fn=seeded_by_rank if how == "fork" else None,
        persistent_workers=how == "spawn",  # each imports torch again
    )
    sources: set[int] = set()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        under_way = hvd.allreduce_async(torch.ones(1000), name="under way", op=hvd.Sum)  # while workers start
        batches = iter(loader)
        assert hvd.synchronize(under_way).unique().tolist() == [hvd.size()]
        for rows, where in batches:
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
            sources.update(where.tolist())
        # In the middle of a step, workers that are left to the garbage collection.
        optimizer.zero_grad()
        loss = loss_on(model, hvd.rank())
        extra = iter(loader) if how != "spawn" else None
        loss.backward()
        del extra
        optimizer.step()
    equal_everywhere(model)
    return list(model.parameters()), sources


@case
def workers_of_data_loaders() -> None:
    native = type(runtime.world.engine).__name__ == "NativeEngine"
    wanted, here = epochs(0, None)
    assert here == {os.getpid()}
    for how in ("fork", "spawn") if hvd.size() == 2 and native else ("fork",):
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        trained, sources = epochs(2, how)
        same(trained, wanted, 0.0)
        assert len(sources) == (4 if how == "fork" else 2) and os.getpid() not in sources, sources
        gc.collect()
        assert not multiprocessing.active_children()
        assert len(os.listdir("/proc/self/fd")) <= before + 3, how  # the resource tracker's, and a cache of torch's


@case
def checkpointed_and_threaded() -> None:
    """Backward passes inside backward passes, and training in a thread of its own."""
    for reentrant in (False, True):
        model = small_model()
        optimizer = wrap(model)

        def train(model: Any = model, optimizer: Any = optimizer, reentrant: bool = reentrant) -> None:
            for step in range(4):
                optimizer.zero_grad()
                wanted = expected_grads(model, [step], list(range(hvd.size())), 1 / hvd.size())
                x = data(100 * step + hvd.rank()).requires_grad_()
                for layer in model:
                    x = checkpoint(layer, x, use_reentrant=reentrant)
                x.square().mean().backward()
                optimizer.synchronize()
                same(grads_of(model), wanted)
                apply(optimizer)

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(train).result()
        train()
        equal_everywhere(model)


@case
def compiled_model() -> None:
    # Inductor compiles C++ for many seconds: once is enough, and the second rank finds it in the cache.
    native = type(runtime.world.engine).__name__ == "NativeEngine"
    backend = "inductor" if native and hvd.size() == 2 else "aot_eager"
    model = small_model()
    compiled = torch.compile(model, backend=backend)
    for rank in range(hvd.size()):
        if rank == hvd.rank():
            compiled(data(0)).square().mean().backward()
        hvd.barrier()
    model.zero_grad()
    optimizer = wrap(model)
    for step in range(3):
        optimizer.zero_grad()
        wanted = expected_grads(model, [step], list(range(hvd.size())), 1 / hvd.size())
        compiled(data(100 * step + hvd.rank())).square().mean().backward()
        optimizer.synchronize()
        same(grads_of(model), wanted)
        apply(optimizer)
    equal_everywhere(model)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs, "nothing was compiled"
