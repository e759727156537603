# What a DistributedOptimizer must do, as functions that all ranks of one job run one after the other.
# Touches farandole.torch as users see it. Started by test_torch_optimizer.py.
"""`python torch_optimizer_cases.py [NAME ...]`: these cases, and those of the other files of cases."""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from typing import Any

import torch
import torch_scaler_cases  # noqa: F401 (adds its cases)
import torch_script_cases  # noqa: F401 (adds its cases)
from torch import nn
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
    run,
    same,
    small_model,
    synchronized,
    take_steps,
    wrap,
)

import farandole.torch as hvd

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
            apply(optimizer)
        equal_everywhere(model)


@case
def groups_of_tensors() -> None:
    model = small_model()
    first, second, _, fourth = model.parameters()
    optimizer = wrap(model, groups=[[first, fourth], [second]])
    for step in range(3):
        synchronized(model, optimizer, step, set_to_none=step % 2 == 0)
        apply(optimizer)
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
        apply(optimizer)
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1
    backward(model, 1)
    raises(AssertionError, "backward_passes_per_step", backward, model, 2)
    optimizer.synchronize()  # what was added to gradients while they were sent belongs to no sum: it is dropped
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
            apply(optimizer)
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
        members: Any = some.ranks if some.included() else [hvd.rank()]
        wanted = expected_grads(model, [step], members, 1 / len(members))
        backward(model, step)
        optimizer.synchronize()
        same(grads_of(model), wanted)
        apply(optimizer)
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
    assert type(optimizer).__name__ == "SGD" and issubclass(type(optimizer), torch.optim.SGD)
    for step in range(3):
        for one, two in ((model, optimizer), (local, plain)):
            two.zero_grad()
            loss_on(one, step).backward()
            two.step()
    same(model.parameters(), local.parameters(), 1e-9)
    take_steps(model, optimizer, 3)
    equal_everywhere(model)
    raises(AssertionError, "Adasum", optimizer.skip_synchronize)
    model, optimizer = copy.deepcopy((model, pickle.loads(pickle.dumps((model, optimizer)))))[1]
    backward(model, 7)
    copy.copy(optimizer).step()
    equal_everywhere(model)


@case
def adasum_goes_on_after_errors() -> None:
    model = small_model()
    optimizer = wrap(model, op=hvd.Adasum)
    start = [param.detach().clone() for param in model.parameters()]
    backward(model, 1)
    grown = nn.Parameter(torch.ones(2 + hvd.rank(), dtype=torch.float64))  # of another shape on each rank
    optimizer.add_param_group({"params": [grown]})
    raises(hvd.HorovodInternalError, "Mismatched", optimizer.step)
    same(model.parameters(), start, 0.0)
    optimizer.param_groups.pop()
    for step in range(4):
        # Frozen on one rank, without gradients on another.
        next(model.parameters()).requires_grad_(step % 2 == 0 or hvd.rank() != 0)
        optimizer.zero_grad()
        if step != 2 or hvd.rank() != 1:
            backward(model, step)
        optimizer.step()
        equal_everywhere(model)
    whole = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    raises(ValueError, "floating", hvd.DistributedOptimizer, torch.optim.SGD([whole]), op=hvd.Adasum)
    raises(ValueError, "must be > 0", optimizer.set_backward_passes_per_step, 0)
    raises(ValueError, "gradient_predivide_factor", wrap, model, op=hvd.Adasum, gradient_predivide_factor=2.0)
    raises(ValueError, "not registered", wrap, model, op=hvd.Adasum, process_set=hvd.ProcessSet([0]))


@case
def adasum_with_a_grad_scaler() -> None:
    for fused in (False, True):
        model, local = small_model().float(), small_model().float()
        plain = torch.optim.SGD(local.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), op=hvd.Adasum)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(data(3).float()).square().mean()  # equal everywhere: Adasum is one of them
            bad = step == 1
            scaler.scale(loss * float("inf") if bad and hvd.rank() == 0 else loss).backward()
            if step == 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if not bad:
                plain.zero_grad()
                local(data(3).float()).square().mean().backward()
                plain.step()
            same(model.parameters(), local.parameters(), 1e-5)
            scales = hvd.allgather(torch.tensor([scaler.get_scale()]))
            assert scales.tolist() == [8.0 if step < 1 else 4.0] * hvd.size()
        assert not hasattr(optimizer, "found_inf")


# --- gradients that are not there ------------------------------------------------------------------------------------


