# Elastic training with Lightning's Trainer: commits, a fit that is started again, and data that is distributed again.
# Touches the rooms base, elastic, operations, torch and world; Lightning only through the trainer that it gets.
"""A commit is a checkpoint of Lightning in memory. After a change of ranks every rank resumes from the last commit."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from ..base.errors import HorovodInternalError, HostsUpdatedInterrupt
from ..bindings.private import lightning_names
from ..elastic.loop import run
from ..elastic.state import State
from ..operations.objects import broadcast_object
from ..torch.elastic.loader import ElasticDataLoader
from ..world.basics import rank
from ..world.runtime import runtime

MEMORY = "the last commit in memory"  # used as the path of a checkpoint
_current: list[FitState] = []  # the state of the fit that runs in this process


class Elastic:
    """With it `Trainer.fit` continues when ranks are lost or join, in a job of `farandole run --min-np ...`.

    Each rank commits its state to memory every `every_n_steps` steps. After a loss all ranks continue from the last
    commit, also inside an epoch: each sample is used exactly once. In other jobs the callback does nothing.
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps}: expected at least 1")
        self.every_n_steps = every_n_steps
        self._due = False  # a commit must be made at the start of the next epoch

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Makes the first commit, so that there is one from the start."""
        if _current and _current[-1].kept is None:
            _current[-1].commit()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Sets the length of the epoch, which depends on the present number of ranks."""
        loop = trainer.fit_loop
        for loader_of_ranks in _loaders(trainer):
            loader_of_ranks.set_epoch(trainer.current_epoch)
            lightning_names.take_length(loop, len(loader_of_ranks))
            if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
                trainer.val_check_batch = max(1, int(len(loader_of_ranks) * trainer.val_check_interval))
        if _current and self._due:
            self._due = False
            _current[-1].commit()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Commits every few steps, but not while gradients are accumulated.

        After the last batch of an epoch there are still validation, schedulers and checkpoints, and Lightning cannot
        resume between them. So that commit is made at the start of the next epoch.
        """
        if not _current or lightning_names.accumulates(trainer.fit_loop):
            return
        if trainer.global_step % self.every_n_steps == 0:
            self._due = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            if not self._due:
                _current[-1].commit()


class FitState(State):
    """The state of a fit: a checkpoint of Lightning, and the versions of its loggers."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(lambda value: broadcast_object(value, 0), rank)
        self.trainer = trainer
        self.kept: Any = None

    def save(self) -> None:
        """Keeps a copy in the host's memory."""
        whole = lightning_names.checkpoint(self.trainer)
        _not_begun(whole["loops"]["fit_loop"])
        versions = [getattr(logger, "version", None) for logger in self.trainer.loggers]
        self.kept = _copied(whole), versions

    def restore(self) -> None:
        """Does nothing: the next attempt loads the last copy."""

    def sync(self) -> None:
        """Sends the state of rank 0 to every rank."""
        self._commits, self.kept = self._bcast_object((self._commits, self.kept))

    def take_up(self) -> Any:
        """The checkpoint for Lightning to load. Loggers continue their run, even if rank 0 is another process now."""
        whole, versions = self.kept
        for logger, version in zip(self.trainer.loggers, versions, strict=True):
            lightning_names.go_on_with(logger, version)
        return copy.deepcopy(whole)


def _not_begun(loop: dict[str, Any]) -> None:
    """Changes a checkpoint that was made in the first hook of an epoch: it is then one between two epochs."""
    epochs = loop["epoch_progress"].values()
    if any(counts["ready"] == counts["started"] + 1 for counts in epochs):
        for counts in epochs:
            counts["ready"] = counts["started"]
        batches = loop["epoch_loop.batch_progress"]
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return copy.deepcopy(value)


def callback_of(trainer: Any) -> Any:
    """The trainer's ElasticCallback; None without one, and in a job that is not elastic."""
    if not runtime.initialized or not runtime.config.elastic:
        return None
    return next((callback for callback in trainer.callbacks if isinstance(callback, Elastic)), None)


