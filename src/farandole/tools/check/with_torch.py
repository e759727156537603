# What `farandole check` sees of a torch script: samples, losses, parameters, steps, seeds, saved files.
# Touches classes and functions of torch in this process, which belongs to the check; writes a timeline.
"""`Watch(report)` replaces some public functions of torch by ones that also take notes."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from farandole.base import tracebacks
from farandole.tools.check import lines
from farandole.tools.check.report import WHOLE_PASSES, Enough, Report
from farandole.world.runtime import runtime

SAMPLE = 4096  # elements of a tensor, or of a row of a batch, that are compared
SNAPSHOTS = 3  # steps whose parameters and gradients are compared
MORE_STEPS = 100  # then the script ends, if it has not by itself
WARM_UP = 2  # steps that are not timed
COUNTED = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "reduce",
    "gather",
    "reduce_scatter",
)


def _digest(tensors: list[Any], row: int | None = None) -> str:
    found = hashlib.blake2b(digest_size=8)
    for one in tensors:
        flat = (one if row is None else one[row]).detach().reshape(-1)
        flat = flat[:: max(1, flat.numel() // SAMPLE)].cpu()
        found.update(str(tuple(one.shape if row is None else one[row].shape)).encode())
        found.update((flat.float() if flat.is_floating_point() else flat).numpy().tobytes())
    return found.hexdigest()


def _tensors(batch: Any) -> Iterator[Any]:
    torch = sys.modules["torch"]
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for one in batch.values():
            yield from _tensors(one)
    elif isinstance(batch, list | tuple):
        for one in batch:
            yield from _tensors(one)


class Pass:
    """One pass through a DataLoader."""

    def __init__(self, loader: Any, collectives: int) -> None:
        self.loader, self.iterator = loader, None
        self.limit = 0  # batches
        sampler = getattr(loader, "sampler", None)
        self.found: dict[str, Any] = {
            "line": lines.here(),
            "sampler": type(sampler).__name__,
            "shuffles": bool(getattr(sampler, "shuffle", False)),
            "epoch": getattr(sampler, "epoch", None),
            "batches": 0,
            "rows": [],
            "evaluates": False,
            "trained": False,
            "before": collectives,
            "after": None,
        }
        parts: tuple[tuple[str, Any], ...] = (
            ("samples", sampler),
            ("of", getattr(loader, "dataset", None)),
            ("whole", loader),
        )
        for name, part in parts:
            try:
                self.found[name] = len(part)
            except TypeError:  # iterable data sets have no length
                self.found[name] = None

    @property
    def code_line(self) -> tuple[str, int]:
        """Which loop of the script this is: a loader may be made anew for each epoch."""
        return self.found["line"], id(self.loader.dataset)

    def saw(self, batch: Any) -> None:
        """A batch goes to the script."""
        torch = sys.modules["torch"]
        self.found["batches"] += 1
        self.found["evaluates"] = not torch.is_grad_enabled()
        found = list(_tensors(batch))
        count = found[0].shape[0] if found and found[0].dim() else 0
        self.found.setdefault("batch", count)
        whole = [one for one in found if one.dim() and one.shape[0] == count]
        self.found["rows"] += [_digest(whole, row) for row in range(count)]

    def fingerprint(self) -> str:
        """Two samples of the data set, if each is the same when it is read again."""
        data = self.loader.dataset
        try:
            found = [[_digest(list(_tensors(data[at]))) for at in (0, len(data) // 2)] for _ in range(2)]
        except Exception:  # a data set without numbers, or one that is closed by now
            return ""
        return "".join(found[0]) if found[0] == found[1] else ""


class Watch:
    """See the module."""

    def __init__(self, report: Report) -> None:
        import torch.utils.data  # before the script, so that it gets what is replaced here

        self._report, self._torch = report, torch
        self._steps = 0
        self._ends: list[float] = []
        self._passes: list[Pass] = []
        self._optimizers: dict[int, dict[str, Any]] = {}
        self._distributed_calls = 0
        self._random = self._finished = self._divided = False
        self._timeline: Path | None = None
        report.found["torch"] = {"optimizers": [], "passes": [], "losses": [], "snapshots": []}
        self._own: dict[str, Any] = report.found["torch"]
        self._watch_optimizers()
        self._watch_loaders()
        self._watch_functions()
        if torch.distributed.is_available():
            self._watch_collectives()

    def _exchanged(self) -> int:
        return self._report.collectives + self._distributed_calls

    # What is replaced.

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        before = getattr(owner, name)
        setattr(owner, name, functools.wraps(before)(make(before)))

    def _watch_optimizers(self) -> None:
        optim = sys.modules["torch.optim.optimizer"]

        def made(before: Any) -> Any:
            def init(one: Any, *args: Any, **kwargs: Any) -> None:
                before(one, *args, **kwargs)
                # It gives each rank an optimizer for some of the parameters.
                self._divided = self._divided or type(one).__name__ == "ZeroRedundancyOptimizer"
                known = {"kind": type(one).__name__, "line": lines.here(), "lr": one.defaults.get("lr")}
                self._optimizers.setdefault(self._key(one), known)

            return init

        self._replace(optim.Optimizer, "__init__", made)
        optim.register_optimizer_step_pre_hook(lambda one, args, kwargs: self._before_step(one))
        optim.register_optimizer_step_post_hook(lambda one, args, kwargs: self._after_step(one))

    @staticmethod
    def _key(optimizer: Any) -> int:
        return next((id(one) for group in optimizer.param_groups for one in group["params"]), id(optimizer))

    def _watch_loaders(self) -> None:
        loaders = self._torch.utils.data.DataLoader
        patched: set[type] = set()

        def limited(before: Any) -> Any:
            def next_(iterator: Any) -> Any:
                here = next((one for one in reversed(self._passes) if one.iterator is iterator), None)
                if here is None:
                    return before(iterator)
                if here.found["batches"] >= here.limit:
                    raise StopIteration
                batch = before(iterator)
                here.saw(batch)
                return batch

            return next_

        def begun(before: Any) -> Any:
            def iter_(loader: Any) -> Any:
                one = Pass(loader, self._exchanged())
                before_it = sum(other.code_line == one.code_line for other in self._passes)
                one.limit = self._report.steps if before_it < WHOLE_PASSES else 1
                if sys._getframe(1).f_code.co_filename.startswith(tracebacks.OURS):
                    one.limit = sys.maxsize  # our elastic loader knows how many batches must come
                self._report.found["cut"] = self._report.found.get("cut") or before_it >= WHOLE_PASSES
                iterator = before(loader)
                one.iterator = iterator
                self._passes.append(one)
                kind = next(kind for kind in type(iterator).__mro__ if "__next__" in vars(kind))
                if kind not in patched:
                    patched.add(kind)
                    self._replace(kind, "__next__", limited)
                return iterator

            return iter_

        self._replace(loaders, "__iter__", begun)

    def _watch_functions(self) -> None:
        torch = self._torch

        def backward(before: Any) -> Any:
            def run(loss: Any, *args: Any, **kwargs: Any) -> Any:
                if loss.numel() == 1 and len(self._own["losses"]) < 1000:
                    self._own["losses"].append(float(loss.detach()))
                    self._own.setdefault("loss_line", lines.here())
                return before(loss, *args, **kwargs)

            return run

        def seed(before: Any) -> Any:
            def run(value: Any) -> Any:
                self._own["seed"], self._own["seed_line"] = int(value), lines.here()
                return before(value)

            return run

        def dropout(before: Any) -> Any:
            def run(value: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
                self._random = self._random or (training and p > 0)
                return before(value, p, training, inplace)

            return run

        def save(before: Any) -> Any:
            def run(what: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
                if isinstance(target, str | os.PathLike):
                    self._report.wrote(os.fspath(target))
                    target = self._apart(target, self._report.rank)
                    target.parent.mkdir(parents=True, exist_ok=True)
                return before(what, target, *args, **kwargs)

            return run

        def load(before: Any) -> Any:
            def run(source: Any, *args: Any, **kwargs: Any) -> Any:
                if isinstance(source, str | os.PathLike):
                    ranks = [self._report.rank, *range(self._report.size)]
                    found = (self._apart(source, rank) for rank in ranks)
                    source = next((one for one in found if one.exists()), source)
                return before(source, *args, **kwargs)

            return run

        self._replace(torch.Tensor, "backward", backward)
        self._replace(torch, "manual_seed", seed)
        self._replace(torch.nn.functional, "dropout", dropout)
        self._replace(torch, "save", save)
        self._replace(torch, "load", load)

    def _apart(self, path: str | os.PathLike[str], rank: int) -> Path:
        """Where a saved file goes instead: the script's own files stay as they are."""
        return self._report.folder / f"saved.{rank}" / os.path.abspath(path).lstrip(os.sep)

    def _watch_collectives(self) -> None:
        def counted(before: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                self._distributed_calls += 1
                return before(*args, **kwargs)

            return run

        for name in COUNTED:
            self._replace(self._torch.distributed, name, counted)

    # Steps.

    def _before_step(self, optimizer: Any) -> None:
        known = self._known(optimizer)
        if known.setdefault("steps", 0) == 0:
            known["step_line"] = lines.here()
            known["collectives"] = self._exchanged()
            kinds = [kind.__name__ for kind in type(optimizer).__mro__]
            known["wrapped"] = any(name.startswith(("_Distributed", "_Sharded")) for name in kinds)
            known["distributed"] = self._torch.distributed.is_available() and self._torch.distributed.is_initialized()
        if known["steps"] < SNAPSHOTS:
            known.setdefault("snapshots", []).append(self._snapshot(optimizer))
        now = self._passes[-1] if self._passes else None
        for one in self._passes:
            if one.found["after"] is None and one is not now:
                one.found["after"] = self._exchanged()
        if now is not None:
            now.found["trained"] = True

    def _snapshot(self, optimizer: Any) -> dict[str, Any]:
        """Digests of what all ranks should have alike: no shares of parameters or gradients."""
        shares = getattr(getattr(optimizer, "_gradients", None), "names", None)  # of shard_optimizer_state=True
        params = [one for group in optimizer.param_groups for one in group["params"]]
        whole = [one for one in shares or params if not hasattr(one, "placements")]  # a DTensor is a shard
        whole = [] if self._divided else whole
        gradients = [one.grad for one in whole if shares is None and one.grad is not None and not one.grad.is_sparse]
        return {
            "names": list(shares.values()) if shares else _names(optimizer, whole),
            "parameters": [_digest([one]) for one in whole],
            "gradients": [_digest([one]) for one in gradients],
        }

    def _known(self, optimizer: Any) -> dict[str, Any]:
        made = {"kind": type(optimizer).__name__, "line": "", "lr": None}
        return self._optimizers.setdefault(self._key(optimizer), made)

    def _after_step(self, optimizer: Any) -> None:
        known = self._known(optimizer)
        known["steps"] += 1
        known["exchanged"] = self._exchanged() - known["collectives"]
        if known["steps"] <= self._steps:
            return  # another optimizer has done this step
        self._steps = known["steps"]
        self._ends.append(time.perf_counter())
        self._report.stepped()
        if self._steps == WARM_UP and self._report.engine is not None and self._report.rank == 0:
            self._timeline = self._report.folder / "timeline.json"
            runtime.world.trace(str(self._timeline), False)
        if self._steps == self._report.steps:
            self._stop_timeline()
        least = WHOLE_PASSES * self._report.steps
        if self._steps > least and (not self._passes or self._steps > least + MORE_STEPS or self._report.half_over):
            self.finish()
            raise Enough

    def _stop_timeline(self) -> None:
        if self._timeline is not None and runtime.initialized:
            runtime.world.stop_trace()
            self._own["timeline"] = str(self._timeline)
        self._timeline = None

    def finish(self) -> None:
        """Adds what is known at the end, once."""
        if self._finished:
            return
        self._finished = True
        self._stop_timeline()
        timed = self._ends[WARM_UP - 1 : self._report.steps]
        self._own["step_seconds"] = [later - earlier for earlier, later in itertools.pairwise(timed)]
        self._own["optimizers"] = list(self._optimizers.values())
        self._own["random"] = self._random
        self._own["initial_seed"] = self._torch.initial_seed()
        for one in self._passes:
            if one.found["after"] is None:
                one.found["after"] = self._exchanged()
        seen: set[int] = set()
        for one in self._passes:
            if one.found["trained"] and id(one.loader) not in seen and len(seen) < SNAPSHOTS:
                seen.add(id(one.loader))
                one.found["data"] = one.fingerprint()
        self._own["passes"] = [one.found for one in self._passes]


def _names(optimizer: Any, params: list[Any]) -> list[str]:
    """The names of parameters as far as the optimizer knows them, with their shapes."""
    slots = getattr(getattr(optimizer, "_gradients", None), "slots", {})
    user_names = [name for group in optimizer.param_groups for name in group.get("param_names") or []]
    names = [slots[one].name if one in slots else "" for one in params]
    if not any(names) and len(user_names) == len(params):
        names = user_names
    return [f"{names[at] or f'parameter {at}'} {tuple(one.shape)}" for at, one in enumerate(params)]
