# TorchState: models, optimizers, samplers and plain objects that survive the loss of ranks.
# Touches torch, elastic/state, functions, copies, sampler, loader, shards and runtime.
"""A handler for each kind of value saves, restores and broadcasts it. Scripts may add their own handlers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ...elastic.mirror import RandomState
from ...elastic.state import ObjectState
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


class StateHandler:
    """How a value of one kind is saved in memory, restored, and sent from rank 0 to the others."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Saves a copy."""
        raise NotImplementedError

    def restore(self) -> None:
        """Returns to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Takes the value of rank 0."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Replaces the object and saves the new one."""
        self.value = value
        self.save()


class _CopyingHandler(StateHandler):
    """Saves `value.state_dict()`."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.copy = Copy()
        self.save()

    def save(self) -> None:
        self.copy = self.copy.take(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self.copy.tree(fresh=True))

    def load(self, tree: Any) -> None:
        """Loads the part of a checkpoint."""
        self.value.load_state_dict(tree)


class ModelStateHandler(_CopyingHandler):
    """Parameters and buffers of a module."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)

    def restore(self) -> None:
        """Copies the values back into the module's own tensors."""
        self.value.load_state_dict(self.copy.tree())

    def sync(self) -> None:
        """Takes the values of rank 0, in place."""
        state = self.value.state_dict()
        broadcast_parameters({name: item for name, item in state.items() if isinstance(item, torch.Tensor)}, 0)
        rest = {name: item for name, item in state.items() if not isinstance(item, torch.Tensor)}
        if rest:
            self.value.load_state_dict(broadcast_object(rest, 0, "elastic.model"), strict=False)


class OptimizerStateHandler(_CopyingHandler):
    """State and options of an optimizer."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)

    def restore(self) -> None:
        """Also removes gradients: they belong to a step that did not finish."""
        super().restore()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Removes all gradients, also pending ones."""
        gradients = getattr(self.value, "_gradients", None)
        if gradients is not None:
            with contextlib.suppress(Exception):  # a failure belongs to the old world
                gradients.drain()
        for group in self.value.param_groups:
            for param in group["params"]:
                param.grad = None

    def sync(self) -> None:
        """Takes the state and options of rank 0."""
        broadcast_optimizer_state(self.value, 0)


class ShardedOptimizerStateHandler(OptimizerStateHandler):
    """Options of an optimizer whose state is divided among the ranks. That state is in `shards`."""

    def __init__(self, value: Any) -> None:
        if value._gradients.process_set is not global_process_set:
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
        """Also removes the gradients of the model's parameters."""
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
        """Takes the options of rank 0."""
        self.load(broadcast_object(self.value.options(), 0, "elastic.options"))

    def set_value(self, value: Any) -> None:
        self.shards.optimizer = value
        super().set_value(value)


class _SmallStateHandler(_CopyingHandler):
    """State that is sent with pickle. Schedulers and scalers themselves cannot be: they refer to the optimizer."""

    def sync(self) -> None:
        """Takes the state of rank 0."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), 0, "elastic.state"))


class SamplerStateHandler(_SmallStateHandler):
    """The position of a sampler or loader, which continues from there with the current ranks."""

    def __init__(self, sampler: Any) -> None:
        super().__init__(sampler)


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (ShardedSteps, ShardedOptimizerStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (ElasticDataLoader, SamplerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, _SmallStateHandler),
    (torch.amp.GradScaler, _SmallStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Pairs of a class and the handler for its objects; the first pair that fits is used."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replaces the pairs."""
    global _registry
    _registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)


class TorchState(ObjectState):
    """`TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)`: what an elastic script commits.

    Modules, optimizers, ElasticSamplers, ElasticDataLoaders, learning rate schedulers and GradScalers are saved by
    their state, everything else by value. A new object for one of the former is saved when it is assigned.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        kwargs = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: _handler_of(value) for name, value in kwargs.items()}
        self._handlers = {name: handler for name, handler in handlers.items() if handler is not None}
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        plain = {name: value for name, value in kwargs.items() if name not in self._handlers}
        for name, handler in self._handlers.items():
            if isinstance(handler, ShardedOptimizerStateHandler):
                plain[f"{name}.shards"] = handler.shards
        self._hooks: list[Any] = []
        super().__init__(broadcast_object, rank, **plain)
        self._follow_steps()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_handlers", ()):  # a subclass may set its own attributes before they exist
            self._handlers[name].set_value(value)
            self._follow_steps()

    def _follow_steps(self) -> None:
        """A loader's batch counts when an optimizer has stepped: then the model contains it."""
        for hook in self._hooks:
            hook.remove()
        loaders = self._values(ElasticDataLoader)
        optimizers = self._values(torch.optim.Optimizer) if loaders else []

        def stepped(*_: Any) -> None:
            for loader in loaders:
                loader.stepped()

        self._hooks = [optimizer.register_step_post_hook(stepped) for optimizer in optimizers]
        for loader in loaders if optimizers else []:
            loader.follow_steps()

    def _values(self, kind: type) -> list[Any]:
        return [handler.value for handler in self._handlers.values() if isinstance(handler.value, kind)]

    def save(self) -> None:
        """Keeps a copy in this rank's memory."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Returns to the last copy."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Copies the present state of rank 0 to every rank."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Divides the remaining samples among the current ranks, and removes the gradients of an unfinished step."""
        for handler in self._handlers.values():
            if isinstance(handler, OptimizerStateHandler):
                handler.forget_gradients()
        for source in (*self._values(ElasticSampler), *self._values(ElasticDataLoader)):
            source.reset()

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
    """The random generators of Python, NumPy and torch, one set for each rank number."""

    def capture(self) -> Any:
        """The states of the generators."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return super().capture(), torch.get_rng_state(), cuda

    def set(self, value: Any) -> None:
        """Sets the generators to the result of `capture`."""
        super().set(value[0])
        torch.set_rng_state(value[1])
        if value[2]:
            torch.cuda.set_rng_state_all(value[2])