def last_commit(path: Any) -> Any:
    """The last commit if `path` is MEMORY, else None."""
    return _current[-1].take_up() if _current and path == MEMORY else None


def fit(trainer: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs Lightning's fit. Runs it again from the last commit when ranks were lost or joined."""
    lightning_names.check_trainer(trainer)
    state = FitState(trainer)

    def attempt(state: FitState) -> Any:
        call = inspect.signature(function).bind(*args, **kwargs)
        if state.kept is not None:
            call.arguments["ckpt_path"] = MEMORY
            call.arguments["weights_only"] = False
        try:
            return function(*call.args, **call.kwargs)
        except (dist.DistBackendError, HorovodInternalError, HostsUpdatedInterrupt) as error:
            _abandon(trainer)
            raise _reason(error) from None

    _current.append(state)
    try:
        return run(attempt)(state)
    finally:
        _current.pop()


def _reason(error: BaseException) -> BaseException:
    """The error of Farandole that torch.distributed has wrapped."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, (HorovodInternalError, HostsUpdatedInterrupt)):
            return inner
        inner = inner.__cause__
    return error


def _abandon(trainer: Any) -> None:
    """Resets the trainer as if the fit had not begun. Its progress is in the commit."""
    for loader_of_ranks in _loaders(trainer):
        loader_of_ranks.reset()
    with contextlib.suppress(Exception):
        lightning_names.forget_fit(trainer)
    trainer.training = True


# --- data ------------------------------------------------------------------------------------------------------------


class DataLoaderAdapter:
    """An ElasticDataLoader for Lightning: the length of an epoch includes the batches that are done."""

    def __init__(self, loader: ElasticDataLoader) -> None:
        self.loader = loader
        self.done = 0
        self._length = len(loader)

    @property
    def weight(self) -> float:
        """The weight of this rank's batch compared with the batches of other ranks."""
        return self.loader.weight

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self.done += 1
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Starts an epoch, unless the loader is in this epoch already."""
        if epoch != self.loader.epoch:
            self.loader.set_epoch(epoch)
            self.done = 0
        self._length = self.done + len(self.loader)

    def reset(self) -> None:
        """Stops the iteration that runs."""
        self.loader.reset()

    def state_dict(self) -> dict[str, Any]:
        """The epoch, how many of its samples are done, and how many batches."""
        return {**self.loader.state_dict(), "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from that state with the present ranks."""
        self.loader.load_state_dict({"epoch": state["epoch"], "cursor": state["cursor"]})
        self.done = state["done"]
        self._length = self.done + len(self.loader)


def _loaders(trainer: Any) -> list[DataLoaderAdapter]:
    return [one for one in lightning_names.loaders(trainer.fit_loop) if isinstance(one, DataLoaderAdapter)]


def loader(dataloader: Any, trainer: Any) -> DataLoaderAdapter:
    """A loader of the same data for the present ranks. It continues at the position of the commit."""
    sampler = getattr(dataloader, "sampler", None)
    if not isinstance(sampler, (DistributedSampler, RandomSampler, SequentialSampler)):
        raise ValueError(
            "with ElasticCallback the training data comes from a DataLoader over a map-style dataset, with its usual "
            f"samplers; {type(sampler or dataloader).__name__} cannot be distributed again when the ranks change"
        )
    options = {
        name: getattr(dataloader, name)
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    }
    made = ElasticDataLoader(
        dataloader.dataset,
        dataloader.batch_size,
        shuffle=getattr(sampler, "shuffle", isinstance(sampler, RandomSampler)),
        seed=getattr(sampler, "seed", 0),
        virtual_size=0,
        **options,
    )
    loader_of_ranks = DataLoaderAdapter(made)
    states = lightning_names.loader_states(trainer.fit_loop)
    if states:  # now, because Lightning asks for the length before it loads the state
        loader_of_ranks.load_state_dict(states[0])
    return loader_of_ranks
