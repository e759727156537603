# The second half of the suite: gradients, optimizers, states; and the program that runs both halves.
# Touches horovod.torch alone.
"""`horovodrun -np 2 python torch_suite_training.py`: all cases in one job, and a line with their number."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import torch
from torch import nn
from torch_suite import Mistakes, Movements, Reductions, Suite, expanded, main, over

import horovod.torch as hvd

OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")


def model_of(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x).square().mean()


@expanded
class Gradients(Suite):
    """Through each operation; the weights make the gradient of each rank another one."""

    def back(self, call: Any, x: torch.Tensor, weight: float) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (call(x) * weight).sum().backward()
        assert x.grad is not None
        return x.grad

    @over(op=[hvd.Sum, hvd.Average], dtype=[torch.float32, torch.float64])
    def test_allreduce(self, op: Any, dtype: torch.dtype) -> None:
        weights = sum(range(1, self.size + 1)) / (self.size if op == hvd.Average else 1)
        found = self.back(lambda x: hvd.allreduce(x, op=op), torch.ones(3, dtype=dtype), self.rank + 1)
        self.near(found, torch.full((3,), weights, dtype=dtype))

    @over(where=["prescale_factor", "postscale_factor"])
    def test_allreduce_scaled(self, where: str) -> None:
        found = self.back(lambda x: hvd.allreduce(x, op=hvd.Sum, **{where: 0.5}), torch.ones(3), 1.0)
        self.near(found, torch.full((3,), 0.5 * self.size))

    def test_grouped_allreduce(self) -> None:
        found = self.back(lambda x: sum(hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)), torch.ones(3), 1.0)
        self.near(found, torch.full((3,), 3.0 * self.size))

    def test_allgather(self) -> None:
        rows = self.rank + 1
        found = self.back(lambda x: hvd.allgather(x), torch.ones(rows, 2), self.rank + 1.0)
        self.near(found, torch.full((rows, 2), sum(range(1, self.size + 1)) / self.size))

    def test_grouped_allgather(self) -> None:
        found = self.back(lambda x: sum(one.sum() for one in hvd.grouped_allgather([x, x])), torch.ones(2, 2), 1.0)
        self.near(found, torch.full((2, 2), 2.0))

    def test_broadcast(self) -> None:
        found = self.back(lambda x: hvd.broadcast(x, 0), torch.ones(2), self.rank + 1.0)
        self.near(found, torch.full((2,), sum(range(1, self.size + 1)) / self.size if self.rank == 0 else 0.0))

    @over(splits=[True, False])
    def test_alltoall(self, splits: bool) -> None:
        def call(x: torch.Tensor) -> torch.Tensor:
            return hvd.alltoall(x, splits=[2] * self.size)[0] if splits else hvd.alltoall(x)

        found = self.back(call, torch.ones(2 * self.size), self.rank + 1.0)
        self.near(found, torch.arange(1.0, self.size + 1).repeat_interleave(2))

    @over(op=[hvd.Sum, hvd.Average])
    def test_reducescatter(self, op: Any) -> None:
        found = self.back(lambda x: hvd.reducescatter(x, op=op), torch.ones(self.size, 2), self.rank + 1.0)
        wanted = torch.arange(1.0, self.size + 1)[:, None].expand(-1, 2)
        self.near(found, wanted * (self.size if op == hvd.Sum else 1))

    def test_second_derivatives(self) -> None:
        x = torch.full((2,), 3.0, requires_grad=True)
        (grad,) = torch.autograd.grad(hvd.allreduce(x**3, op=hvd.Average).sum(), x, create_graph=True)
        grad.sum().backward()
        self.near(x.grad, torch.full((2,), 18.0))


@expanded
class Training(Suite):
    """A distributed optimizer does what one process does with the mean of the ranks' losses."""

    def compare(self, steps: int = 3, kind: str = "SGD", passes: int = 1, **options: Any) -> Any:
        model, alone = model_of(), model_of()
        make = getattr(torch.optim, kind)
        optimizer = hvd.DistributedOptimizer(
            make(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=passes, **options
        )
        plain = make(alone.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            plain.zero_grad()
            for part in range(passes):
                loss_of(model, self.rank, 10 * step + part).backward()
                for rank in range(self.size):
                    (loss_of(alone, rank, 10 * step + part) / self.size).backward()
            optimizer.step()
            plain.step()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
        return optimizer

    @over(kind=OPTIMIZERS)
    def test_optimizer(self, kind: str) -> None:
        optimizer = self.compare(kind=kind)
        self.assertEqual(type(optimizer).__name__, kind)

    @over(kind=OPTIMIZERS)
    def test_broadcast_state(self, kind: str) -> None:
        model = model_of(self.rank)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01 * (self.rank + 1))
        loss_of(model, self.rank).backward()
        optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        self.assertEqual(optimizer.param_groups[0]["lr"], 0.01)
        own = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        for value in [*own, *model.parameters()]:
            self.same(hvd.broadcast(value.detach(), 0), value.detach())

    @over(passes=[2, 3])
    def test_passes(self, passes: int) -> None:
        self.compare(passes=passes)

    @over(groups=[1, 2, 4])
    def test_groups(self, groups: int) -> None:
        self.compare(groups=groups)

    def test_predivide(self) -> None:
        self.compare(gradient_predivide_factor=float(self.size))

    def test_set_backward_passes(self) -> None:
        model = model_of()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        optimizer.set_backward_passes_per_step(2)
        for _ in range(2):
            loss_of(model, self.rank).backward()
        optimizer.step()
        with self.assertRaises(AssertionError):
            for _ in range(3):
                loss_of(model, self.rank).backward()
        optimizer.step()

    def test_clipping(self) -> None:
        model = model_of()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        loss_of(model, self.rank).backward()
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        self.same(hvd.broadcast(norm, 0), norm)
        with optimizer.skip_synchronize():
            optimizer.step()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer.zero_grad()
            loss_of(model, self.rank).backward()
            optimizer.synchronize()
            optimizer.step()
        self.assertTrue(any("skip_synchronize" in str(one.message) for one in said))

    def test_zero_grad_between(self) -> None:
        model = model_of()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        loss_of(model, self.rank).backward()
        with self.assertRaises(AssertionError):
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()

    def test_named_parameters(self) -> None:
        model = model_of()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        for bad in (
            list(model.named_parameters())[:-1],
            [("same", param) for param in model.parameters()],
            list(model.parameters()),
        ):
            with self.assertRaises(ValueError):
                hvd.DistributedOptimizer(plain, bad)
        hvd.DistributedOptimizer(plain, None)

    def test_frozen_parameters(self) -> None:
        model = model_of()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for frozen in (True, False):
            for param in model[0].parameters():
                param.requires_grad_(not frozen)
            before = copy.deepcopy(model.state_dict())
            optimizer.zero_grad()
            loss_of(model, self.rank).backward()
            optimizer.step()
            moved = not torch.equal(before["0.weight"], model.state_dict()["0.weight"])
            self.assertEqual(moved, not frozen)
        for param in model.parameters():
            self.same(hvd.broadcast(param.detach(), 0), param.detach())

    def test_parameters_without_gradient(self) -> None:
        model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        model[self.rank % 2](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        for param in model.parameters():
            self.same(hvd.broadcast(param.detach(), 0), param.detach())

    def test_process_sets(self) -> None:
        for one in self.sets():
            model = model_of()
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), process_set=one)
            loss_of(model, self.rank).backward()
            optimizer.step()

    def test_adasum(self) -> None:
        if self.size & (self.size - 1):
            return
        model = model_of()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
        loss_of(model, self.rank).backward()
        optimizer.step()
        for param in model.parameters():
            self.same(hvd.broadcast(param.detach(), 0), param.detach())

    def test_fp16_compression(self) -> None:
        model = model_of().float()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=hvd.Compression.fp16
        )
        model(torch.ones(2, 3)).sum().backward()
        own = [param.grad.clone() for param in model.parameters()]
        optimizer.synchronize()
        for param, grad in zip(model.parameters(), own, strict=True):
            torch.testing.assert_close(param.grad, grad, rtol=1e-2, atol=1e-2)

    def test_elastic_state(self) -> None:
        model = model_of(self.rank)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=20 + self.rank, epoch=10 + self.rank)
        state.sync()
        self.assertEqual((state.batch, state.epoch), (20, 10))
        kept = model[0].weight.detach().clone()
        self.same(hvd.broadcast(kept, 0), kept)
        state.epoch = 11
        with torch.no_grad():
            model[0].weight.zero_()
        state.restore()
        self.assertEqual(state.epoch, 10)
        self.same(model[0].weight.detach(), kept)
        state.epoch = 12
        state.commit()
        state.restore()
        self.assertEqual(state.epoch, 12)

    def test_elastic_sampler(self) -> None:
        sampler = hvd.elastic.ElasticSampler(list(range(4 * self.size)), shuffle=False)
        self.assertEqual(list(sampler), list(range(self.rank, 4 * self.size, self.size)))
        sampler.record_batch(0, 2)
        self.assertEqual(sampler.state_dict()["processed_num"], 2 * self.size)
        sampler.reset()
        self.assertEqual(len(sampler), 2)

    def test_sync_batch_norm(self) -> None:
        x = torch.randn(4 * self.size, 3, generator=torch.Generator().manual_seed(1))
        ours, theirs = hvd.SyncBatchNorm(3), nn.BatchNorm1d(3)
        torch.testing.assert_close(ours(x[4 * self.rank : 4 * self.rank + 4]), theirs(x)[4 * self.rank :][:4])
        torch.testing.assert_close(ours.running_var, theirs.running_var)

    def test_shutdown_and_again(self) -> None:
        hvd.shutdown()
        with self.assertRaises(ValueError):
            hvd.size()
        hvd.init(process_sets="dynamic")
        self.check_allreduce()


if __name__ == "__main__":
    sys.exit(main(Reductions, Movements, Mistakes, Gradients, Training))
