# GradScalers and DistributedOptimizers: infinities on only one rank, and subclasses with methods of their own.
# Touches farandole.torch as users see it. Run with torch_optimizer_cases.py.
"""More cases for the same job."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch_job import case, equal_everywhere

import farandole.torch as hvd


class Defined(torch.amp.GradScaler):
    """Defined before any optimizer was made; does all of it itself."""

    def unscale_(self, optimizer: Any) -> None:
        # As GradScaler's, without its method.
        state = self._per_optimizer_states[id(optimizer)]
        assert self._scale is not None
        state["found_inf_per_device"] = self._unscale_grads_(
            optimizer, self._scale.reciprocal(), torch.zeros(()), False
        )
        state["stage"] = torch.amp.grad_scaler.OptState.UNSCALED


def defined_later() -> type[Defined]:
    class Later(Defined):
        def unscale_(self, optimizer: Any) -> None:
            torch.amp.GradScaler.unscale_(self, optimizer)

        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self.unscale_(optimizer)
            state = self._per_optimizer_states[id(optimizer)]
            return self._maybe_opt_step(optimizer, state, *args, **kwargs)

    return Later


ORDERS = ("step", "unscale, step", "synchronize, step", "synchronize, unscale, step", "unscale, synchronize, step")


def scaled_step(order: str, optimizer: Any, scaler: Any) -> None:
    for word in order.split(", ")[:-1]:
        optimizer.synchronize() if word == "synchronize" else scaler.unscale_(optimizer)
    if "synchronize" in order:
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
    else:
        scaler.step(optimizer)


def all_values(value: float) -> list[Any]:
    return list(hvd.allgather(torch.tensor([value])).tolist())


def trained(scaler: Any, optimizer: Any, weight: nn.Parameter, order: str, bad: dict[int, int]) -> None:
    """Six steps by 1 - 0.5 * 0.5**step, but for those with an infinity in one element, said by step."""
    expected, scale = weight.detach().clone(), scaler.get_scale()
    for step in range(6):
        optimizer.zero_grad()
        slope = torch.full((8,), 0.5**step * (1 + hvd.rank()))
        if step in bad and hvd.rank() == 0:
            slope[bad[step]] = torch.inf
        scaler.scale((slope * weight).sum()).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaled_step(order, optimizer, scaler)
        scaler.update()
        if step in bad:
            scale /= 2
        else:
            expected -= 0.5 * 0.5**step * (1 + hvd.size()) / 2
        assert all_values(scaler.get_scale()) == [scale] * hvd.size(), f"{order}, step {step}"
        torch.testing.assert_close(weight.detach(), expected)


@case
def all_ranks_skip_where_one_has_an_infinity_in_its_share() -> None:
    for order, zero_based in itertools.product(ORDERS, (True, False)):
        weight = nn.Parameter(torch.ones(8))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), shard_optimizer_state=True)
        # In the first rank's share, the last one's, and the first one's again, with a good step between.
        bad = {0: 0, 1: 7, 3: 0} if zero_based else {1: 7, 2: 0, 4: 7}
        trained(torch.amp.GradScaler("cpu", init_scale=8.0), optimizer, weight, order, bad)


@case
def clipping_between_unscaling_and_stepping_keeps_the_agreement() -> None:
    weight = nn.Parameter(torch.ones(8))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), shard_optimizer_state=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        optimizer.zero_grad()
        slope = torch.ones(8)
        if step in (1, 2):
            slope[7] = torch.inf
        before = weight.detach().clone()
        scaler.scale((slope * weight).sum()).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(8**0.5 / 2)
        scaler.step(optimizer)
        scaler.update()
        assert all_values(scaler.get_scale()) == [8.0 / 2 ** min(step, 2)] * hvd.size()
        moved = 0.0 if step in (1, 2) else 0.25
        torch.testing.assert_close(weight.detach(), before - moved)


@case
def scalers_of_other_libraries_see_reduced_gradients() -> None:
    hvd.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5))
    if not dist.is_initialized():
        dist.init_process_group("farandole")
    options: tuple[dict[str, Any], ...] = ({}, {"shard_optimizer_state": True})
    for kind, more, order in itertools.product((Defined, defined_later(), ShardedGradScaler), options, ORDERS):
        if kind.__name__ == "Later" and "unscale" in order:
            continue  # it unscales in each step
        weight = nn.Parameter(torch.ones(8))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), **more)
        trained(kind("cpu", init_scale=8.0), optimizer, weight, order, {1: 7, 3: 0})


@case
def a_step_that_was_skipped_is_over() -> None:
    # The model's own zero_grad() tells the optimizer nothing, and the last rank has no batch left.
    weight = nn.Parameter(torch.ones(8))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        weight.grad = None
        if step == 0 or hvd.rank() != hvd.size() - 1:
            slope = torch.full((8,), torch.inf if step == 0 else 1.0)
            scaler.scale((slope * weight).sum()).backward()
        else:
            scaler.scale(torch.ones(1))
        scaler.step(optimizer)
        scaler.update()
    equal_everywhere(nn.ParameterList([weight]))
    torch.testing.assert_close(weight.detach(), torch.full((8,), 1 - (hvd.size() - 1) / hvd.size()))
