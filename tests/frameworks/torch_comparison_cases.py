# The comparison of the ranks' parameters warns if they differ by mistake, and not if they differ on purpose.
# Touches farandole.torch as users see it, and the comparison's count of steps.
from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch import nn
from torch_job import backward, case, run, small_model, wrap

import farandole.torch as hvd
from farandole.torch import comparison

SAID: list[str] = []


class Kept(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        SAID.append(record.getMessage())


logging.getLogger("farandole").addHandler(Kept())


def train(model: nn.Module, optimizer: Any, steps: int = 2) -> list[str]:
    """What is said during some steps."""
    SAID.clear()
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return list(SAID)


def expect_warning(messages: list[str], name: str) -> None:
    if hvd.rank() == 0:
        assert len(messages) == 1 and "the ranks train different models" in messages[0], messages
        assert f": {name} is the first of" in messages[0] and "broadcast_parameters" in messages[0], messages
    else:
        assert not messages, messages


def parameter(model: nn.Module, name: str) -> torch.Tensor:
    return dict(model.named_parameters())[name]


def at_next_comparison(optimizer: Any) -> None:
    optimizer._gradients.layouts.comparison._steps = comparison.STEPS


@case
def other_seeds_are_noticed_once() -> None:
    model = small_model(seed=hvd.rank())
    expect_warning(train(model, wrap(model), 3), "0.weight")


@case
def the_first_that_differs_is_named() -> None:
    model = small_model(seed=7)
    if hvd.rank() == 1:
        with torch.no_grad():
            parameter(model, "2.weight").mul_(1.1)
    expect_warning(train(model, wrap(model)), "2.weight")


@case
def all_types_are_compared() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = small_model(hvd.rank(), width=256).to(dtype)
        SAID.clear()
        optimizer = wrap(model)
        model(torch.ones(4, 3, dtype=dtype)).square().mean().backward()
        optimizer.step()
        expect_warning(list(SAID), "0.weight")


@case
def parameters_that_were_broadcast_are_equal() -> None:
    model = small_model(seed=hvd.rank())
    optimizer = wrap(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert not train(model, optimizer)
    at_next_comparison(optimizer)
    assert not train(model, optimizer)


@case
def rounding_of_other_processors_is_no_mistake() -> None:
    model = small_model(seed=3)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.0 + 1e-6 * hvd.rank())
    assert not train(model, wrap(model))


@case
def drift_is_noticed_later() -> None:
    model = small_model(seed=3)
    optimizer = wrap(model)
    assert not train(model, optimizer)
    if hvd.rank() == 1:
        with torch.no_grad():
            parameter(model, "0.bias").add_(5.0)
    assert not train(model, optimizer), "not compared in each step"
    at_next_comparison(optimizer)
    expect_warning(train(model, optimizer), "0.bias")


@case
def buffers_and_frozen_parameters_may_differ() -> None:
    model = small_model(seed=3)
    model.register_buffer("seen", torch.full((8,), float(hvd.rank())))
    frozen = parameter(model, "0.weight")
    frozen.requires_grad_(False)
    with torch.no_grad():
        frozen.add_(float(hvd.rank()))
    optimizer = wrap(model)
    assert not train(model, optimizer)


@case
def a_parameter_that_one_rank_has_frozen_is_not_compared() -> None:
    model = small_model(seed=3)
    if hvd.rank() == 1:
        parameter(model, "0.weight").requires_grad_(False)
        with torch.no_grad():
            parameter(model, "0.weight").add_(1.0)
    assert not train(model, wrap(model))


@case
def steps_without_reducing_are_on_purpose() -> None:
    model = small_model(seed=3)
    optimizer = wrap(model)
    assert not train(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        torch.stack([param.sum() for param in model.parameters()]).sum().mul(hvd.rank() + 1.0).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        with torch.no_grad():
            parameter(model, "0.weight").add_(float(hvd.rank()))
        with optimizer.skip_synchronize():
            optimizer.step()
    at_next_comparison(optimizer)
    assert not train(model, optimizer)


@case
def sharded_and_adasum_optimizers_are_not_compared() -> None:
    for options in ({"shard_optimizer_state": True}, {"op": hvd.Adasum}):
        model = small_model(seed=hvd.rank())
        assert not train(model, wrap(model, **options))


@case
def ranks_of_other_process_sets_train_other_models() -> None:
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    model = small_model(seed=hvd.rank())
    assert not train(model, wrap(model, process_set=sets[hvd.rank()]))
    for each in sets:
        hvd.remove_process_set(each)


@case
def after_join_all_ranks_count_anew() -> None:
    model = small_model(seed=3)
    optimizer = wrap(model)
    assert not train(model, optimizer, 2 + hvd.rank())
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
    assert not train(model, optimizer)
    assert optimizer._gradients.layouts.comparison._steps == 2


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
