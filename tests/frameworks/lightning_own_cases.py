# What only our strategy does, or does differently from DDP; every rank of a case checks its results.
# Touches Lightning and torch, inside ranks.
"""`OWN`: functions without results."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_models import RANK, SCRATCH, SIZE, data, fresh, loader, net, ordered, trainer, weights
from lightning_utilities.core import rank_zero
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Subset, TensorDataset

import farandole.torch as hvd
from farandole.lightning import FarandoleEnvironment, FarandoleStrategy, HorovodStrategy, fit, stack

OWN: dict[str, Any] = {}


def own(function: Any) -> Any:
    OWN[function.__name__] = function
    return function


def plain(steps: Any, rate: float = 0.05) -> dict[str, torch.Tensor]:
    """The same training in one process, without Lightning: `steps` gives each step's loss as a function of the net."""
    torch.manual_seed(3)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), rate)
    for loss in steps:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    return weights(model)


def losses_of_all_ranks() -> Any:
    """The losses of all ranks' batches of `ordered(8 * SIZE)`, step by step."""
    x, y = data(8 * SIZE).tensors
    for step in range(2):
        places = [rank + SIZE * (4 * step + at) for rank in range(SIZE) for at in range(4)]
        yield lambda model, places=places: mse_loss(model(x[places]), y[places])


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: Any, index: int) -> Any:
        return mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


class ManualOptimization(Plain):
    """Steps its optimizer itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.propagate(super().training_step(batch, index))
        optimizer.step()

    def propagate(self, loss: Any) -> None:
        self.manual_backward(loss)


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, msg=functools.partial("{}: {}".format, name))


@own
def uneven_data() -> None:
    """Rank r has r + 2 batches: those without one add zeros, and all end with the same weights."""
    whole = data(4 * (SIZE + 1))
    own_data = Subset(whole, range(4 * (RANK + 2)))
    module = fresh(Plain)
    runs = trainer("ours", max_epochs=1, use_distributed_sampler=False)
    runs.fit(module, DataLoader(own_data, 4))
    x, y = whole.tensors

    def loss(step: int) -> Any:
        those = slice(4 * step, 4 * step + 4)
        have = sum(step < rank + 2 for rank in range(SIZE))
        return lambda model: mse_loss(model(x[those]), y[those]) * have / SIZE

    assert runs.global_step == SIZE + 1
    close(weights(module.net), plain(loss(step) for step in range(SIZE + 1)))


@own
def uneven_data_in_manual_optimization() -> None:
    """Uneven data with a module that steps its optimizer itself."""
    module = fresh(ManualOptimization)
    trainer("ours", max_epochs=1, use_distributed_sampler=False).fit(
        module, DataLoader(Subset(data(4 * (SIZE + 1)), range(4 * (RANK + 2))), 4)
    )
    hvd.check_equal(module.net)


@own
def sync_batch_norm() -> None:
    """The averages of all ranks' batches, on the CPU; and the module's own class afterwards."""

    class Normalised(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    module = fresh(Normalised)
    runs = trainer("ours", max_epochs=1, sync_batchnorm=True)
    runs.fit(module, ordered(8 * SIZE))
    assert type(module.net[1]) is nn.BatchNorm1d
    torch.manual_seed(3)
    alone = Normalised().net
    optimizer = torch.optim.SGD(alone.parameters(), 0.05)
    for loss in losses_of_all_ranks():
        optimizer.zero_grad()
        loss(alone).backward()
        optimizer.step()
    close(weights(module.net), weights(alone))


@own
def closures() -> None:
    """LBFGS calls its closure as often as the loss makes it: all ranks must see the same loss."""

    class Quasi(Plain):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), 0.5, max_iter=3, line_search_fn="strong_wolfe")

    module = fresh(Quasi)
    trainer("ours", max_epochs=1, limit_train_batches=3).fit(module, loader())
    hvd.check_equal(module)


@own
def plain_backward() -> None:
    """`loss.backward()` in manual optimization, where Lightning asks for `manual_backward`."""

    class PlainBackward(ManualOptimization):
        def propagate(self, loss: Any) -> None:
            loss.backward()

    module = fresh(PlainBackward)
    trainer("ours", max_epochs=1).fit(module, loader())
    hvd.check_equal(module)


@own
def unfrozen_layers() -> None:
    """A backbone that is frozen at first, and given to the optimizer later."""

    class Unfreezes(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(False)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net[2].parameters(), 0.05)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net[0].requires_grad_(True)
                self.trainer.optimizers[0].add_param_group({"params": list(self.net[0].parameters())})

    module = fresh(Unfreezes)
    torch.manual_seed(3)
    before = net()[0].weight.detach().clone()
    trainer("ours", max_epochs=2).fit(module, loader())
    hvd.check_equal(module)
    assert not torch.equal(module.net[0].weight, before)


@contextlib.contextmanager
def captured_log() -> Iterator[list[str]]:
    """The lines that Lightning logs inside this context."""
    lines: list[str] = []
    handler, level = logging.Handler(), rank_zero.log.level
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    rank_zero.log.addHandler(handler)
    rank_zero.log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        rank_zero.log.setLevel(level)
        rank_zero.log.removeHandler(handler)


@own
def learning_rates() -> None:
    """Scaled, with the schedulers, and logged: with scale_lr=True, and with Horovod's strategy name."""
    import lightning_horovod
    from lightning_horovod.__about__ import __version__
    from lightning_horovod.strategy import HorovodStrategy as Theirs

    assert Theirs is lightning_horovod.HorovodStrategy is HorovodStrategy and __version__ == "0.1.0"
    assert issubclass(HorovodStrategy, FarandoleStrategy.__mro__[1])
    for strategy, factor in (
        (FarandoleStrategy(), 1),
        (FarandoleStrategy(scale_lr=True), SIZE),
        (HorovodStrategy(), SIZE),
        (Theirs(), SIZE),
        (Theirs(scale_lr=False), 1),
        ("horovod", SIZE),
        ("farandole", 1),
    ):
        runs = trainer("ours", max_epochs=1, limit_train_batches=1, strategy=strategy)
        with captured_log() as lines:
            runs.fit(fresh(rate=0.01), loader())
        messages = [line for line in lines if "learning rates" in line]
        output = f"learning rates are multiplied by the number of ranks, {SIZE}: 0.01 -> {0.01 * SIZE:g}; "
        assert messages == ([output + "scale_lr=False leaves them"] if factor > 1 and RANK == 0 else []), messages
        assert runs.optimizers[0].param_groups[0]["lr"] == 0.01 * factor, (strategy, factor)
        assert runs.lr_scheduler_configs[0].scheduler.base_lrs == [0.01 * factor]