@case
def missing_gradients_count_as_zeros() -> None:
    for sparse in (False, True):
        for groups in (None, 3):
            model = Branches(sparse)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), groups=groups)
            for step in range(4):
                optimizer.zero_grad()
                all_values = [[(step + rank) % 4, (step + 2 * rank + 1) % 4] for rank in range(hvd.size())]
                words = [[rank, 3] if (step + rank) % 2 == 0 else [] for rank in range(hvd.size())]
                twin = copy.deepcopy(model)
                twin.zero_grad()
                for rank in range(hvd.size()):
                    (twin(all_values[rank], words[rank]) / hvd.size()).backward()
                model(all_values[hvd.rank()], words[hvd.rank()]).backward()
                optimizer.synchronize()
                for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                    wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
                    same([ours.grad.to_dense()], [wanted.to_dense()])
                assert model.words.weight.grad.is_sparse == sparse
                apply(optimizer)
            equal_everywhere(model)


def deep_model() -> nn.Module:
    torch.manual_seed(5)
    layers = [layer for _ in range(2) for layer in (nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4))]
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), *layers).double()


@case
def one_hook_speaks_for_small_gradients() -> None:
    """However the gradients come about: all at once, in parts, over old ones, more than once."""
    n = hvd.size()
    model = deep_model()
    optimizer = wrap(model)

    def hooks() -> int:
        return sum(bool(param._post_accumulate_grad_hooks) for param in model.parameters())

    def check(steps: list[int], kept: bool = False) -> None:
        wanted = expected_grads(model, steps, list(range(n)), 1 / n)
        optimizer.zero_grad(set_to_none=not kept)
        for step in steps:
            backward(model, step)
        optimizer.synchronize()
        same(grads_of(model), wanted)
        apply(optimizer)

    assert hooks() == 1
    check([0])
    check([1])
    assert hooks() == 1
    check([2])
    # Backward of one part of the model, then of the other. The hooked parameter is in the last layer.
    layers = list(model.children())
    for order in ((layers[3:], layers[:3]), (layers[:3], layers[3:])):
        wanted = expected_grads(model, [3], list(range(n)), 1 / n)
        optimizer.zero_grad()
        for part in order:
            loss = loss_on(model, 300 + hvd.rank())
            loss.backward(inputs=[param for layer in part for param in layer.parameters()])
        optimizer.synchronize()
        same(grads_of(model), wanted)
        apply(optimizer)
    # Over gradients that are kept and filled with zeros it is not known which are new: every one has its hook again.
    model = deep_model()
    optimizer = wrap(model)
    for step in range(4):
        check([step], kept=True)
    assert hooks() == 12
    model = deep_model()
    optimizer = wrap(model)
    for step in range(3):
        check([step])
    optimizer.set_backward_passes_per_step(2)
    assert hooks() == 12
    check([4, 5])
    optimizer.set_backward_passes_per_step(1)
    check([6])
    model = deep_model()
    optimizer = wrap(model)
    for step in range(3):
        check([step])
    assert hooks() == 1
    backward(model, 7)
    raises(AssertionError, "backward_passes_per_step", backward, model, 8)
    optimizer.synchronize()


@case
def optimizers_may_step_in_another_order_on_each_rank() -> None:
    """From the first step on: what backward has computed is under way when it ends."""
    n = hvd.size()
    models = [deep_model(), small_model()]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            [(f"{number}.{name}", param) for name, param in model.named_parameters()],
        )
        for number, model in enumerate(models)
    ]
    for step in range(4):
        wanted = [expected_grads(model, [step], list(range(n)), 1 / n) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, step)
        for optimizer in optimizers if hvd.rank() % 2 else reversed(optimizers):
            optimizer.step()
        for model, grads in zip(models, wanted, strict=True):
            same(grads_of(model), grads)


