# What `farandole check` sees of a Keras script: losses and weights of a short fit.
# Touches the fit method of Keras's Model in this process, which belongs to the check.
"""`Watch(report)` cuts `fit` to two short epochs, and adds a callback that takes notes."""

from __future__ import annotations

import functools
import hashlib
import itertools
import time
from typing import Any

from farandole.base.named import module_of
from farandole.tools.check import lines
from farandole.tools.check.report import Report

EPOCHS = 2
SNAPSHOTS = 3


class Watch:
    """See the module."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._own: dict[str, Any] = {"fits": 0, "losses": [], "weights": [], "ends": []}
        report.found["keras"] = self._own
        for name in ("keras", "tf_keras"):
            if name in report.names:
                self._watch(module_of(name))
        if "tensorflow" in report.names and "keras" not in report.names:
            self._watch(module_of("tensorflow").keras)

    def _watch(self, keras: Any) -> None:
        fit = keras.Model.fit
        outer, own, steps = self, self._own, self._report.steps

        class Notes(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                own["ends"].append(time.perf_counter())
                outer._report.stepped()
                own["losses"].append(float((logs or {}).get("loss", 0.0)))
                if len(own["weights"]) < SNAPSHOTS:
                    own["weights"].append([_digest(one) for one in self.model.trainable_variables])
                    own["names"] = [getattr(one, "path", one.name) for one in self.model.trainable_variables]

        @functools.wraps(fit)
        def short(model: Any, *args: Any, **kwargs: Any) -> Any:
            own["fits"] += 1
            own.setdefault("line", lines.here())
            optimizer = model.optimizer
            own["optimizer"] = type(optimizer).__name__
            own["wrapped"] = any(hasattr(optimizer, name) for name in ("_allreduce", "_allreduce_grads"))
            kwargs["epochs"] = min(kwargs.get("epochs") or 1, EPOCHS)
            kwargs["steps_per_epoch"] = min(kwargs.get("steps_per_epoch") or steps, steps)
            kwargs["callbacks"] = [*(kwargs.get("callbacks") or []), Notes()]
            outer._report.found.setdefault("kinds", []).append("keras")
            return fit(model, *args, **kwargs)

        keras.Model.fit = short

    def finish(self) -> None:
        """Adds what is known at the end."""
        ends = self._own.pop("ends")
        self._own["step_seconds"] = [later - earlier for earlier, later in itertools.pairwise(ends[2:])]


def _digest(variable: Any) -> str:
    value = variable.numpy() if hasattr(variable, "numpy") else variable
    return hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()
