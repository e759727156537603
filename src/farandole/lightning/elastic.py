# Elastic training with Lightning's Trainer: what is committed, the fit that begins again, data dealt anew.
# Touches elastic/loop and elastic/state, torch/elastic/loader, runtime; Lightning only through the trainer at hand.
"""A commit is a checkpoint of Lightning's in memory. After a change of ranks every rank resumes from the last one."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from ..elastic.loop import run
from ..elastic.state import State
from ..errors import HorovodInternalError, HostsUpdatedInterrupt
from ..objects import broadcast_object
from ..private import lightning_names
from ..runtime import rank, runtime
from ..torch.elastic.loader import ElasticDataLoader

MEMORY = "the last commit in memory"  # instead of the path of a checkpoint
_current: list[FitState] = []  # of the fit that is running in this process


class Elastic:
    """Lets `Trainer.fit` go on when ranks are lost or come, in a job of `farandole run --min-np ...`.

    Every `every_n_steps` steps the state is committed to the memory of each rank. After a loss all go back to the last
    commit, in the middle of an epoch too: no sample is left out, none counts twice. In other jobs it does nothing.
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps}: expected at least 1")
        self.every_n_steps = every_n_steps
        self._due = False  # a commit, at the beginning of the next epoch

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """There is something to go back to from the beginning."""
        if _current and _current[-1].kept is None:
            _current[-1].commit()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """An epoch has as many batches as the ranks that are there now make of it."""
        loop = trainer.fit_loop
        for dealt in _loaders(trainer):
            dealt.set_epoch(trainer.current_epoch)
            lightning_names.take_length(loop, len(dealt))
            if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
                trainer.val_check_batch = max(1, int(len(dealt) * trainer.val_check_interval))
        if _current and self._due:
            self._due = False
            _current[-1].commit()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Commits now and then, never between gradients that add up.

        After the last batch of an epoch validation, schedulers and checkpoints are still to come, and Lightning cannot
        resume in between: that commit waits for the next epoch.
        """
        if not _current or lightning_names.accumulates(trainer.fit_loop):
            return
        if trainer.global_step % self.every_n_steps == 0:
            self._due = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            if not self._due:
                _current[-1].commit()


class FitState(State):
    """What a fit has reached: a checkpoint of Lightning's, and which runs its loggers write."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(lambda value: broadcast_object(value, 0), rank)
        self.trainer = trainer
        self.kept: Any = None

    def save(self) -> None:
        """Keeps a copy in the memory of the host."""
        whole = lightning_names.checkpoint(self.trainer)
        _not_begun(whole["loops"]["fit_loop"])
        versions = [getattr(logger, "version", None) for logger in self.trainer.loggers]
        self.kept = _copied(whole), versions

    def restore(self) -> None:
        """The next attempt loads what is kept."""

    def sync(self) -> None:
        """Gives every rank rank 0's."""
        self._commits, self.kept = self._bcast_object((self._commits, self.kept))

    def take_up(self) -> Any:
        """The checkpoint, for Lightning to load; loggers go on with their run, whoever is rank 0 now."""
        whole, versions = self.kept
        for logger, version in zip(self.trainer.loggers, versions, strict=True):
            lightning_names.go_on_with(logger, version)
        return copy.deepcopy(whole)


def _not_begun(loop: dict[str, Any]) -> None:
    """A commit in the first hook of an epoch is one between two epochs."""
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
    """The trainer's ElasticCallback; None without one, and where ranks do not come and go."""
    if not runtime.initialized or not runtime.world.config.elastic:
        return None
    return next((callback for callback in trainer.callbacks if isinstance(callback, Elastic)), None)


def kept(path: Any) -> Any:
    """The checkpoint that the name of the memory stands for."""
    return _current[-1].take_up() if _current and path == MEMORY else None


def fit(trainer: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs Lightning's fit, and again from the last commit when ranks were lost or came."""
    lightning_names.look_at(trainer)
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
    """What torch.distributed has wrapped."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, (HorovodInternalError, HostsUpdatedInterrupt)):
            return inner
        inner = inner.__cause__
    return error


def _abandon(trainer: Any) -> None:
    """Leaves the trainer as if the fit had not begun; what it has reached is in the commit."""
    for dealt in _loaders(trainer):
        dealt.reset()
    with contextlib.suppress(Exception):
        lightning_names.forget_fit(trainer)
    trainer.training = True


# --- data ------------------------------------------------------------------------------------------------------------


class Dealt:
    """An ElasticDataLoader as Lightning wants it: an epoch's length counts the batches that are done."""

    def __init__(self, loader: ElasticDataLoader) -> None:
        self.loader = loader
        self.done = 0
        self._length = len(loader)

    @property
    def weight(self) -> float:
        """How much this rank's batch counts, beside those of the others."""
        return self.loader.weight

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self.done += 1
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """The beginning of an epoch, unless it is in it."""
        if epoch != self.loader.epoch:
            self.loader.set_epoch(epoch)
            self.done = 0
        self._length = self.done + len(self.loader)

    def reset(self) -> None:
        """Ends what is under way."""
        self.loader.reset()

    def state_dict(self) -> dict[str, Any]:
        """The epoch, how many of its samples are done, and in how many batches."""
        return {**self.loader.state_dict(), "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there, with the ranks that are there now."""
        self.loader.load_state_dict({"epoch": state["epoch"], "cursor": state["cursor"]})
        self.done = state["done"]
        self._length = self.done + len(self.loader)


def _loaders(trainer: Any) -> list[Dealt]:
    return [one for one in lightning_names.loaders(trainer.fit_loop) if isinstance(one, Dealt)]


def loader(dataloader: Any, trainer: Any) -> Dealt:
    """The same data, dealt to the ranks that are there; it stands where the commit left it."""
    sampler = getattr(dataloader, "sampler", None)
    if not isinstance(sampler, (DistributedSampler, RandomSampler, SequentialSampler)):
        raise ValueError(
            "with ElasticCallback the training data comes from a DataLoader over a map-style dataset, with its usual "
            f"samplers; {type(sampler or dataloader).__name__} cannot be dealt anew when ranks come and go"
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
    dealt = Dealt(made)
    states = lightning_names.loader_states(trainer.fit_loop)
    if states:  # now: Lightning asks for the length before it loads
        dealt.load_state_dict(states[0])
    return dealt
