# How a Trainer or a Fabric runs its functions: in ranks that it starts, or repeatedly in an elastic job.
# Touches launch/executor and launch/local; Lightning only through the objects it gets.
"""Lightning calls `launch(function, *args, trainer=..., **kwargs)` of the strategy's launcher, if it has one."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..base.named import module_of
from ..bindings.private import lightning_names
from ..launch.executor import Executor
from ..launch.local import start
from ..world import basics
from . import elastic
from .packages import fabric_of

# The attributes of a checkpoint callback that scripts read after training.
CHECKPOINTS = "dirpath best_model_path best_model_score last_model_path best_k_models kth_best_model_path kth_value"


class ElasticRestart:
    """For elastic jobs: it starts a fit with an ElasticCallback again when ranks were lost or joined."""

    is_interactive_compatible = True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Runs the function in this process."""
        callback = None if trainer is None else elastic.callback_of(trainer)
        if callback is None or trainer.state.fn != "fit":
            return function(*args, **kwargs)
        return elastic.fit(trainer, function, args, kwargs)

    def kill(self, signum: int) -> None:
        """Does nothing: the launcher controls the ranks."""


class ProcessStarter:
    """For processes without a launcher: `devices=N` starts N ranks for each fit, validate, test and predict."""

    is_interactive_compatible = True

    def __init__(self, number: int, tree: str) -> None:
        self._number = number
        self._tree = tree
        self._executor: Executor | None = None

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Runs the function in all ranks. Returns rank 0's result, and copies its trainer's state to `trainer`."""
        if trainer is None and lightning_names.does_nothing(fabric_of(self._tree), function):
            self._run_script_again()
        work = (function, args, kwargs, trainer, self._number, self._tree, _generators(), _filters())
        self._executor = Executor(self._number)
        try:
            with self._executor as executor:
                result, report = executor.run(_work, work)[0]
        except (TypeError, AttributeError) as error:
            if "pickle" not in str(error):
                raise
            raise TypeError(
                f"the model, data or callbacks cannot be sent to the ranks: {error}. "
                f"Start the ranks yourself instead: farandole run -np {self._number} python train.py"
            ) from error
        finally:
            self._executor = None
        if trainer is not None:
            _take_over(trainer, report)
        return result

    def kill(self, signum: int) -> None:
        """Ends the ranks."""
        if self._executor is not None:
            self._executor.shutdown()

    def _run_script_again(self) -> None:
        """`fabric.launch()` without a function: the ranks run the rest of the script; this process waits for them."""
        main = sys.modules["__main__"]
        if not getattr(main, "__file__", None) or hasattr(sys, "ps1"):
            raise TypeError("in a notebook fabric.launch(function) needs the function that the ranks run")
        job = start(sys.orig_argv, self._number, output="raw")
        try:
            code = job.wait()
        finally:
            job.close()
        sys.exit(code)


def _generators() -> Any:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _filters() -> list[Any]:
    """What the script does with warnings, first the filter that counts most."""
    found: list[Any] = []
    for action, text, category, module, line in warnings.filters:
        # A part is a pattern, None, or, in filters that Python makes itself, text.
        patterns = [getattr(part, "pattern", part or "") for part in (text, module)]  # type: ignore[arg-type]
        found.append((action, patterns[0], category, patterns[1], line))
    return found


def _filter_warnings(filters: list[Any]) -> None:
    warnings.resetwarnings()
    for action, text, category, module, line in filters:
        warnings.filterwarnings(action, text, category, module, line, append=True)


def _work(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    trainer: Any,
    number: int,
    tree: str,
    generators: Any,
    filters: Any,
) -> tuple[Any, Any]:
    """Runs in each rank. Function, arguments and trainer are in one pickle, so objects that they share stay shared."""
    _filter_warnings(filters)
    random.setstate(generators[0])
    np.random.set_state(generators[1])
    torch.set_rng_state(generators[2])
    fabric = fabric_of(tree)
    lightning_names.share_cores(fabric, number)
    result = function(*args, **kwargs)
    rank = basics.rank()
    report = None if trainer is None else _report(trainer)
    return (_on_cpu(result, fabric), _on_cpu(report, fabric)) if rank == 0 else (None, None)


def _on_cpu(value: Any, fabric: str) -> Any:
    return module_of(f"{fabric}.utilities").move_data_to_device(value, torch.device("cpu"))


def _report(trainer: Any) -> dict[str, Any]:
    """The state of a trainer after the run. All ranks call it, because metrics gather their states."""
    fit_loop = trainer.fit_loop
    loop = fit_loop.epoch_loop
    return {
        "weights": trainer.lightning_module.state_dict() if trainer.state.fn == "fit" else None,
        "state": trainer.state,
        "metrics": (dict(trainer.callback_metrics), dict(trainer.logged_metrics)),
        "should_stop": trainer.should_stop,
        "checkpoints": [
            {name: getattr(callback, name) for name in CHECKPOINTS.split() if hasattr(callback, name)}
            for callback in trainer.checkpoint_callbacks
        ],
        "progress": copy.deepcopy(
            (
                fit_loop.epoch_progress,
                loop.batch_progress,
                loop.automatic_optimization.optim_progress,
                loop.manual_optimization.optim_step_progress,
            )
        ),
    }


def _take_over(trainer: Any, report: dict[str, Any]) -> None:
    """Copies the state of rank 0's trainer to the trainer of this process."""
    if report["weights"] is not None:
        trainer.lightning_module.load_state_dict(report["weights"], strict=False)
    trainer.state = report["state"]
    callback_metrics, logged_metrics = report["metrics"]
    trainer.callback_metrics.update(callback_metrics)
    trainer.logged_metrics.update(logged_metrics)
    trainer.should_stop = report["should_stop"]
    for callback, known in zip(trainer.checkpoint_callbacks, report["checkpoints"], strict=True):
        for name, value in known.items():
            setattr(callback, name, value)
    fit_loop = trainer.fit_loop
    loop = fit_loop.epoch_loop
    fit_loop.epoch_progress, loop.batch_progress, automatic, manual = report["progress"]
    loop.automatic_optimization.optim_progress, loop.manual_optimization.optim_step_progress = automatic, manual
