# Base classes of other programs' elastic callbacks: horovod._keras.elastic.
# Touches elastic_bodies.
"""The classes of elastic_bodies.py, with Keras's backend as the first argument."""

from __future__ import annotations

from typing import Any

from .. import elastic_bodies


class CommitStateCallbackImpl(elastic_bodies.Commit):
    """Commits the state after every `batches_per_commit` batches and at the end of each epoch."""

    def __init__(self, backend: Any, state: Any, batches_per_commit: int, *args: Any) -> None:
        super().__init__(state, batches_per_commit)
        self.backend = backend


class UpdateBatchStateCallbackImpl(elastic_bodies.UpdateBatch):
    """Keeps `state.batch` up to date."""

    def __init__(self, backend: Any, state: Any, *args: Any) -> None:
        super().__init__(state)
        self.backend = backend


class UpdateEpochStateCallbackImpl(elastic_bodies.UpdateEpoch):
    """Keeps `state.epoch` up to date."""

    def __init__(self, backend: Any, state: Any, *args: Any) -> None:
        super().__init__(state)
        self.backend = backend