@own
def progress_bars() -> None:
    """One bar, that of rank 0; both of Lightning's."""
    for bar in (TQDMProgressBar(refresh_rate=1), RichProgressBar(refresh_rate=1)):
        runs = trainer("ours", max_epochs=1, enable_progress_bar=True, callbacks=[bar])
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            runs.fit(fresh(), loader())
        shown = "Epoch 0" in output.getvalue()
        assert shown == (RANK == 0) and (shown or not output.getvalue()), (bar, output.getvalue())


@own
def compressed() -> None:
    """Options of DistributedOptimizer are options of the strategy."""
    for compression in (hvd.Compression.fp16, "bf16"):
        module = fresh()
        trainer("ours", max_epochs=1, strategy=FarandoleStrategy(compression=compression)).fit(module, loader())
        hvd.check_equal(module)


@own
def replaced_loop() -> None:
    class Counting(_FitLoop):
        rounds = 0

        def advance(self) -> None:
            Counting.rounds += 1
            super().advance()

    runs = trainer("ours")
    runs.fit_loop = Counting(runs, max_epochs=3)
    module = fresh()
    runs.fit(module, loader())
    assert Counting.rounds == 3 and runs.fit_loop.epoch_progress.current.completed == 3
    hvd.check_equal(module.net)


@own
def barriers_are_real() -> None:
    """No rank leaves a barrier before the last has reached it; only rank 0 prints."""
    runs = trainer("ours", max_epochs=1)
    assert vars(rank_zero_only)["rank"] == RANK == runs.global_rank and runs.world_size == SIZE
    assert runs.strategy.launcher is None and runs._accelerator_connector.is_distributed
    strategy: Any = runs.strategy
    assert len(strategy.parallel_devices) == SIZE and strategy.root_device == torch.device("cpu")
    runs.fit(fresh(), loader())
    flag = SCRATCH / "everybody"
    if RANK == SIZE - 1:
        time.sleep(0.3)  # sleep: a rank that does not wait for this one has gone on by then
        flag.touch()
    runs.strategy.barrier("test")
    assert flag.exists()
    assert dist.get_backend() == "farandole"


@own
def lightnings_ddp_on_ours() -> None:
    """DDPStrategy itself, with our backend below it, and with our word about who is who."""
    assert dist.get_backend() == "farandole"
    module = fresh(Plain)
    strategy = DDPStrategy(process_group_backend="farandole")
    runs = trainer("ddp", max_epochs=1, strategy=strategy, plugins=[FarandoleEnvironment()])
    assert (runs.global_rank, runs.world_size, strategy.node_rank) == (RANK, SIZE, 0)
    runs.fit(module, ordered(8 * SIZE))
    close(weights(module.net), plain(losses_of_all_ranks()))


