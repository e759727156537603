# When a process warns that its job reduces nothing, as a table; what it reports; and how the launcher reads it.
# Touches farandole.base and farandole.launch.blame.
from __future__ import annotations

import json
import logging
import os

import pytest

from farandole.base import ending, hints
from farandole.base.config import Config
from farandole.base.hints import MANY_STEPS, Training
from farandole.launch.blame import Ending

# name, steps, collectives before the first step and after it, what else is known, whether it warns
TABLE = [
    ("nothing at all", MANY_STEPS, 0, 0, {}, True),
    ("parameters were broadcast", MANY_STEPS, 4, 0, {"broadcast": True}, True),
    ("and a metric is averaged now and then", 10 * MANY_STEPS, 4, 9, {"broadcast": True}, True),
    ("gradients are reduced", MANY_STEPS, 4, MANY_STEPS, {"broadcast": True}, False),
    ("something is reduced for every hundred steps", 10 * MANY_STEPS, 4, 10, {"broadcast": True}, False),
    ("only a test of a few steps", MANY_STEPS - 1, 4, 0, {"broadcast": True}, False),
    ("ranks that train models of their own and compare them", MANY_STEPS, 0, 1, {}, False),
    (
        "the script averages the weights itself, seldom",
        10 * MANY_STEPS,
        4,
        1,
        {"broadcast": True, "large": True},
        False,
    ),
    ("torch.distributed reduces", MANY_STEPS, 4, 0, {"broadcast": True, "unsure": True}, False),
    ("another rank than 0", MANY_STEPS, 0, 0, {"rank": 1}, False),
    ("one rank", MANY_STEPS, 0, 0, {"size": 1}, False),
    ("switched off", MANY_STEPS, 0, 0, {"hints": False}, False),
]


@pytest.mark.parametrize(
    ("steps", "before", "after", "more", "warns"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_nothing_reduced(
    steps: int, before: int, after: int, more: dict[str, int], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    collectives = before
    training = Training()
    training.joined(lambda: collectives)
    for _ in range(steps):
        training.stepped()
    collectives += after
    training.parameters_broadcast = bool(more.get("broadcast"))
    training.unsure = bool(more.get("unsure"))
    with caplog.at_level(logging.WARNING, "farandole"):
        config = Config(hints=bool(more.get("hints", True)))
        training.left(more.get("rank", 0), more.get("size", 2), bool(more.get("large")), config)
    assert ("reduced no gradients" in caplog.text) == warns


def test_a_second_world_is_not_judged(caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    training.joined(lambda: 0)
    training.joined(lambda: 0)
    for _ in range(MANY_STEPS):
        training.stepped()
    with caplog.at_level(logging.WARNING, "farandole"):
        training.left(0, 2, False, Config())
    assert not caplog.records


def test_the_report_of_a_rank_that_trained_alone() -> None:
    reader, writer = os.pipe()
    try:
        number = os.fstat(writer).st_ino
        assert ending.is_pipe(writer, number) and not ending.is_pipe(writer, number + 1)
        ending.report_alone(writer, "torch")
        text = os.read(reader, 1000).decode()
    finally:
        os.close(reader)
        os.close(writer)
    assert not ending.is_pipe(writer, number), "it is closed"
    assert Ending.read(0, 0, False, "", text).alone == "torch"
    failed = Ending.read(0, 1, False, "", text + json.dumps({"error": "PeerLost: x", "blames": 2}) + "\n")
    assert (failed.alone, failed.error, failed.blames) == ("torch", "PeerLost: x", 2)


def test_the_remedy_names_the_binding() -> None:
    assert "import farandole.jax as hvd" in hints.remedy("jax") and "DistributedOptimizer" in hints.remedy("torch")
