# TorchState: models, optimizers, samplers and plain objects of an elastic job, which can return to the last commit.
# Touches torch; the rooms elastic, torch.functions, torch.sharded_optimizer and world; other files of this room.
"""Each kind of value has a handler that saves, restores and broadcasts it. Scripts may add handlers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ...elastic.mirror import RandomState
from ...elastic.state import ObjectState, Restorable
from ...world.basics import rank
from ...world.groups import global_process_set
from ..functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from ..sharded_optimizer import ShardedSteps
from .copies import Copy
from .loader import ElasticDataLoader
from .sampler import ElasticSampler
from .shards import OptimizerShards

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchRandomState",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class StateHandler(Restorable):
    """Saves one value in memory, restores it, and sends it from rank 0 to the other ranks."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def set_value(self, value: Any) -> None:
        """Handles another object from now on, and saves it."""
        self.value = value
        self.save()


class _CopyingHandler(StateHandler):
    """Saves and restores a value by its `state_dict()`."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.copy = Copy()
        self.save()

    def save(self) -> None:
        self.copy = self.copy.take(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self.copy.tree(fresh=True))

    def load(self, tree: Any) -> None:
        """Loads what a checkpoint has for this value."""
        self.value.load_state_dict(tree)


class ModelStateHandler(_CopyingHandler):
    """Handles the parameters and buffers of a module."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)

    def restore(self) -> None:
        """Copies the saved values into the tensors of the module."""
        self.value.load_state_dict(self.copy.tree())

    def sync(self) -> None:
        """Copies the values of rank 0 into the tensors of the module."""
        state = self.value.state_dict()
        broadcast_parameters({name: item for name, item in state.items() if isinstance(item, torch.Tensor)}, 0)
        rest = {name: item for name, item in state.items() if not isinstance(item, torch.Tensor)}
        if rest:
            self.value.load_state_dict(broadcast_object(rest, 0, "elastic.model"), strict=False)


class OptimizerStateHandler(_CopyingHandler):
    """Handles the state and the options of an optimizer."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)

    def restore(self) -> None:
        """Restores the optimizer, and removes the gradients of the step that was interrupted."""
        super().restore()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Removes all gradients, also those whose allreduce is pending."""
        gradients = getattr(self.value, "_gradients", None)
        if gradients is not None:
            with contextlib.suppress(Exception):  # a failure concerns only operations with the former ranks
                gradients.drain()
        for group in self.value.param_groups:
            for param in group["params"]:
                param.grad = None

    def sync(self) -> None:
        """Gives the optimizer the state and options of rank 0."""
        broadcast_optimizer_state(self.value, 0)


class ShardedOptimizerStateHandler(OptimizerStateHandler):
    """Handles the options of an optimizer whose state is divided among the ranks; `shards` handles the state."""

    def __init__(self, value: Any) -> None:
        if value._gradients.terms.process_set is not global_process_set:
            raise ValueError("elastic state takes an optimizer with shard_optimizer_state=True over all ranks only")
        self.shards = OptimizerShards(value)
        super().__init__(value)

    def save(self) -> None:
        self.copy = self.copy.take(self.value.options())

    def restore(self) -> None:
        """Restores the options; `shards` restores the state."""
        self.load(self.copy.tree(fresh=True))
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Removes the gradients of the shares and those of the model's parameters."""
        super().forget_gradients()
        self.value.zero_grad()

    def load(self, tree: Any) -> None:
        """Loads the options."""
        if not isinstance(tree, list) or len(tree) != len(self.value.param_groups):
            raise ValueError(
                "the checkpoint was not saved with this optimizer and shard_optimizer_state=True; load it with an "
                "optimizer as it was then"
            )
        for group, options in zip(self.value.param_groups, tree, strict=True):
            group.update(options)

    def sync(self) -> None:
        """Gives the optimizer the options of rank 0."""
        self.load(broadcast_object(self.value.options(), 0, "elastic.options"))

    def set_value(self, value: Any) -> None:
        self.shards.optimizer = value
        super().set_value(value)


