# The cases of elastic state for PyTorch on several ranks that stay: handlers, agreement, sharded parts, checkpoints.
# Touches farandole.torch as users see it, and the mirror's memory to play a rank that is new.
"""Each case runs on all ranks together; ranks that really die are in test_torch_elastic.py."""

from __future__ import annotations

import copy
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch_job import case, equal_everywhere, raises, run, same, small_model, wrap

import farandole.torch as hvd
from farandole.elastic import commits, describe_memory, load_from, memory, save_to
from farandole.elastic.mirror import Mirror, partner
from farandole.torch.elastic.state import (
    ModelStateHandler,
    StateHandler,
    TorchState,
    get_handler_registry,
    set_handler_registry,
)
from farandole.world.runtime import runtime

SCRATCH = Path(os.environ["SCRATCH"])


def train(model: nn.Module, optimizer: Any, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), step + hvd.rank() + 1.0, dtype=torch.float64)).square().mean().backward()
        optimizer.step()


def snapshot(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    state = copy.deepcopy(optimizer.state_dict()["state"])
    return [*(p.detach().clone() for p in model.parameters()), *(s["momentum_buffer"] for s in state.values())]


@case
def commit_and_restore() -> None:
    model = small_model()
    optimizer = wrap(model)
    state = TorchState(model=model, optimizer=optimizer, batch=0)
    state.sync()
    train(model, optimizer)
    state.batch = 2
    state.commit()
    kept = snapshot(model, optimizer)
    train(model, optimizer, 3)
    state.batch = 5
    state.restore()
    same(snapshot(model, optimizer), kept, 0)
    assert state.batch == 2 and all(param.grad is None for param in model.parameters())
    train(model, optimizer)  # what was restored is not the copy itself
    state.restore()
    same(snapshot(model, optimizer), kept, 0)
    handler: Any = state._handlers["model"]
    memory = [tensor.data_ptr() for tensor in handler.copy.tensors]
    state.commit()
    assert memory == [tensor.data_ptr() for tensor in handler.copy.tensors]  # used again


@case
def a_new_rank_gets_everything() -> None:
    model = small_model(seed=1)
    optimizer = wrap(model)
    state = TorchState(model=model, optimizer=optimizer, batch=0, notes=["old"])
    state.sync()
    train(model, optimizer)
    state.batch = 2
    state.commit()
    if hvd.rank() == hvd.size() - 1:  # this one has just been started
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        optimizer.state.clear()
        state = TorchState(model=model, optimizer=optimizer, batch=0, notes=[])
    state.sync()
    equal_everywhere(model)
    assert state.batch == 2 and state.notes == ["old"] and commits(state) == 2
    assert all("momentum_buffer" in one for one in optimizer.state.values())
    train(model, optimizer)
    equal_everywhere(model)


@case
def any_rank_that_knows_is_enough() -> None:
    state = TorchState(step=hvd.rank())
    state.check_host_updates()
    if hvd.rank() == hvd.size() - 1:
        state.on_hosts_updated(5, 1)
    raises(hvd.HostsUpdatedInterrupt, "hosts", state.commit)
    state.commit()
    for rank in range(2):  # one heard that a host goes, the other that one comes
        if hvd.rank() == rank:
            state.on_hosts_updated(6, rank + 1)
    try:
        state.commit()
    except hvd.HostsUpdatedInterrupt as interrupt:
        assert not interrupt.skip_sync
    else:
        raise AssertionError("no interrupt")


@case
def one_that_needs_the_state_is_enough() -> None:
    calls: list[int] = []

    state = TorchState(step=0)
    synced = []
    state.sync = lambda: synced.append(1)  # type: ignore[method-assign]

    def once(state: Any) -> int:
        calls.append(1)
        if len(calls) == 1:
            # The others could do without a sync; this one could not.
            raise hvd.HostsUpdatedInterrupt(skip_sync=hvd.rank() != 1)
        return 5

    assert hvd.elastic.run_fn(once, lambda: None)(state) == 5 and len(synced) == 2


@case
def handlers_of_ones_own() -> None:
    class Box:
        def __init__(self) -> None:
            self.content = 0

    class BoxHandler(StateHandler):
        def __init__(self, value: Box) -> None:
            super().__init__(value)
            self.save()

        def save(self) -> None:
            self.kept = self.value.content

        def restore(self) -> None:
            self.value.content = self.kept

        def sync(self) -> None:
            self.value.content = hvd.broadcast_object(self.value.content, 0)

    before = get_handler_registry()
    set_handler_registry([(Box, BoxHandler), *before])
    try:
        state = TorchState(model=small_model(), box=Box())
    finally:
        set_handler_registry(before)
    state.box.content = 10 + hvd.rank()
    state.commit()
    state.box.content = 0
    state.restore()
    assert state.box.content == 10 + hvd.rank()
    state.sync()
    assert state.box.content == 10
    new = Box()
    new.content = 3
    state.box = new  # kept at once
    state.box.content = 4
    state.restore()
    assert new.content == 3 and isinstance(state._handlers["model"], ModelStateHandler)
    other = small_model(seed=9)
    state.model = other
    assert state._handlers["model"].value is other


@case
def schedulers_keep_their_optimizer() -> None:
    model = small_model()
    optimizer = wrap(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    state = TorchState(model=model, optimizer=optimizer, scheduler=scheduler, scaler=torch.amp.GradScaler("cpu"))
    state.sync()
    train(model, optimizer, 1)
    scheduler.step()
    state.commit()
    scheduler.step()
    state.restore()
    assert state.scheduler is scheduler and scheduler.optimizer is optimizer and scheduler.last_epoch == 1
    if hvd.rank():
        scheduler.last_epoch = 7
    state.sync()
    assert scheduler.last_epoch == 1


@case
def sampler_and_loader_take_rank_0s_place() -> None:
    sampler, loader = hvd.elastic.ElasticSampler(range(50)), hvd.elastic.ElasticDataLoader(range(50), 2)
    state = TorchState(sampler=sampler, loader=loader)
    sampler.record_batch(0, 3 + hvd.rank())
    next(iter(loader))
    if hvd.rank():
        loader.cursor = 0
    state.sync()
    assert sampler.processed_num == 3 * hvd.size() and len(sampler.remaining_indices) == 50 - 3 * hvd.size()
    assert loader.cursor == 2 * hvd.size()
    loader.cursor = 30
    state.restore()
    assert loader.cursor == 2 * hvd.size()
    state.on_reset()


@case
def a_batch_counts_when_the_optimizer_has_stepped() -> None:
    model = small_model()
    optimizer = wrap(model, backward_passes_per_step=2)
    loader = hvd.elastic.ElasticDataLoader(range(50), 2)
    state = TorchState(model=model, optimizer=optimizer, loader=loader)
    state.sync()
    one = 2 * hvd.size()
    for batch, _ in enumerate(loader):
        state.commit()  # before this batch has been used
        assert loader.state_dict() == {"epoch": 0, "cursor": (batch - batch % 2) * one}, batch
        model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        if batch % 2:
            optimizer.step()
            optimizer.zero_grad()
        if batch == 4:
            break
    before = [param.detach().clone() for param in model.parameters()]
    state.on_reset()  # the fifth batch has left gradients and no step
    assert loader.cursor == 4 * one and all(param.grad is None for param in model.parameters())
    assert not optimizer._gradients.pending
    for _ in loader:
        model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loader.state_dict() == {"epoch": 1, "cursor": 0}
    assert not torch.equal(before[0], next(iter(model.parameters())))
    equal_everywhere(model)


# --- sharded parts ---------------------------------------------------------------------------------------------------


def sharded_state() -> TorchState:
    own = {key: torch.full((3,), float(key)) for key in range(7) if key % hvd.size() == hvd.rank()}
    state = TorchState(moments=hvd.elastic.Sharded(own), step=0)
    state.sync()
    return state


def holds(state: TorchState, offset: float) -> None:
    assert sorted(state.moments) == [key for key in range(7) if key % hvd.size() == hvd.rank()]
    for key in state.moments:
        assert torch.equal(state.moments[key], torch.full((3,), key + offset)), (key, state.moments[key])


@case
def the_loss_of_one_rank_loses_no_part() -> None:
    for lost in range(hvd.size()):
        state = sharded_state()
        for key in state.moments:
            state.moments[key] += 0.5
        state.commit()
        for key in state.moments:
            state.moments[key] += 7
        if hvd.rank() == lost:  # a new process in its place
            state = TorchState(moments=hvd.elastic.Sharded(), step=0)
        else:
            state.restore()
        state.sync()
        holds(state, 0.5)
        state.restore()
        holds(state, 0.5)


@case
def both_sides_of_the_cut() -> None:
    """A commit counts when one rank knows that all have made it; before that the one before it does."""
    for agreed in (False, True):
        state = sharded_state()
        mirror = state._mirror
        assert mirror is not None
        for key in state.moments:
            state.moments[key] += 1
        mirror.prepare(2)
        knows = agreed and hvd.rank() == 1
        if knows:
            mirror.held[2].everything = mirror.held[1].everything
            mirror._settle(2, mirror.held[2])
        if hvd.rank() == 0:  # dies now, and a new one comes
            state._mirror = mirror = Mirror({"moments": state.moments})
            state.moments.apply({})
        mirror.recover()
        holds(state, 1.0 if agreed else 0.0)
        assert mirror.agreed == (2 if agreed else 1)


@case
def a_loss_while_parts_are_dealt_out() -> None:
    """Some ranks have the new deal, others still the old one: together they have everything."""
    state = sharded_state()
    mirror = state._mirror
    assert mirror is not None
    old = copy.deepcopy(mirror.held)
    mirror.recover()
    rank, size = hvd.rank(), hvd.size()
    if rank % 2:  # did not hear that the new deal is complete
        mirror._staged, mirror.held = mirror.held[1], old
    lost = partner(0, runtime.world.session.hosts)
    if rank == lost:
        state._mirror = mirror = Mirror({"moments": state.moments})
        state.moments.apply({})
    mirror.recover()
    assert size > 1
    holds(state, 0.0)


@case
def losing_a_rank_and_its_partner_is_said() -> None:
    state = sharded_state()
    if hvd.rank() in (0, partner(0, runtime.world.session.hosts)):
        state = TorchState(moments=hvd.elastic.Sharded(), step=0)
    if hvd.size() > 2:
        raises(hvd.elastic.LostShards, "moments[0]", state.sync)


@case
def generators_follow_their_rank() -> None:
    state = TorchState(draws=hvd.elastic.TorchRandomState(), step=0)
    state.sync()
    torch.manual_seed(100 + hvd.rank())
    state.commit()
    first = torch.rand(3)
    if hvd.rank() == 1:  # a new process
        torch.manual_seed(5)
        state = TorchState(draws=hvd.elastic.TorchRandomState(), step=0)
    else:
        state.restore()
    state.sync()
    assert torch.equal(torch.rand(3), first)


# --- checkpoints -----------------------------------------------------------------------------------------------------


@case
def checkpoints_of_models() -> None:
    model = small_model()
    optimizer = wrap(model)
    state = TorchState(model=model, optimizer=optimizer, epoch=3, draws=hvd.elastic.TorchRandomState())
    state.sync()
    train(model, optimizer)
    state.commit()
    kept = snapshot(model, optimizer)
    path = str(SCRATCH / "models")
    writing = save_to(state, path)
    train(model, optimizer)
    state.commit()  # while it is being written: what is written is the commit before
    writing.wait(30)
    train(model, optimizer)
    other = small_model(seed=8)
    again = TorchState(model=other, optimizer=wrap(other), epoch=0, draws=hvd.elastic.TorchRandomState())
    assert load_from(again, path) == (2 if hvd.rank() == 0 else 0)
    again.sync()
    same(snapshot(other, again.optimizer), kept, 0)
    assert again.epoch == 3 and commits(again) == 2
    train(other, again.optimizer)
    equal_everywhere(other)


@case
def checkpoints_of_sharded_parts() -> None:
    state = sharded_state()
    state.commit()
    path = str(SCRATCH / "sharded")
    save_to(state, path, wait=True)
    hvd.barrier()  # rank 0 has the manifest
    again = TorchState(moments=hvd.elastic.Sharded({100: 1}), step=5)
    load_from(again, path)
    again.sync()
    holds(again, 0.0)
    assert again.step == 0


@case
def shares_of_an_optimizer() -> None:
    """MemorySink, restored, written and read: by each rank its own share, of the sizes that are there."""
    model = small_model()
    optimizer = wrap(model, shard_optimizer_state=True)
    state = TorchState(model=model, optimizer=optimizer, epoch=3)
    state.sync()
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    state.commit()
    kept = snapshot(model, optimizer)
    path = str(SCRATCH / "shares")
    save_to(state, path, wait=True)
    hvd.barrier()
    for _ in range(2):  # what was restored is not the copy itself
        optimizer.param_groups[0]["lr"] = 0.2
        train(model, optimizer, 3)
        state.restore()
        same(snapshot(model, optimizer), kept, 0)
        assert optimizer.param_groups[0]["lr"] == 0.05 and all(param.grad is None for param in model.parameters())
    state.sync()
    train(model, optimizer)
    state.restore()  # after a sync there is no commit in this form yet
    same(snapshot(model, optimizer), kept, 0)
    other = small_model(seed=8)
    again = TorchState(model=other, optimizer=wrap(other, shard_optimizer_state=True), epoch=0)
    load_from(again, path)
    again.sync()
    same(snapshot(other, again.optimizer), kept, 0)
    assert again.epoch == 3 and again.optimizer.param_groups[0]["lr"] == 0.05
    train(other, again.optimizer)
    equal_everywhere(other)
    if hvd.rank() == 0:
        raises(ValueError, "optimizer.shards", load_from, TorchState(model=other, optimizer=wrap(other)), path)


@case
def shares_cut_anew_for_other_ranks() -> None:
    """Pieces of 1 to 5 ranks, of shapes that nothing divides, are the same state on these."""
    from farandole.torch.elastic.shards import OptimizerShards

    model = small_model(width=5)
    optimizer = wrap(model, shard_optimizer_state=True)
    train(model, optimizer)
    whole = snapshot(model, optimizer)
    shares = optimizer._gradients
    local = [optimizer.state[bucket.shard]["momentum_buffer"] for bucket in shares.buckets]
    rows = [row for _, row in shares.gathered("momentum", local)]
    for ranks in range(1, 6):
        pieces: dict[int | str, Any] = {}
        for index in range(ranks):
            states = []
            for bucket, row in zip(shares.buckets, rows, strict=True):
                share = -(-bucket.elements // ranks)
                values = row[: bucket.elements][index * share : (index + 1) * share]
                padding = torch.zeros(share - len(values), dtype=row.dtype)
                states.append({"momentum_buffer": torch.cat([values, padding])})
            if index % hvd.size() == hvd.rank():
                pieces[index] = {"ranks": ranks, "state": states}
        optimizer.state.clear()
        part = OptimizerShards(optimizer)
        part.apply(pieces)
        part.settle()
        same(snapshot(model, optimizer), whole, 0)


@case
def what_a_commit_costs() -> None:
    model = nn.Linear(1000, 4000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TorchState(model=model, optimizer=optimizer, step=0)
    state.sync()
    state.commit()
    start = time.perf_counter()
    for _ in range(20):
        state.commit()
    seconds = (time.perf_counter() - start) / 20
    assert memory(state)["replicated"] == 4 * 4_004_000
    sent = runtime.world.engine.counter("bytes_sent")
    state.commit()
    sent = runtime.world.engine.counter("bytes_sent") - sent
    assert sent < 10_000, sent  # replicated state is not sent
    print(f"a commit of 16 MB takes {1e3 * seconds:.2f} ms and sends {sent} bytes; {describe_memory(state)}")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
