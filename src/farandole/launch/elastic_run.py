# `run(function, min_num_proc=...)`: runs a function in all workers of an elastic job, also in those that start later.
# Touches launch/job.py; functions and results are sent as in executor.py.
"""Every worker gets the function when it starts, and ends after it has sent the result."""

from __future__ import annotations

from collections.abc import Callable

from farandole.base.errors import RankFailed
from farandole.launch import calls
from farandole.launch.agent_connection import StartError
from farandole.launch.job import Job
from farandole.launch.output import Sink
from farandole.launch.plan import ElasticOptions, Plan
from farandole.rendezvous.agent_messages import END, Call

FUNCTION_CALL, LAST_CALL = 1, 2


class ElasticRun:
    """Runs one function in one elastic job."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._parts = calls.Assembly()
        self._results: dict[int, tuple[int, bytes]] = {}  # worker -> its rank and what it returned
        self._failures: list[calls.Failure] = []
        self._job: Job | None = None
        self._early: list[int] = []

    def run(
        self, plan: Plan, elastic_options: ElasticOptions, sink: Sink, say: Callable[[str], None] = lambda line: None
    ) -> list[object]:
        """The results of the function, by rank; if there are more than `min_np`, the first `min_np` of them."""
        try:
            job = Job(plan, sink, say, elastic=elastic_options, on_call=self._on_call_piece, on_running=self._running)
        except StartError as error:
            raise RuntimeError(str(error)) from None
        with job:
            self._job = job
            for worker in self._early:
                self._running(worker)
            code = job.wait()
            if code or not self._results:
                self._raise(job, code)
        in_order = [data for _, data in sorted(self._results.values(), key=lambda one: one[0])]
        return [calls.unpack(data) for data in in_order[: elastic_options.limits.min_np]]

    def _running(self, worker: int) -> None:
        if self._job is None:
            self._early.append(worker)
        else:
            self._job.send_call(worker, calls.cut(worker, FUNCTION_CALL, calls.FUNCTION, self._data))

    def _on_call_piece(self, piece: Call) -> None:
        data = self._parts.add(piece)
        if data is None or self._job is None:
            return
        if piece.kind == calls.RESULT:
            self._results[piece.rank] = (self._job.rank_of(piece.rank), data)
        else:
            self._failures.append(calls.unpack_error(self._job.rank_of(piece.rank), data))
        code = b"" if piece.kind == calls.RESULT else b"1"
        self._job.send_call(piece.rank, calls.cut(piece.rank, LAST_CALL, END, code))

    def _raise(self, job: Job, code: int) -> None:
        root_cause = sorted(self._failures, key=lambda one: one.blames is not None)
        if root_cause:
            raise root_cause[0].error
        verdict = job.verdict
        rank = verdict.rank if verdict is not None else -1
        raise RankFailed(job.reason or "the ranks ended before they answered", rank=rank, code=code)
