# The context around a train function of Ray Train, elastic or not.
# Touches the room world.
"""Ray Train enters `Rank` as a context around the train function."""

from __future__ import annotations

from types import TracebackType

from farandole.world import basics

LEAVE_SECONDS = 5.0  # workers have this long to leave the job when the group is shut down


class Rank:
    """Wraps the train function: a worker that finishes leaves the job. After an error Ray ends the other workers."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            basics.shutdown()