@own
def lightnings_model_parallel_on_ours() -> None:
    """ModelParallelStrategy: FSDP2 over a mesh of our ranks."""

    class Sharded(Plain):
        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            for layer in (self.net[0], self.net[2], self.net):
                fully_shard(layer, mesh=mesh)

        def on_train_end(self) -> None:
            self.whole = {name: tensor.full_tensor() for name, tensor in self.net.state_dict().items()}

    strategy = ModelParallelStrategy(data_parallel_size=SIZE, tensor_parallel_size=1, process_group_backend="farandole")
    torch.manual_seed(3)
    module = Sharded()
    trainer("ddp", max_epochs=1, strategy=strategy).fit(module, ordered(8 * SIZE))
    close(module.whole, plain(losses_of_all_ranks()))


@own
def stacks_from_a_file() -> None:
    """What `farandole fit` runs in each rank, with Lightning's strategies on our backend; and what it refuses."""
    own_module = {"class_path": "lightning_own_cases.Rows"}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    application = {"module": own_module, "trainer": {**quiet, "max_epochs": 1, "enable_model_summary": False}}
    orchestration = {"kind": "local", "ranks": SIZE}
    sharded: dict[str, Any] = {"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"}
    sharded["init_args"] = {"data_parallel_size": SIZE, "tensor_parallel_size": 1}
    communication: Any
    nothing: tuple[Any, ...] = ()
    for strategy, name in (("ddp", "DDPStrategy"), (sharded, "ModelParallelStrategy")):
        communication = {"backend": "farandole", "strategy": strategy}
        document = {"communication": communication, "orchestration": orchestration, "application": application}
        Rows.seen = nothing
        fit.train(stack.checked(document), str(SCRATCH))
        assert Rows.seen == (name, "farandole", SIZE, RANK, 2), Rows.seen
    for communication, message in (("nccl", "nccl needs a CUDA GPU"), ({"strategy": "fsdp"}, "requires a GPU")):
        document = {"communication": communication, "orchestration": orchestration, "application": application}
        try:
            fit.train(stack.checked(document), str(SCRATCH))
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"{communication} was taken")


class Rows(Plain):
    """Has its own data, and is sharded where there is a mesh; notes how it was trained."""

    seen: tuple[Any, ...] = ()

    def configure_model(self) -> None:
        if getattr(self, "_device_mesh", None) is not None and self.seen == ():
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def train_dataloader(self) -> Any:
        return ordered(8 * SIZE)

    def on_train_end(self) -> None:
        runs = self.trainer
        Rows.seen = (type(runs.strategy).__name__, dist.get_backend(), runs.world_size, runs.global_rank)
        Rows.seen += (runs.global_step,)


@own
def as_the_extension_says() -> None:
    """The lines of lightning-Horovod's own page, but for model, data and accelerator."""
    from lightning import Trainer

    from lightning_horovod import HorovodStrategy as Theirs

    quiet: dict[str, Any] = {"max_epochs": 1, "logger": False, "enable_progress_bar": False}
    quiet |= {"enable_checkpointing": False, "enable_model_summary": False}
    for runs in (
        Trainer(strategy="horovod", accelerator="auto", devices=1, **quiet),
        Trainer(strategy=Theirs(), **quiet),
    ):
        module = fresh(Plain)
        runs.fit(module, ordered(8 * SIZE))
        assert (runs.world_size, runs.global_step) == (SIZE, 2)
        hvd.check_equal(module)


@own
def the_other_tree() -> None:
    """`pytorch_lightning` is another package with the same classes."""
    import pytorch_lightning as other

    from farandole.lightning import trees

    class Module(other.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        training_step = Plain.training_step
        configure_optimizers = Plain.configure_optimizers

    results = []
    for strategy in ("farandole", trees.strategy("pytorch_lightning")()):
        runs = other.Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        module = fresh(Module)
        runs.fit(module, ordered(8 * SIZE))
        assert runs.world_size == SIZE and isinstance(runs.strategy, other.strategies.ParallelStrategy)
        results.append(weights(module))
    close(*results)


@own
def bad_input() -> None:
    for wrong, message in (
        ({"compresion": None}, "did you mean 'compression'"),
        ({"nonsense": 1}, "its options are accelerator"),
        ({"op": "mean"}, "Average or Sum"),
        ({"compression": "zip"}, "expected one of none, fp16, bf16"),
    ):
        try:
            FarandoleStrategy(**wrong)
        except (TypeError, ValueError) as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"{wrong} was taken")
    runs = trainer("ours", max_epochs=1)
    try:
        runs.strategy.reduce(torch.ones(1), reduce_op="average of all")
    except ValueError as error:
        assert "expected mean" in str(error)


@own
def empty_on_one_rank() -> None:
    """A rank without any batch is an error that says so, on all ranks."""
    count = 0 if RANK == 0 else 8
    numbers = TensorDataset(*(tensor[:count] for tensor in data(8).tensors))
    try:
        trainer("ours", max_epochs=1, use_distributed_sampler=False).fit(fresh(Plain), DataLoader(numbers, 4))
    except ValueError as error:
        assert "no batch at all" in str(error), error
    else:
        raise AssertionError("no error was raised")