@case
def gradients_given_away_while_they_are_under_way() -> None:
    """`grad.data = other` on a rank that is early: the others get what was submitted, and no memory is overwritten."""
    n = hvd.size()
    model = deep_model()
    optimizer = wrap(model)
    for step in range(6):
        wanted = expected_grads(model, [step], list(range(n)), 1 / n)
        optimizer.zero_grad()
        if hvd.rank() == 0:
            backward(model, step)
            for param in model.parameters():
                param.grad.data = torch.zeros_like(param)
            theirs = [torch.full_like(param, 7.0) for param in model.parameters() for _ in range(4)]
            hvd.barrier()
            optimizer.synchronize()
            assert all(bool((tensor == 7.0).all()) for tensor in theirs)
        else:
            hvd.barrier()
            backward(model, step)
            optimizer.synchronize()
            same(grads_of(model), wanted)


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
def frozen_on_some_ranks_only() -> None:
    """Who has frozen a parameter counts as a rank without a gradient: the others' gradient moves it there too."""
    big = 100 * 100  # not packed
    for start in ("frozen here", "frozen there", "free"):
        for options in ({}, {"groups": 2}, {"compression": hvd.Compression.bf16}):
            torch.manual_seed(0)
            shapes = ((3,), (2, 2), (big,), (5,))
            params = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
            odd = hvd.rank() == 0
            if start != "free":
                params[1].requires_grad_(odd == (start == "frozen there"))
                params[2].requires_grad_(odd != (start == "frozen there"))
            optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)
            optimizer = hvd.DistributedOptimizer(optimizer, **options)
            for step in range(8):
                if step == 3:  # on one rank alone
                    for param in params:
                        param.requires_grad_(not odd or not param.requires_grad)
                if step in (5, 6):  # on all ranks: the middle ones are free again, the others are not
                    for number, param in enumerate(params):
                        param.requires_grad_(number in (1, 2))
                optimizer.zero_grad()
                before = [param.detach().clone() for param in params]
                wanted = [param.requires_grad for param in params]
                anywhere = [max(each) for each in zip(*hvd.allgather_object(wanted), strict=True)]
                if any(wanted):
                    sum(((hvd.rank() + 1) * param.sum()) for param in params).backward()
                optimizer.step()
                for param, old, moves in zip(params, before, anywhere, strict=True):
                    assert torch.equal(param, old) != moves, (start, options, step)
                equal_everywhere(nn.ParameterList(params))


@case
def frozen_sparse_embedding_on_some_ranks() -> None:
    model = Branches(sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(6):
        model.words.weight.requires_grad_(step < 2 or (step < 4 and hvd.rank() == 0))
        before = model.words.weight.detach().clone()
        optimizer.zero_grad()
        model([0, 1, 2, 3], [hvd.rank(), step]).backward()
        optimizer.step()
        assert torch.equal(before, model.words.weight) == (step >= 4), step
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
        synchronized(model, optimizer, step)
    equal_everywhere(model)


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
    raises(ValueError, "sequence of tuples", make, inner, nn.Tanh())
    raises(ValueError, "must be > 0", make, inner, named, backward_passes_per_step=0)
    raises(ValueError, "gradient_predivide_factor", make, inner, named, op=hvd.Sum, gradient_predivide_factor=2.0)
    raises(ValueError, "is not a reduction", make, inner, named, op=17)
    raises(ValueError, "whole number", make, inner, named, backward_passes_per_step=1.5)
    raises(ValueError, "gradient_predivide_factor", make, inner, named, gradient_predivide_factor=0.0)
    raises(ValueError, "gradient_predivide_factor", make, inner, named, gradient_predivide_factor=float("nan"))
    raises(TypeError, "compress", make, inner, named, compression="fp16")
    raises(TypeError, "Linear", make, nn.Linear(1, 1))
    raises(ValueError, "already", make, make(inner, named), named)
    raises(TypeError, "process_set", make, inner, named, process_set=[0, 1])
    assert make(inner, named).find_duplicates(["a", "b", "a"]) == {"a"}


@case
def after_an_error_it_goes_on() -> None:
    model: nn.Module = nn.Linear(3 + hvd.rank(), 2, dtype=torch.float64)
    optimizer = wrap(model)
    model(torch.ones(3 + hvd.rank(), dtype=torch.float64)).sum().backward()
    raises(hvd.HorovodInternalError, "Mismatched", optimizer.step)
    assert not optimizer._handles
    model = small_model()
    optimizer = wrap(model)
    take_steps(model, optimizer, 3)
    equal_everywhere(model)


@case
def an_exception_in_the_middle_of_backward() -> None:
    class Trips(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, trip: bool) -> torch.Tensor:
            ctx.trip = trip
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            if ctx.trip:
                raise KeyError("tripped")
            return grad, None

    layers = nn.ModuleList([nn.Linear(6, 6, dtype=torch.float64) for _ in range(6)])
    hvd.broadcast_parameters(layers.state_dict(), 0)
    optimizer = wrap(layers)
    for step in range(8):
        optimizer.zero_grad()
        x = torch.ones(6, dtype=torch.float64) * (hvd.rank() + 1)
        trips = step % 2 == 1 and hvd.rank() == step // 2 % hvd.size()
        for number, layer in enumerate(layers):
            x = torch.tanh(layer(Trips.apply(x, trips and number == 3)))
        if trips:
            raises(KeyError, "tripped", x.sum().backward)
            raises(AssertionError, "race condition", optimizer.zero_grad)
        else:
            x.sum().backward()
        optimizer.step()  # the gradients that were not computed count as zeros
        equal_everywhere(layers)


@case
def another_world() -> None:
    model = small_model()
    optimizer = wrap(model)
    for _ in range(2):
        take_steps(model, optimizer, 3)
        hvd.shutdown()
        hvd.init(process_sets="dynamic")
    equal_everywhere(model)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