class _PickledStateHandler(_CopyingHandler):
    """Sends `value.state_dict()` with pickle. `value` itself cannot be sent, if it refers to the optimizer."""

    def sync(self) -> None:
        """Gives the value the state of rank 0."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), 0, "elastic.state"))


class SamplerStateHandler(_PickledStateHandler):
    """Handles the position of a sampler or loader. After a restore, the current ranks continue from this position."""

    def __init__(self, sampler: Any) -> None:
        super().__init__(sampler)


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (ShardedSteps, ShardedOptimizerStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (ElasticDataLoader, SamplerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, _PickledStateHandler),
    (torch.amp.GradScaler, _PickledStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Pairs of a class and the handler for its objects; the first pair that fits is used."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replaces the list of pairs that `get_handler_registry` returns."""
    global _registry
    _registry = registry


def _make_handler(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)


class TorchState(ObjectState):
    """The state that an elastic script commits: `TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)`.

    It saves the state of modules, optimizers, ElasticSamplers, ElasticDataLoaders, learning rate schedulers and
    GradScalers, and a copy of any other object. If the script assigns a new module, optimizer or other object of these
    classes to an attribute, the new object is saved at once.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        kwargs = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: _make_handler(value) for name, value in kwargs.items()}
        self._handlers = {name: handler for name, handler in handlers.items() if handler is not None}
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        plain = {name: value for name, value in kwargs.items() if name not in self._handlers}
        for name, handler in self._handlers.items():
            if isinstance(handler, ShardedOptimizerStateHandler):
                plain[f"{name}.shards"] = handler.shards
        self._hooks: list[Any] = []
        super().__init__(broadcast_object, rank, **plain)
        self._report_steps_to_loaders()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_handlers", ()):  # a subclass may set attributes before `_handlers` exists
            self._handlers[name].set_value(value)
            self._report_steps_to_loaders()

    def _report_steps_to_loaders(self) -> None:
        """Makes optimizers report their steps to the loaders: a batch is done when an optimizer has stepped."""
        for hook in self._hooks:
            hook.remove()
        loaders = self._values_of(ElasticDataLoader)
        optimizers = self._values_of(torch.optim.Optimizer) if loaders else []

        def report(*_: Any) -> None:
            for loader in loaders:
                loader.stepped()

        self._hooks = [optimizer.register_step_post_hook(report) for optimizer in optimizers]
        for loader in loaders if optimizers else []:
            loader.follow_steps()

    def _values_of(self, kind: type) -> list[Any]:
        return [handler.value for handler in self._handlers.values() if isinstance(handler.value, kind)]

    def save(self) -> None:
        """Keeps a copy of all values in this rank's memory."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Gives all values the contents of the last copy."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Sends the present state of rank 0 to every rank."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Divides the remaining samples among the current ranks, and removes the gradients of an interrupted step."""
        for handler in self._handlers.values():
            if isinstance(handler, OptimizerStateHandler):
                handler.forget_gradients()
        for sampler_or_loader in (*self._values_of(ElasticSampler), *self._values_of(ElasticDataLoader)):
            sampler_or_loader.reset()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _copies(self) -> dict[str, Copy]:
        return {name: handler.copy for name, handler in self._handlers.items() if isinstance(handler, _CopyingHandler)}

    def _saved_tree(self) -> dict[str, Any]:
        return {**super()._saved_tree(), **{name: copy.tree() for name, copy in self._copies().items()}}

    def _load_tree(self, tree: dict[str, Any]) -> None:
        for name, value in tree.items():
            handler = self._handlers.get(name)
            if isinstance(handler, _CopyingHandler):
                handler.load(value)
        super()._load_tree({name: value for name, value in tree.items() if name not in self._handlers})

    def _pin(self) -> Callable[[], None]:
        copies = list(self._copies().values())
        for copy in copies:
            copy.pin()

        def release() -> None:
            for copy in copies:
                copy.release()

        return release

    def _saved_bytes(self) -> int:
        return super()._saved_bytes() + sum(copy.bytes() for copy in self._copies().values())


class TorchRandomState(RandomState):
    """The states of the random generators of Python, NumPy and torch; each rank number has its own."""

    def capture(self) -> Any:
        """Returns the states of this process's generators."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return super().capture(), torch.get_rng_state(), cuda

    def set(self, value: Any) -> None:
        """Sets this process's generators to states that `capture` returned."""
        super().set(value[0])
        torch.set_rng_state(value[1])
        if value[2]:
            torch.cuda.set_rng_state_all(value[2])
