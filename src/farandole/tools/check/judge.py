# Compares the reports of the ranks and finds the mistakes of a script.
# Reads the script's source, and asks where temporary files are.
"""`findings(reports)` yields a `Finding` for each thing that was checked."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from farandole.tools.check.lines import Source

OK, NOTE, WRONG, UNSEEN = "ok", "note", "WRONG", "-"
MANY_SHARED = 0.5  # of the samples of a rank; some samples of a data set may be equal
BROADCAST = "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step"
WRAP = "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())"
SAMPLER = "DataLoader(..., sampler=DistributedSampler(data, hvd.size(), hvd.rank()))"
Reports = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Finding:
    """What was found about one thing, the line of the script, and what to do."""

    about: str
    state: str
    text: str
    line: str = ""
    remedy: str = ""


def findings(reports: Reports) -> Iterator[Finding]:
    """Everything that the reports of all ranks say."""
    yield _init(reports)
    if all("torch" in one and one["torch"]["optimizers"] for one in reports):
        yield from _optimizers(reports)
        samples = _samples(reports)
        yield samples
        yield from _losses(reports, samples.state == WRONG)
        yield _seeds(reports)
        yield from _rates(reports)
        yield _evaluation(reports)
    elif all(one.get("keras", {}).get("weights") for one in reports):
        yield from _keras(reports)
    else:
        names = ", ".join(reports[0]["frameworks"]) or "no framework of ours"
        text = f"no training was seen ({names}); only PyTorch's optimizers and Keras's fit can be watched"
        yield Finding("training", UNSEEN, text)
    yield _files(reports)
    yield from _ended(reports)


def _ended(reports: Reports) -> Iterator[Finding]:
    for one in reports:
        if one["ended"] == "late":
            yield Finding("time", NOTE, f"rank {one['rank']} was not ready in time; it was here", one["line"])
        if one["ended"] == "cut":
            text = f"rank {one['rank']}: {one['error']}, perhaps because passes were cut to one batch"
            yield Finding("end", NOTE, text, one["line"], "if the script ends by itself, this is nothing")


def _init(reports: Reports) -> Finding:
    lines = [one.get("init") for one in reports]
    if all(line is not None for line in lines):
        return Finding("init", OK, "every rank calls init()", lines[0] or "")
    steps = [one for report in reports for one in report.get("torch", {}).get("optimizers", [])]
    if steps and all(one.get("distributed") for one in steps):
        return Finding("init", OK, "torch.distributed has its process group; the script does not call hvd.init()")
    where = next(
        (one["step_line"] for one in steps if one.get("step_line")), reports[0].get("keras", {}).get("line", "")
    )
    name = "torch" if "torch" in reports[0] else next(iter(reports[0]["frameworks"]), "torch")
    remedy = f"import farandole.{name} as hvd; hvd.init()  at the start of the script"
    return Finding("init", WRONG, "no rank calls init(): each trains a model of its own", where, remedy)


# PyTorch.


def _optimizers(reports: Reports) -> Iterator[Finding]:
    """Whether the ranks begin with the same parameters, and step with the same gradients."""
    for index in range(min(len(one["torch"]["optimizers"]) for one in reports)):
        same = [one["torch"]["optimizers"][index] for one in reports]
        shots = [one.get("snapshots", []) for one in same]
        if not all(shots):
            continue  # it never stepped
        name, line = same[0]["kind"], same[0].get("step_line", "")
        first = _difference([one[0] for one in shots], "parameters")
        if first is None:
            yield Finding("broadcast", UNSEEN, f"{name}: no rank has whole parameters (they are sharded)", line)
        elif first:
            text = f"the ranks begin with different parameters; the first is {first}"
            yield Finding("broadcast", WRONG, text, line, BROADCAST)
        else:
            yield Finding("broadcast", OK, f"the ranks begin with the same parameters ({name})", line)
        yield _reduced(same, shots, bool(first), line)


def _reduced(same: list[dict[str, Any]], shots: list[list[dict[str, Any]]], differed: bool, line: str) -> Finding:
    name = same[0]["kind"]
    count = min(map(len, shots))
    gradients = [_difference([one[at] for one in shots], "gradients") for at in range(count)]
    later = [_difference([one[at] for one in shots], "parameters") for at in range(1, count)]
    alone = next((one for one in gradients if one), None)
    talks = all(one.get("exchanged", 0) > 0 or one.get("distributed") or one.get("wrapped") for one in same)
    stay = not differed and bool(later) and not any(later)
    if not talks or (alone and not stay):
        which = f"; the first that differs is that of {alone}" if alone else ""
        text = f"{name} steps with gradients of its own rank{which}"
        return Finding("optimizer", WRONG, text, same[0]["line"] or line, WRAP)
    if all(one is None for one in [*gradients, *later]):
        return Finding("optimizer", UNSEEN, f"{name}: no rank has whole gradients (they are sharded)", line)
    return Finding("optimizer", OK, f"{name} steps with the gradients of all ranks", same[0]["line"] or line)


def _difference(shots: list[dict[str, Any]], what: str) -> str | None:
    """The name of the first tensor that differs between ranks; "" if none does, None if there is none."""
    if not all(one[what] for one in shots):
        return None
    rows = zip(*(one[what] for one in shots), strict=False)
    at = next((at for at, row in enumerate(rows) if len(set(row)) > 1), None)
    return "" if at is None else str(shots[0]["names"][at] if at < len(shots[0]["names"]) else at)


def _training(reports: Reports) -> list[list[dict[str, Any]]]:
    """The passes with which each rank trains."""
    return [[one for one in report["torch"]["passes"] if one["trained"]] for report in reports]


def _samples(reports: Reports) -> Finding:
    """Whether the ranks read different samples, and whether anything is read twice."""
    passes = _training(reports)
    if not all(passes):
        return Finding("samples", UNSEEN, "the script trains without a DataLoader; `loss` says whether ranks differ")
    first = [one[0] for one in passes]
    line, sampler = first[0]["line"], first[0]["sampler"]
    whole = [one["whole"] for one in first]
    if len(set(whole)) > 1:
        text = f"the ranks have {' and '.join(map(str, whole))} batches: the job hangs when the first has no more"
        return Finding("samples", WRONG, text, line, "the same number on each rank: DistributedSampler, or hvd.join()")
    rows = [one["rows"] for one in first]
    if all(rows) and all(one == rows[0] for one in rows[1:]):
        return Finding("samples", WRONG, "all ranks read the same samples, in the same order", line, SAMPLER)
    shared = set(rows[0]).intersection(*rows[1:])
    if rows[0] and len(shared) > MANY_SHARED * len(set(rows[0])):
        text = f"{len(shared)} of the first {len(rows[0])} samples are read by all ranks"
        return Finding("samples", WRONG, text, line, SAMPLER)
    of = first[0]["of"]
    # Some libraries divide the batches and not the samples: then the loader has fewer batches than its sampler has.
    counts = [min(one["samples"] or 0, (one["whole"] or 0) * one.get("batch", 0)) for one in first]
    if of and all(counts) and sum(counts) > of + 2 * len(counts) and all(one["of"] == of for one in first):
        same = bool(first[0].get("data")) and len({one["data"] for one in first}) == 1
        text = f"each rank reads {counts[0]} of {of} samples in an epoch ({sampler})"
        if same:
            return Finding("samples", WRONG, f"{text}: samples are read {sum(counts) / of:.0f} times", line, SAMPLER)
        return Finding("samples", NOTE, f"{text}; right only if each rank has a data set of its own", line, SAMPLER)
    epochs = [one["epoch"] for one in passes[0] if one["line"] == line]
    stays = len(epochs) > 1 and len(set(epochs)) == 1
    if first[0]["shuffles"] and (stays or (len(epochs) == 1 and not Source(line).calls("set_epoch"))):
        text = "the ranks read different samples, but in the same order in each epoch"
        return Finding("samples", NOTE, text, line, "sampler.set_epoch(epoch) at the start of each epoch")
    return Finding("samples", OK, f"the ranks read different samples ({sampler})", line)


def _losses(reports: Reports, known: bool) -> Iterator[Finding]:
    """`known`: it has been said that the ranks read the same samples."""
    losses = [one["torch"]["losses"] for one in reports]
    if not all(losses):
        return
    line = reports[0]["torch"].get("loss_line", "")
    count = min(map(len, losses))
    said = "; ".join(f"rank {at}: {one[0]:.4g} to {one[count - 1]:.4g}" for at, one in enumerate(losses[:4]))
    text = f"after {count} steps {said}"
    if not all(math.isfinite(value) for one in losses for value in one):
        yield Finding("loss", WRONG, text, line, "a loss is not finite: a smaller learning rate, or a warm-up")
    elif all(one[:count] == losses[0][:count] for one in losses[1:]):
        text += "; equal in every step, so the ranks read the same data"
        yield Finding("loss", NOTE if known else WRONG, text, line, "" if known else SAMPLER)
    else:
        yield Finding("loss", OK, f"{text}; each rank has the loss of its own samples", line)


def _seeds(reports: Reports) -> Finding:
    seeds = {one["torch"]["initial_seed"] for one in reports}
    own = reports[0]["torch"]
    line = own.get("seed_line", "")
    if len(seeds) > 1:
        text = "each rank has one of its own" if "seed" in own else "none is set, so no run can be repeated"
        return Finding("seeds", OK, text, line)
    text = f"all ranks have the same ({own['initial_seed']})"
    if own["random"]:
        remedy = "after the model is made and broadcast: torch.manual_seed(seed + hvd.rank())"
        return Finding("seeds", NOTE, f"{text}: dropout draws the same numbers on each of them", line, remedy)
    return Finding("seeds", OK, text, line)


def _rates(reports: Reports) -> Iterator[Finding]:
    for one in reports[0]["torch"]["optimizers"]:
        if not one.get("steps") or not isinstance(one["lr"], float):
            continue
        known = Source(one["line"]).knows_ranks()
        if known:
            yield Finding(
                "rate", OK, f"{one['kind']}: {one['lr']:g}, which depends on the number of ranks", one["line"]
            )
            continue
        text = f"{one['kind']}: {one['lr']:g}, whatever the number of ranks; the batch grows with it"
        remedy = "lr=hvd.scale_lr(rate), usual for SGD; many keep the rate of Adam"
        yield Finding("rate", NOTE, text, one["line"], remedy)


def _evaluation(reports: Reports) -> Finding:
    """Whether ranks that evaluate different samples exchange what they found."""
    passes = [[one for one in report["torch"]["passes"] if one["evaluates"]] for report in reports]
    if not all(passes):
        return Finding("evaluation", UNSEEN, "none was seen")
    first = [one[0] for one in passes]
    line = first[0]["line"]
    if all(one["rows"] == first[0]["rows"] for one in first[1:]):
        text = "each rank evaluates the same samples; DistributedSampler would divide them"
        return Finding("evaluation", OK, text, line)
    if all(one["after"] == one["before"] for one in first):
        if any(one["torch"]["optimizers"][0].get("distributed") and not one["collectives"] for one in reports):
            return Finding("evaluation", UNSEEN, "torch.distributed exchanges data by ways that are not watched", line)
        text = "each rank evaluates samples of its own, and nobody averages the results"
        return Finding("evaluation", WRONG, text, line, "accuracy = hvd.allreduce(accuracy, name='accuracy')")
    return Finding("evaluation", OK, "each rank evaluates its part, and the results are exchanged", line)


# Keras.


def _keras(reports: Reports) -> Iterator[Finding]:
    own = [one["keras"] for one in reports]
    line = own[0].get("line", "")
    differ = [
        next((name for name, *found in zip(own[0]["names"], *rows, strict=False) if len(set(found)) > 1), "")
        for rows in zip(*(one["weights"] for one in own), strict=False)
    ]
    if own[0]["wrapped"]:
        yield Finding("optimizer", OK, f"{own[0]['optimizer']} steps with the gradients of all ranks", line)
    else:
        remedy = "optimizer = hvd.DistributedOptimizer(optimizer) before compile()"
        text = f"{own[0]['optimizer']} steps with gradients of its own rank"
        yield Finding("optimizer", WRONG, text, line, remedy)
    if differ[-1]:
        remedy = "callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), ...] in fit()"
        text = f"the ranks have different weights after {len(differ)} batches; the first is {differ[-1]}"
        yield Finding("broadcast", WRONG, text, line, remedy)
    else:
        yield Finding("broadcast", OK, "the ranks have the same weights", line)
    losses = [one["losses"] for one in own]
    count = min(map(len, losses))
    if all(one[:count] == losses[0][:count] for one in losses[1:]):
        remedy = "each rank takes its part: data.shard(hvd.size(), hvd.rank()), or x[hvd.rank()::hvd.size()]"
        yield Finding("loss", WRONG, "equal in every batch, so the ranks read the same data", line, remedy)
    else:
        yield Finding("loss", OK, "each rank has the loss of its own samples", line)
    yield Finding("samples", UNSEEN, "with Keras, samples, seeds, rate and evaluation are not checked")


def _files(reports: Reports) -> Finding:
    files = [one["files"] for one in reports]
    for path, line in files[0].items():
        others = sum(path in one for one in files)
        if others > 1:
            text = f"{others} ranks write {path}; the file may be broken"
            return Finding("files", WRONG, text, line, "if hvd.rank() == 0: before it")
    kept = [[path for path in one if not _temporary(path)] for one in files]
    said = [f"rank {rank} writes {', '.join(sorted(names)[:3])}" for rank, names in enumerate(kept) if names]
    if not said:
        return Finding("files", UNSEEN, "no rank has written a file")
    return Finding("files", OK, f"none is written by two ranks: {'; '.join(said)}")


def _temporary(path: str) -> bool:
    """Whether a file is one of those that libraries write and remove."""
    return path.startswith(tempfile.gettempdir() + os.sep) and not path.startswith(os.getcwd() + os.sep)
