# The strategy for Lightning's Trainer: its hooks around backward passes, steps, data and buffers.
# Touches torch; operations, world and other files of this room; Lightning only through its base class.
"""FarandoleStrategy derives from `TrainerRanks` and then from Lightning's ParallelStrategy (see trees.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..base.named import module_of
from ..bindings.private.lightning_names import layer_sync
from ..operations.reductions import Average
from ..torch.compression import Compression
from ..torch.ops import allreduce_
from ..world.runtime import runtime
from . import elastic, normalisation
from .ranks import Ranks, broadcast_buffers_from_rank_0, broadcast_parameters_from_rank_0
from .uneven import PaddedLoader, padded

FITTING = "fit"


class TrainerRanks(Ranks):
    """One process per device; gradients are averaged while backward computes them.

    `compression`, `op` and `gradient_predivide_factor` are those of `farandole.torch.DistributedOptimizer`.
    `scale_lr=True` multiplies learning rates by the number of ranks.
    """

    strategy_name = "farandole"
    scales_by_default = False

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        *,
        scale_lr: bool | None = None,
        compression: Any = Compression.none,
        op: Any = Average,
        gradient_predivide_factor: float = 1.0,
        **unknown: Any,
    ) -> None:
        base: Any = super()
        base.__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        options = {"compression": compression, "op": op, "gradient_predivide_factor": gradient_predivide_factor}
        self._begin(options, unknown)
        self.scale_lr = self.scales_by_default if scale_lr is None else scale_lr
        self._normalised: list[Any] = []
        self._padded_loaders: list[PaddedLoader] = []
        self._data_loader: elastic.DataLoaderAdapter | None = None
        self._groups: list[tuple[Any, Any, int]] = []  # optimizer, its gradients, how many parameters it had

    # Attributes that Lightning sets.
    model: Any
    lightning_module: Any
    optimizers: list[Any]
    lr_scheduler_configs: list[Any]
    precision_plugin: Any

    # --- before training ---------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Makes the models of all ranks equal, sets up optimizers, and starts to reduce gradients."""
        self._fitting = trainer.state.fn == FITTING
        base: Any = super()
        base.setup(trainer)
        if self._fitting:
            self._watch()

    def model_to_device(self) -> None:
        """Moves the model to this rank's device and makes it equal on all ranks. `setup` changes it before this."""
        self.model.to(self.root_device)
        sync = layer_sync(self) if self._fitting else None
        if type(sync).__name__ == "TorchSyncBatchNorm":
            self._normalised = normalisation.convert(self.model)
        elif sync is not None:
            self.model = sync.apply(self.model)
        broadcast_parameters_from_rank_0(self.model)

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the module's optimizers; with `scale_lr` multiplies learning rates by the number of ranks."""
        base: Any = super()
        base.setup_optimizers(trainer)
        size = runtime.world.engine.size
        if not self.scale_lr or size == 1:
            return
        changes = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                changes.append(f"{group['lr']:g} -> {group['lr'] * size:g}")
                group["lr"] *= size
                if "initial_lr" in group:
                    group["initial_lr"] *= size
        for config in self.lr_scheduler_configs:
            if hasattr(config.scheduler, "base_lrs"):
                config.scheduler.base_lrs = [rate * size for rate in config.scheduler.base_lrs]
        words = ", ".join(dict.fromkeys(changes))
        self._say(f"learning rates are multiplied by the number of ranks, {size}: {words}; scale_lr=False leaves them")

    def _say(self, text: str) -> None:
        module_of(f"{self.tree}.utilities.rank_zero").rank_zero_info(text)

    def _watch(self) -> None:
        names = {param: name for name, param in self.lightning_module.named_parameters()}
        self._reducer.forget()
        self._groups = []
        for optimizer in self.optimizers:
            params = _params(optimizer)
            named = [(names.get(param, f"optimizer.{index}"), param) for index, param in enumerate(params)]
            self._groups.append((optimizer, self._reducer.watch(named), len(params)))
        # Parameters without an optimizer may get one later, for example when a callback unfreezes a backbone.
        rest = [(name, param) for param, name in names.items() if param.requires_grad]
        self._reducer.watch(rest)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Adds parameters that optimizers got since the last batch."""
        for index, (optimizer, gradients, count) in enumerate(self._groups):
            params = _params(optimizer)
            if len(params) == count:
                continue
            names = {param: name for name, param in self.lightning_module.named_parameters()}
            new = [(names.get(param, f"optimizer.{at}"), param) for at, param in enumerate(params)]
            gradients = self._reducer.watch(new) or gradients
            self._groups[index] = (optimizer, gradients, len(params))

    def process_dataloader(self, dataloader: Any) -> Any:
        """Pads the loader, so that all ranks have the same number of batches. Elastic jobs get an elastic loader."""
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        if elastic.callback_of(trainer) is not None:
            self._data_loader = elastic.loader(dataloader, trainer)
            return self._data_loader
        loader = padded(dataloader)
        if isinstance(loader, PaddedLoader):
            self._padded_loaders.append(loader)
        return loader

    # --- a step ------------------------------------------------------------------------------------------------------

    @property
    def _idle(self) -> bool:
        """Whether this rank has no batch left while other ranks have."""
        return bool(self._padded_loaders) and all(loader.idle for loader in self._padded_loaders)

    @property
    def _weight(self) -> float:
        """The weight of this rank's batch: a rank may have fewer samples than others, or none."""
        if self._data_loader is not None:
            return self._data_loader.weight
        return 0.0 if self._idle else 1.0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's step. A rank without a batch computes nothing, except in manual optimization."""
        if self._idle and self.lightning_module.automatic_optimization:
            return torch.zeros((), device=self.root_device, requires_grad=True)  # it does not depend on any parameter
        base: Any = super()
        return base.training_step(*args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs backward. Gradients are reduced before the hooks of users, clipping and precision see them."""
        module, precision = self.lightning_module, self.precision_plugin
        weight = self._weight
        if weight != 1.0:
            closure_loss = closure_loss * weight
        closure_loss = precision.pre_backward(closure_loss, module)
        precision.backward(closure_loss, module, optimizer, *args, **kwargs)
        self._reducer.synchronize(all_groups=module.automatic_optimization)
        whole: torch.Tensor = precision.post_backward(closure_loss, module)
        return whole

    def block_backward_sync(self) -> Any:
        """A context in which each rank accumulates its gradients and sends nothing."""
        return self._reducer.no_sync()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Runs the optimizer's step. After each call of the closure all ranks have the same gradients."""
        if not self.lightning_module.automatic_optimization and self._reducer.pending(_params(optimizer)):
            self._reducer.synchronize(all_groups=False)  # the module called loss.backward() instead of manual_backward

        def run() -> Any:
            loss = closure()
            if isinstance(optimizer, torch.optim.LBFGS) and loss is not None:
                # The optimizer decides by the loss how often it calls this, so all ranks must get the same loss.
                return allreduce_(torch.as_tensor(loss).detach().clone(), name="lightning.loss", op=Average)
            return loss

        base: Any = super()
        return base.optimizer_step(optimizer, run, model, **kwargs)

    # --- between ranks -----------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean, sum, max or min of the tensors of all ranks, in place."""
        return self._reduced(tensor, group, reduce_op)

    def on_validation_start(self) -> None:
        """Sends rank 0's buffers, so that all ranks validate the same model, which is also the one that is saved."""
        broadcast_buffers_from_rank_0(self.lightning_module)

    on_test_start = on_predict_start = on_validation_start

    # --- checkpoints and the end -------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> Any:
        """Loads a checkpoint from a file, or the last commit of an elastic job from memory."""
        commit = elastic.last_commit(checkpoint_path)
        if commit is not None:
            return commit
        base: Any = super()
        return base.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def teardown(self) -> None:
        """Releases the model."""
        self._reducer.forget()
        self._groups = []
        self._padded_loaders, self._data_loader = [], None
        normalisation.revert(self._normalised)
        self._normalised = []
        base: Any = super()
        base.teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Does nothing: registration.py has registered them already."""


class HorovodRanks(TrainerRanks):
    """`strategy="horovod"`, `lightning_horovod.HorovodStrategy`: scales learning rates, unless `scale_lr=False`."""

    strategy_name = "horovod"
    scales_by_default = True


def _params(optimizer: Any) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
