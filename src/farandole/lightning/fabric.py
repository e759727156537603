# The strategy for Lightning Fabric: averages the gradients of modules, and has operations between ranks.
# Touches torch; the rooms bindings.private, operations and torch; the file ranks.
"""`FabricStrategyMixin` has our part. trees.py makes FabricStrategy of it and of Fabric's ParallelStrategy."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ..bindings.private.lightning_names import set_no_sync_control
from ..operations.reductions import Average
from ..torch.compression import Compression
from .ranks import Ranks, broadcast_parameters_from_rank_0


class FabricStrategyMixin(Ranks):
    """One process per device; gradients are averaged while `fabric.backward` computes them.

    `compression`, `op` and `gradient_predivide_factor` are those of `farandole.torch.DistributedOptimizer`.
    """

    def __init__(
        self, accelerator: Any = None, parallel_devices: Any = None, checkpoint_io: Any = None, precision: Any = None,
        *, compression: Any = Compression.none, op: Any = Average, gradient_predivide_factor: float = 1.0,
        **unknown: Any,
    ) -> None:  # fmt: skip
        base: Any = super()
        base.__init__(
            accelerator=accelerator, parallel_devices=parallel_devices, checkpoint_io=checkpoint_io, precision=precision
        )
        options = {"compression": compression, "op": op, "gradient_predivide_factor": gradient_predivide_factor}
        self._begin(options, unknown)
        set_no_sync_control(self, NoSync(self))

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Returns the module with the parameters of rank 0. From now on its gradients are reduced."""
        broadcast_parameters_from_rank_0(module)
        self._reducer.watch(module.named_parameters())
        return module

    def module_to_device(self, module: torch.nn.Module) -> None:
        """Moves the module to this rank's device."""
        module.to(self.root_device)

    def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Runs backward. Afterwards the gradients are reduced over all ranks."""
        base: Any = super()
        base.backward(tensor, module, *args, **kwargs)
        self._reducer.synchronize(all_groups=False)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean, sum, max or min of the tensors of all ranks, in place."""
        return self._reduced(tensor, group, reduce_op)

    @property
    def no_sync(self) -> Any:
        """A context in which each rank accumulates its gradients and sends nothing."""
        return self._reducer.no_sync()


class NoSync:
    """The object that `fabric.no_backward_sync` calls."""

    def __init__(self, strategy: FabricStrategyMixin) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> Any:
        """A context in which each rank accumulates its gradients and sends nothing."""
        return self._strategy.no_sync if enabled else contextlib.nullcontext()
