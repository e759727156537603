# What a DistributedOptimizer must do, as functions that all ranks of one job run one after the other.
# Touches farandole.torch as users see it. Started by test_torch_optimizer.py.
"""`python torch_optimizer_cases.py`: a line of JSON per rank: what became of each case."""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import farandole.torch as hvd
from farandole.runtime import runtime

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def raises(kind: type[BaseException], text: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    try:
        call(*args, **kwargs)
    except kind as error:
        assert text in str(error), f"{text!r} is not in {str(error)!r}"
    else:
        raise AssertionError(f"no {kind.__name__}")


def small_model(seed: int = 1, width: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)).double()


def data(seed: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def loss_on(model: nn.Module, seed: int) -> torch.Tensor:
    return model(data(seed)).square().mean()


def expected_grads(model: nn.Module, seeds: list[int], ranks: list[int], share: float) -> list[torch.Tensor]:
    """The sum over ranks and passes, times `share`, computed here."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    for rank in ranks:
        for seed in seeds:
            (loss_on(twin, 100 * seed + rank) * share).backward()
    return [param.grad for param in twin.parameters()]


def same(tensors: Any, others: Any, tolerance: float = 1e-12) -> None:
    for one, other in zip(tensors, others, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def grads_of(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad for param in model.parameters()]


def equal_everywhere(model: nn.Module) -> None:
    flat = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    everyones = hvd.allgather(flat[None])
    assert all(torch.equal(row, everyones[0]) for row in everyones), "parameters differ between ranks"


def wrap(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)


def backward(model: nn.Module, seed: int) -> None:
    loss_on(model, 100 * seed + hvd.rank()).backward()


# --- values ----------------------------------------------------------------------------------------------------------


@case
def gradients_are_those_of_all_ranks() -> None:
    n = hvd.size()
    for options, share in (
        ({}, 1 / n),
        ({"op": hvd.Sum}, 1.0),
        ({"gradient_predivide_factor": 4.0}, 1 / n),
        ({"groups": 2}, 1 / n),
        ({"groups": 100, "gradient_predivide_factor": 2.0}, 1 / n),
        ({"num_groups": 1}, 1 / n),
    ):
        model = small_model()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            optimizer = wrap(model, **options)
        for step in range(4):  # the first step is not packed, the others are
            optimizer.zero_grad()
            wanted = expected_grads(model, [step], list(range(n)), share)
            backward(model, step)
            assert optimizer._handles
            optimizer.synchronize()
            assert not optimizer._handles
            same(grads_of(model), wanted)
            with optimizer.skip_synchronize():
                optimizer.step()
        equal_everywhere(model)


@case
def groups_of_tensors() -> None:
    model = small_model()
    first, second, _, fourth = model.parameters()
    optimizer = wrap(model, groups=[[first, fourth], [second]])
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        wanted = expected_grads(model, [step], list(range(hvd.size())), 1 / hvd.size())
        backward(model, step)
        optimizer.synchronize()
        same(grads_of(model), wanted)
        with optimizer.skip_synchronize():
            optimizer.step()
    raises(ValueError, "only appear once", wrap, model, groups=[[first, second], [second]])
    raises(ValueError, "must consist of torch.Tensor", wrap, model, groups=[["first"]])
    raises(ValueError, "groups should be", wrap, model, groups=0)
    raises(ValueError, "groups should be", wrap, model, groups="two")


@case
def several_backward_passes() -> None:
    model = small_model()
    optimizer = wrap(model, backward_passes_per_step=2)
    for step in range(3):
        optimizer.zero_grad()
        wanted = expected_grads(model, [step, step + 50], list(range(hvd.size())), 1 / hvd.size())
        backward(model, step)
        assert not optimizer._handles
        assert set(optimizer._allreduce_delay.values()) == {1}
        backward(model, step + 50)
        optimizer.synchronize()
        same(grads_of(model), wanted)
        with optimizer.skip_synchronize():
            optimizer.step()
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1
    backward(model, 1)
    raises(AssertionError, "backward_passes_per_step", backward, model, 2)
    optimizer.step()
    raises(ValueError, "must be > 0", optimizer.set_backward_passes_per_step, 0)
    optimizer.zero_grad()
    backward(model, 3)
    optimizer.step()
    equal_everywhere(model)


@case
def compressors() -> None:
    class Halved(hvd.Compressor):
        seen = 0

        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            Halved.seen += 1
            return tensor / 2, tensor.dtype

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            return tensor.to(ctx) * 2

    for compression, tolerance in ((hvd.Compression.fp16, 2e-3), (hvd.Compression.bf16, 2e-2), (Halved, 1e-12)):
        model = small_model()
        optimizer = wrap(model, compression=compression)
        for step in range(3):
            optimizer.zero_grad()
            wanted = expected_grads(model, [step], list(range(hvd.size())), 1 / hvd.size())
            backward(model, step)
            optimizer.synchronize()
            same(grads_of(model), wanted, tolerance)
            with optimizer.skip_synchronize():
                optimizer.step()
        equal_everywhere(model)
    assert Halved.seen == 12


@case
def all_floating_types_and_layouts() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(
                [nn.Parameter(torch.ones(5, dtype=kind)) for kind in (torch.float16, torch.bfloat16, torch.float32)]
            )
            self.last = nn.Parameter(torch.ones(2, 3, 4, 4, dtype=torch.float64).to(memory_format=torch.channels_last))
            self.scalar = nn.Parameter(torch.tensor(1.0))
            self.empty = nn.Parameter(torch.empty(0))

        def forward(self, scale: float) -> torch.Tensor:
            ramp = torch.arange(96, dtype=torch.float64).view(2, 3, 4, 4)
            total = (self.last * ramp).sum() + self.scalar + self.empty.sum()
            return scale * (total + sum(part.double().sum() for part in self.parts))

    model = Mixed()
    optimizer = wrap(model)
    mean = sum(range(1, hvd.size() + 1)) / hvd.size()
    for _ in range(3):
        optimizer.zero_grad()
        model(hvd.rank() + 1.0).backward()
        optimizer.synchronize()
        for part in [*model.parts, model.scalar]:
            same([part.grad.double()], [torch.full_like(part, mean).double()], 1e-2)
        same([model.last.grad], [mean * torch.arange(96, dtype=torch.float64).view(2, 3, 4, 4)])


@case
def process_sets() -> None:
    some = hvd.add_process_set([0, 1]) if hvd.size() > 2 else hvd.add_process_set([1])
    model = small_model()
    optimizer = wrap(model, process_set=some)
    for step in range(3):
        optimizer.zero_grad()
        members = some.ranks if some.included() else [hvd.rank()]
        wanted = expected_grads(model, [step], members, 1 / len(members))
        backward(model, step)
        optimizer.synchronize()
        same(grads_of(model), wanted)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert optimizer.process_set is some
    if some.included():
        twin = pickle.loads(pickle.dumps(optimizer))
        assert twin.process_set is some
    assert hvd.remove_process_set(some)
    raises(ValueError, "not registered", wrap, small_model(), process_set=some)


@case
def adasum_of_equal_gradients_is_one_of_them() -> None:
    model, local = small_model(), small_model()
    plain = torch.optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
    optimizer = wrap(model, op=hvd.Adasum)
    assert type(optimizer).__name__ == "SGD" and isinstance(optimizer, torch.optim.SGD)
    for step in range(3):
        for one, two in ((model, optimizer), (local, plain)):
            two.zero_grad()
            loss_on(one, step).backward()
            two.step()
    same(model.parameters(), local.parameters(), 1e-9)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    equal_everywhere(model)
    raises(AssertionError, "Adasum", optimizer.skip_synchronize)
    model, optimizer = copy.deepcopy((model, pickle.loads(pickle.dumps((model, optimizer)))))[1]
    backward(model, 7)
    copy.copy(optimizer).step()
    equal_everywhere(model)


# --- gradients that are not there ------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Linear(4, 4, dtype=torch.float64) for _ in range(4)])
        self.words = nn.Embedding(10, 4, sparse=sparse, dtype=torch.float64)

    def forward(self, order: list[int], words: list[int]) -> torch.Tensor:
        x = torch.ones(4, dtype=torch.float64)
        for place in order:
            x = torch.tanh(self.layers[place](x))
        if words:
            x = x + self.words(torch.tensor(words)).sum(0)
        return x.sum()


@case
def missing_gradients_count_as_zeros() -> None:
    for sparse in (False, True):
        for groups in (None, 3):
            model = Branches(sparse)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), groups=groups)
            for step in range(4):
                optimizer.zero_grad()
                everyones = [[(step + rank) % 4, (step + 2 * rank + 1) % 4] for rank in range(hvd.size())]
                words = [[rank, 3] if (step + rank) % 2 == 0 else [] for rank in range(hvd.size())]
                twin = copy.deepcopy(model)
                twin.zero_grad()
                for rank in range(hvd.size()):
                    (twin(everyones[rank], words[rank]) / hvd.size()).backward()
                model(everyones[hvd.rank()], words[hvd.rank()]).backward()
                optimizer.synchronize()
                for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                    wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
                    same([ours.grad.to_dense()], [wanted.to_dense()])
                assert model.words.weight.grad.is_sparse == sparse
                with optimizer.skip_synchronize():
                    optimizer.step()
            equal_everywhere(model)


@case
def no_gradient_at_all_on_a_rank() -> None:
    model = small_model()
    optimizer = wrap(model)
    for step in range(4):
        optimizer.zero_grad()
        if (hvd.rank() + step) % 2:
            backward(model, step)
        optimizer.step()
    equal_everywhere(model)


@case
def frozen_and_unfrozen() -> None:
    model = small_model()
    first, second, *_ = model.parameters()
    first.requires_grad_(False)
    optimizer = wrap(model)
    for step in range(6):
        if step == 2:
            first.requires_grad_(True)
            second.requires_grad_(False)
        if step == 4:
            second.requires_grad_(True)
        optimizer.zero_grad()
        before = [first.detach().clone(), second.detach().clone()]
        backward(model, step)
        optimizer.step()
        changed = [not torch.equal(a, b) for a, b in zip(before, (first, second), strict=True)]
        assert changed == [step >= 2, step < 2 or step >= 4], (step, changed)
        equal_everywhere(model)


@case
def more_parameters_later() -> None:
    model, more = small_model(), small_model(2)
    optimizer = wrap(model)
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": list(more.parameters())})
        optimizer.zero_grad()
        (loss_on(model, hvd.rank()) + loss_on(more, hvd.rank())).backward()
        optimizer.step()
        more.zero_grad()
        equal_everywhere(model)
    equal_everywhere(more)


@case
def sparse_as_dense() -> None:
    model = Branches(sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters()), model.named_parameters(), sparse_as_dense=True
    )
    for step in range(3):
        optimizer.zero_grad()
        model([0, 1, 2, 3], [hvd.rank(), step]).backward()
        optimizer.step()
        assert not model.words.weight.grad.is_sparse
    equal_everywhere(model)


@case
def parameters_in_another_order_on_each_rank() -> None:
    model = small_model()
    named = list(model.named_parameters())
    turned = named[hvd.rank() % 4 :] + named[: hvd.rank() % 4]
    optimizer = torch.optim.SGD([param for _, param in turned], lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, turned)
    for step in range(3):
        optimizer.zero_grad()
        wanted = expected_grads(model, [step], list(range(hvd.size())), 1 / hvd.size())
        backward(model, step)
        optimizer.synchronize()
        same(grads_of(model), wanted)
    equal_everywhere(model)


# --- how scripts use it ----------------------------------------------------------------------------------------------


@case
def every_torch_optimizer() -> dict[str, str]:
    """Each class trains three steps; those that cannot say why."""
    reasons = {}
    for name, kind in sorted(vars(torch.optim).items()):
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or name == "Optimizer":
            continue
        model = Branches(sparse=name == "SparseAdam")
        params = [model.words.weight] if name == "SparseAdam" else list(model.parameters())
        if name == "Muon":
            params = [param for param in params if param.dim() == 2]
        optimizer = hvd.DistributedOptimizer(kind(params, lr=0.01))
        assert type(optimizer).__name__ == name and isinstance(optimizer, kind)

        def closure(optimizer: Any = optimizer, model: Branches = model) -> torch.Tensor:
            model.zero_grad()
            loss = model([0, 1, 2, 3], [hvd.rank(), 7])
            loss.backward()
            return loss

        start = [param.detach().clone() for param in params]
        for _ in range(3):
            optimizer.step(closure)
        if all(torch.equal(a, b) for a, b in zip(start, params, strict=True)):
            reasons[name] = "did not move"
        equal_everywhere(model if name not in ("SparseAdam", "Muon") else nn.ParameterList(params))
        plain = kind(params, lr=0.01)
        plain.load_state_dict(optimizer.state_dict())
        optimizer.load_state_dict(plain.state_dict())
    return reasons


@case
def options_of_torch_optimizers() -> None:
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}, {"differentiable": False}):
        model = small_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), **options))
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        equal_everywhere(model)


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
            with optimizer.skip_synchronize():
                optimizer.step()
    equal_everywhere(model)
    optimizer.zero_grad()
    backward(model, 9)
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer.step()
    assert any("skip_synchronize" in str(one.message) for one in said)
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


@case
def grad_scaler() -> None:
    for fused in (False, True):
        model = small_model().float()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(6):
            optimizer.zero_grad()
            loss = model(data(hvd.rank()).float()).square().mean()
            if step == 2 and hvd.rank() == 0:
                loss = loss * float("inf")  # all ranks must skip the step
            scaler.scale(loss).backward()
            if step % 2:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    scaler.step(optimizer)
            scaler.update()
            equal_everywhere(model)
        assert scaler.get_scale() == 4.0
        assert all(param.isfinite().all() for param in model.parameters())


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
            other.zero_grad()
            wanted = expected_grads(twin, [step], list(range(hvd.size())), 1 / hvd.size())
            backward(twin, step)
            other.synchronize()
            same(grads_of(twin), wanted)
            with other.skip_synchronize():
                other.step()
        equal_everywhere(twin)


@case
def state_goes_around() -> None:
    model = small_model()
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_on(model, 1).backward()
    inner.step()
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    assert optimizer.state_dict()["state"][0]["step"] == 1  # the wrapped optimizer's state goes on
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.load_state_dict(inner.state_dict())  # in the middle of a step
    assert not optimizer._handles
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert float(optimizer.state_dict()["state"][0]["step"]) == 4
    equal_everywhere(model)


@case
def nobody_keeps_it_alive() -> None:
    model = small_model()
    gone = weakref.ref(wrap(model))
    gc.collect()
    assert gone() is None
    optimizer = wrap(model)
    backward(model, 1)
    optimizer.step()
    equal_everywhere(model)


@case
def compiled_model() -> None:
    model = small_model()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = wrap(model)
    for step in range(3):
        optimizer.zero_grad()
        wanted = expected_grads(model, [step], list(range(hvd.size())), 1 / hvd.size())
        compiled(data(100 * step + hvd.rank())).square().mean().backward()
        optimizer.synchronize()
        same(grads_of(model), wanted)
        with optimizer.skip_synchronize():
            optimizer.step()


# --- mistakes --------------------------------------------------------------------------------------------------------


@case
def mistakes() -> None:
    model = small_model()
    make = hvd.DistributedOptimizer
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    raises(ValueError, "unique", make, inner, [*named[:3], ("0.weight", named[3][1])])
    raises(ValueError, "not named", make, inner, named[:3])
    raises(ValueError, "sequence of tuples", make, inner, list(model.parameters()))
    raises(ValueError, "must be > 0", make, inner, named, backward_passes_per_step=0)
    raises(ValueError, "gradient_predivide_factor", make, inner, named, op=hvd.Sum, gradient_predivide_factor=2.0)
    raises(ValueError, "no reduction", make, inner, named, op=17)
    assert make(inner, named).find_duplicates(["a", "b", "a"]) == {"a"}


@case
def after_an_error_it_goes_on() -> None:
    model = nn.Linear(3 + hvd.rank(), 2, dtype=torch.float64)
    optimizer = wrap(model)
    model(torch.ones(3 + hvd.rank(), dtype=torch.float64)).sum().backward()
    raises(hvd.HorovodInternalError, "Mismatched", optimizer.step)
    assert not optimizer._handles
    model = small_model()
    optimizer = wrap(model)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    equal_everywhere(model)


@case
def another_world() -> None:
    model = small_model()
    optimizer = wrap(model)
    for _ in range(2):
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        hvd.shutdown()
        hvd.init(process_sets="dynamic")
    equal_everywhere(model)


def main() -> int:
    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    wanted = sys.argv[1:] or list(CASES)
    found: dict[str, Any] = {}
    for name in wanted:
        try:
            found[name] = CASES[name]() or "ok"
        except BaseException:
            found[name] = traceback.format_exc()
            print(json.dumps({name: found[name]}), flush=True)
            return 1
        hvd.barrier()
    engine = runtime.world.engine
    found["left behind"] = len(runtime.world.handles) + len(getattr(engine, "_pending", ()))
    print(json.dumps(found), flush=True)
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
