# Every private name of Lightning that this package uses, with what it is for and what happens without it.
# Touches objects of Lightning's that it is given; imports neither Lightning nor torch.
"""Names of classes and modules are looked up when our first class is derived from one of Lightning.

Attributes of objects are looked up in the first object: those of a strategy in its constructor, those of a trainer at
the start of an elastic fit, before its first batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...base.named import module_of
from . import find, has, of

_COMMITS = "commits of ElasticCallback"
_NO_ELASTIC = "ElasticCallback raises RuntimeError"
_LAUNCHER = ("starting ranks, and finding one's rank", "the class cannot be made: ImportError")
_THREADS = ("the number of threads of each rank", "each uses all cores")
_PLACEHOLDER = (
    "knowing `fabric.launch()` without a function",
    "without a launcher it returns in ranks that run nothing: use `fabric.launch(function)`, or `farandole run`",
)
_SYNC = ("Trainer(sync_batchnorm=True)", "each rank normalises its own batches, with a warning")
_BLOCK = ("fabric.no_backward_sync", "it sends gradients in each backward pass; results are the same")

# The modules that make a strategy from its name, and their classes. They first look for the cluster environment:
# SLURM's refuses `srun -n`, and MPI's initializes MPI, although our strategy needs neither.
CONNECTORS = {
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.fabric.connector": "_Connector",
    "lightning_fabric.connector": "_Connector",
}
CHOOSE = "_choose_and_init_cluster_environment"
_CONNECTOR = (
    "asking us, and not SLURM or MPI, who is who",
    'strategy="farandole" under srun needs --ntasks-per-node, and under mpirun mpi4py',
)


# The private names of each package of Lightning, by the last parts of their paths.
_CLASSES = {
    "lightning.pytorch": (
        ("strategies:ParallelStrategy._configure_launcher", *_LAUNCHER),
        ("trainer.trainer:Trainer._teardown", "leaving a fit that a loss has ended", "its loaders stay until the next"),
        ("loops.fit_loop:_FitLoop._should_accumulate", _COMMITS, _NO_ELASTIC),
    ),
    "lightning.fabric": (
        ("strategies:ParallelStrategy._configure_launcher", *_LAUNCHER),
        ("fabric:_do_nothing", *_PLACEHOLDER),
        ("utilities.distributed:_set_num_threads_if_needed", *_THREADS),
    ),
}
_ALIASES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


@functools.cache
def look_up_names(tree: str) -> None:
    """Looks up the names in a package's classes and modules, once. Raises ImportError if a necessary one is missing."""
    for path, purpose, without in _CLASSES[_ALIASES.get(tree, tree)]:
        if find(f"{tree}.{path}", purpose, without) is None and purpose == _LAUNCHER[0]:
            raise ImportError(
                f"farandole.lightning does not support this release of Lightning: it has no {tree}.{path}"
            )


def _needed(owner: Any, attribute: str, purpose: str) -> Any:
    if not has(owner, attribute, purpose, _NO_ELASTIC):
        raise RuntimeError(f"ElasticCallback does not work with this release of Lightning: no {attribute}")
    return getattr(owner, attribute)


def check_trainer(trainer: Any) -> None:
    """RuntimeError unless this trainer has all attributes that ElasticCallback needs."""
    _needed(trainer, "_checkpoint_connector", _COMMITS)
    for attribute in ("_should_accumulate", "_combined_loader", "_data_fetcher", "_combined_loader_states_to_load"):
        _needed(trainer.fit_loop, attribute, _COMMITS)


def checkpoint(trainer: Any) -> Any:
    """The checkpoint that Lightning would write now."""
    return _needed(trainer, "_checkpoint_connector", _COMMITS).dump_checkpoint(weights_only=False)


def accumulates(fit_loop: Any) -> bool:
    """Whether the gradients of this batch are added to those of the next one."""
    return bool(_needed(fit_loop, "_should_accumulate", _COMMITS)())


def take_length(fit_loop: Any, batches: int) -> None:
    """Sets the number of batches of the epoch that begins."""
    fit_loop.max_batches = batches
    _needed(fit_loop, "_combined_loader", _COMMITS).limits = [batches]
    _needed(fit_loop, "_data_fetcher", _COMMITS).length = batches


def loaders(fit_loop: Any) -> list[Any]:
    """The loaders of the fit; none before it has begun."""
    combined = _needed(fit_loop, "_combined_loader", _COMMITS)
    return [] if combined is None else list(combined.flattened)


def forget_fit(trainer: Any) -> None:
    """Resets the trainer to the state before the fit, as far as Lightning allows it; the rest is used again."""
    try:
        if hasattr(trainer, "_teardown"):  # see `look`
            trainer._teardown()
    finally:
        trainer.fit_loop._combined_loader = None


def loader_states(fit_loop: Any) -> Any:
    """The states of the loaders in a checkpoint that is being loaded."""
    return _needed(fit_loop, "_combined_loader_states_to_load", _COMMITS)


def go_on_with(logger: Any, version: Any) -> None:
    """Lets a logger continue this run. Not all loggers have runs, so there is no warning."""
    if hasattr(logger, "_version"):
        logger._version = version


def layer_sync(strategy: Any) -> Any:
    """The object that Trainer(sync_batchnorm=True) gave the strategy, or None."""
    return of(strategy, "_layer_sync", *_SYNC)


def set_no_sync_control(strategy: Any, control: Any) -> None:
    """Sets the object that `fabric.no_backward_sync` uses."""
    if has(strategy, "_backward_sync_control", *_BLOCK):
        strategy._backward_sync_control = control


def share_cores(fabric: str, ranks: int) -> None:
    """Each rank of this host gets its part of the cores, as in processes that Lightning starts."""
    module = module_of(f"{fabric}.utilities.distributed")
    share = of(module, "_set_num_threads_if_needed", *_THREADS)
    if share is not None:
        share(num_processes=ranks)


def does_nothing(fabric: str, function: Any) -> bool:
    """Whether it is Fabric's placeholder: `partial(fabric._wrap_with_setup, _do_nothing)`."""
    placeholder = of(module_of(f"{fabric}.fabric"), "_do_nothing", *_PLACEHOLDER)
    inner: Any = getattr(function, "args", ())
    return placeholder is not None and bool(inner) and inner[0] is placeholder


def answer_environment(module: Any, answer: Callable[[Any], Any]) -> None:
    """Calls `answer(strategy)` for the cluster environment before Lightning looks for one; after None it looks."""
    connector = of(module, CONNECTORS[module.__name__], *_CONNECTOR)
    original = None if connector is None else of(connector, CHOOSE, *_CONNECTOR)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def choose(self: Any) -> Any:
        asked = getattr(self, "_cluster_environment_flag", None) is None
        return (answer(getattr(self, "_strategy_flag", None)) if asked else None) or original(self)

    setattr(connector, CHOOSE, choose)
