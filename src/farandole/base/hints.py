# Notices a script whose ranks train alone: no rank calls init(), or the ranks join and then reduce nothing.
# Touches a hook of torch's optimizers if torch is loaded, the log, and the descriptor for reports.
"""`training` counts the steps of torch's optimizers in this process. It warns only where it is sure.

`watch_torch()` and `watch_exit()` begin; runtime.py calls `joined` and `left`. docs/mistakes.md has the rules.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from farandole.base import ending, tested
from farandole.base.config import Config

FEW_STEPS = 10  # without init(); then rank 0 warns
MANY_STEPS = 100  # an optimizer that steps so often trains; with less than one collective for so many steps, alone
OFF = "(FARANDOLE_HINTS=0 switches this warning off)"

OTHERS = ("tensorflow", "keras", "jax", "mxnet")  # who imports a binding for one of these wants to train with it

_log = logging.getLogger("farandole")


def remedy(framework: str) -> str:
    """What the user should do."""
    text = f"Call init() at the start of the script: import farandole.{framework} as hvd; hvd.init()"
    if framework != "torch":
        return text
    return f"{text}, then hvd.broadcast_parameters(model.state_dict(), 0) and hvd.DistributedOptimizer(optimizer)"


class Training:
    """What the optimizers of this process have done, and what it has exchanged with other ranks."""

    def __init__(self) -> None:
        self.steps = 0
        self.unsure = False  # something else may exchange gradients, or the ranks have changed: no warning
        self.has_joined = False
        self.parameters_broadcast = False
        self._pid = os.getpid()
        self._watches_torch = self._watches_exit = False
        self._collectives: Callable[[], int] = lambda: 0
        self._before = 0  # collectives before the first step

    # Observations.

    def watch_torch(self) -> None:
        """Counts the steps of torch's optimizers from now on. A second call does nothing."""
        if self._watches_torch:
            return
        self._watches_torch = True
        tracing = sys.modules["torch"].compiler.is_compiling

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not tracing():  # a compiled step is not counted
                self.stepped()

        sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(stepped)
        self.watch_exit()

    def watch_exit(self) -> None:
        """Tells the launcher at the end of the process if it never joined. A second call does nothing."""
        if not self._watches_exit:
            self._watches_exit = True
            atexit.register(self._at_exit)

    def joined(self, collectives: Callable[[], int]) -> None:
        """init() was called. `collectives`: how many the engine has run."""
        self.unsure = self.unsure or self.has_joined
        self.has_joined = True
        self._collectives = collectives
        self._before = collectives()

    def left(self, rank: int, size: int, exchanged: bool, config: Config) -> None:
        """The process leaves the job: rank 0 warns if nothing was reduced. `exchanged`: more than a few numbers."""
        if self.unsure or rank != 0 or size == 1 or exchanged or not config.hints or self.steps < MANY_STEPS:
            return
        collectives = self._collectives()
        seldom = (collectives - self._before) * MANY_STEPS < self.steps
        if collectives == 0 or (seldom and self.parameters_broadcast):
            _log.warning(
                "the optimizer of rank 0 has stepped %d times, but the %d ranks have reduced no gradients: each has "
                "trained a model of its own. Wrap the optimizer after init(): optimizer = "
                "hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()) %s",
                self.steps,
                size,
                OFF,
            )

    # Decisions.

    def stepped(self) -> None:
        """An optimizer has stepped."""
        self.steps += 1
        if self.steps == 1:
            distributed = sys.modules.get("torch.distributed")
            self.unsure = self.unsure or bool(
                distributed and distributed.is_available() and distributed.is_initialized()
            )
            self._before = self._collectives()
        elif self.steps == FEW_STEPS and (config := self._alone()) is not None and config.rank == 0:
            _log.warning(
                "this process is rank 0 of %d and trains, but it has not called init(): each rank trains a model of "
                "its own. %s %s",
                config.size,
                remedy("torch"),
                OFF,
            )

    def _alone(self) -> Config | None:
        """The settings of this process if it is one of several ranks and did not join them; otherwise None."""
        if self.has_joined or self.unsure or os.getpid() != self._pid:
            return None
        try:
            config = Config.from_environment()
        except ValueError:
            return None
        ours = config.report_fd is not None and ending.is_pipe(config.report_fd, config.report_pipe)
        return config if ours and config.hints and config.size > 1 else None

    def _at_exit(self) -> None:
        # Without a step of torch's we know only that a binding was imported; with torch's that does not mean training.
        framework = "torch" if self.steps else next((name for name in tested.used() if name in OTHERS), "")
        config = self._alone() if framework else None
        if config is not None and config.report_fd is not None:
            ending.report_alone(config.report_fd, framework)


training = Training()
watch_torch = training.watch_torch
