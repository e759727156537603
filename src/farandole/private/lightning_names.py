# Every private name of Lightning that this package uses, with what it is for and what happens without it.
# Touches objects of Lightning's that it is given; imports neither Lightning nor torch.
"""Lightning keeps these in its objects: they are looked for when they are used.

Not here, because nothing is asked of Lightning: methods that it calls on a strategy (`_configure_launcher`,
`_setup_model`, `_launcher`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from . import of

_COMMITS = "commits of ElasticCallback"
_NO_ELASTIC = "ElasticCallback raises RuntimeError"

# The module that makes a strategy of its name, and its class. Before it does, it asks for the environment: SLURM's
# refuses `srun -n` and MPI's begins MPI, though a strategy of ours asks neither.
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


def _needed(owner: Any, attribute: str, purpose: str) -> Any:
    found = of(owner, attribute, purpose, _NO_ELASTIC)
    if found is None:
        raise RuntimeError(f"ElasticCallback does not work with this release of Lightning: no {attribute}")
    return found


def checkpoint(trainer: Any) -> Any:
    """What Lightning would write into a checkpoint now."""
    return _needed(trainer, "_checkpoint_connector", _COMMITS).dump_checkpoint(weights_only=False)


def accumulates(fit_loop: Any) -> bool:
    """Whether gradients of this batch are added to the next one's."""
    return bool(_needed(fit_loop, "_should_accumulate", _COMMITS)())


def take_length(fit_loop: Any, batches: int) -> None:
    """The epoch that begins has so many batches."""
    fit_loop.max_batches = batches
    _needed(fit_loop, "_combined_loader", _COMMITS).limits = [batches]
    _needed(fit_loop, "_data_fetcher", _COMMITS).length = batches


def loaders(fit_loop: Any) -> list[Any]:
    """What the fit takes its batches from; none before it has begun."""
    combined = getattr(fit_loop, "_combined_loader", None)
    return [] if combined is None else list(combined.flattened)


def forget_fit(trainer: Any) -> None:
    """Leaves the trainer as if the fit had not begun, as far as Lightning lets us: what stays is used again."""
    try:
        trainer._teardown()
    finally:
        trainer.fit_loop._combined_loader = None


def loader_states(fit_loop: Any) -> Any:
    """What a checkpoint that is being loaded says of the loaders."""
    return _needed(fit_loop, "_combined_loader_states_to_load", _COMMITS)


def go_on_with(logger: Any, version: Any) -> None:
    """A logger writes into this run; where it has no such attribute it begins a new one."""
    if hasattr(logger, "_version"):
        logger._version = version


def share_cores(fabric: str, ranks: int) -> None:
    """Each rank of this host gets its part of the cores, as in processes that Lightning starts."""
    module = importlib.import_module(f"{fabric}.utilities.distributed")
    share = of(module, "_set_num_threads_if_needed", "the number of threads of each rank", "each uses all cores")
    if share is not None:
        share(num_processes=ranks)


def does_nothing(function: Any) -> bool:
    """Whether it is Fabric's own placeholder: `partial(fabric._wrap_with_setup, _do_nothing)`.

    Where it has another name, `fabric.launch()` without a function returns in ranks that run nothing.
    """
    inner: Any = getattr(function, "args", ())
    return bool(inner) and getattr(inner[0], "__name__", "") == "_do_nothing"


def answer_environment(module: Any, answer: Callable[[Any], Any]) -> None:
    """`answer(strategy)` is asked for the cluster environment before Lightning looks for one; None lets it look."""
    connector = of(module, CONNECTORS[module.__name__], *_CONNECTOR)
    theirs = None if connector is None else of(connector, CHOOSE, *_CONNECTOR)
    if theirs is None or hasattr(theirs, "__wrapped__"):
        return

    @functools.wraps(theirs)
    def choose(self: Any) -> Any:
        asked = getattr(self, "_cluster_environment_flag", None) is None
        return (answer(getattr(self, "_strategy_flag", None)) if asked else None) or theirs(self)

    setattr(connector, CHOOSE, choose)
