# The quick program of the fault tests: only NumPy; its state is weights, a ledger of samples and sharded counters.
# Touches farandole as users see it, and files in a scratch directory.
"""Every step counts its samples and adds one to each sharded counter; at the end all counts must agree."""

from __future__ import annotations

import hashlib
import random
import sys
import time
from typing import Any

import numpy as np
from elastic_files import agreed, begin, finishing, leave, tell

import farandole as hvd
from farandole.elastic import ObjectState, RandomState, Sharded, run
from farandole.elastic.sampler import next_cursor, order, shares

SAMPLES, BATCH, COMMIT_EVERY = (int(word) for word in sys.argv[1:4])
COUNTERS = 7


def step(state: Any) -> None:
    samples = order(SAMPLES, 5, state.epoch)
    share = shares(state.cursor, SAMPLES, hvd.size(), BATCH)[hvd.rank()]
    local = samples[share.start : share.start + share.count]
    counts = hvd.allreduce(np.bincount(local, minlength=SAMPLES).astype(np.int64), op=hvd.Sum, name="ledger")
    state.weights = state.weights * 0.9 + counts
    row = state.ledger.setdefault(state.epoch, np.zeros(SAMPLES, dtype=np.int64))
    row += counts
    for key in state.counters:
        state.counters[key] += 1
    state.cursor = next_cursor(state.cursor, SAMPLES, hvd.size(), BATCH)
    state.step += 1
    state.sizes.append(hvd.size())


@run
def train(state: Any) -> None:
    begin()
    for key in state.counters:  # the keys that this rank got belong to this step
        assert state.counters[key] == state.step, (key, state.counters[key], state.step)
    while True:
        if state.cursor >= SAMPLES:
            state.epoch, state.cursor = state.epoch + 1, 0
        if agreed(state.cursor == 0 and finishing()):
            return
        step(state)
        random.random()
        tell(state.step)
        time.sleep(0.003)  # sleep: stands for the computation of a step
        if state.step % COMMIT_EVERY == 0:
            state.commit()


def main() -> None:
    hvd.init()
    state = ObjectState(
        hvd.broadcast_object,
        hvd.rank,
        weights=np.zeros(SAMPLES),
        ledger={},
        epoch=0,
        cursor=0,
        step=0,
        sizes=[],
        counters=Sharded(dict.fromkeys(range(COUNTERS), 0)),
        draws=RandomState(),
    )
    train(state)
    counters = [pair for pairs in hvd.allgather_object(list(state.counters._values.items())) for pair in pairs]
    leave(
        weights=hashlib.sha256(state.weights.tobytes()).hexdigest(),
        used=[state.ledger[epoch].tolist() for epoch in sorted(state.ledger)],
        padded=[[0]],
        sizes=state.sizes,
        steps=state.step,
        counters=sorted(counters),
    )


if __name__ == "__main__":
    main()
