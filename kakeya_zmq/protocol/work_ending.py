"""How a job of a worker ends, once and in any phase: what its asker gets, and what it gives back."""

from __future__ import annotations

from kakeya_zmq.protocol.effects import CancelCommand, Count, Effect, SendFailure, SendReply
from kakeya_zmq.protocol.work_engine import JobEngine
from kakeya_zmq.protocol.work_history import JobState
from kakeya_zmq.protocol.work_job import Job
from kakeya_zmq.protocol.work_lane import drop_lane
from kakeya_zmq.protocol.work_store import JobStore
from kakeya_zmq.protocol.work_table import JobTable
from wire.errors import FailureCode
from wire.messages import JobResult


class JobEnding:
    """Ends the jobs of one worker; each method gives the effects of one ending."""

    def __init__(self, table: JobTable, store: JobStore, engine: JobEngine) -> None:
        self._table = table
        self._store = store
        self._engine = engine

    def complete(self, job: Job, sent_bytes: int, now: float) -> list[Effect]:
        """The asker has everything and waits for the reply."""
        result = JobResult(
            tokens_computed=job.target - job.tokens_reused,
            tokens_reused=job.tokens_reused,
            compute_ms=int(job.compute_ms),
            sent_bytes=sent_bytes,
        )
        sent = Count("job_bytes_sent", sent_bytes)
        return [Count("jobs_completed"), sent, SendReply(job.key, result), *self._end(job, JobState.COMPLETED, "", now)]

    def fail(self, job: Job, code: FailureCode, message: str, now: float) -> list[Effect]:
        """Something went wrong with it."""
        failure = SendFailure(job.key, code, message)
        return [Count("jobs_failed"), failure, *self._end(job, JobState.FAILED, message, now)]

    def give_up(self, job: Job, code: FailureCode, message: str, now: float) -> list[Effect]:
        """Nobody waits for it any more, but its request is still open."""
        failure = SendFailure(job.key, code, message)
        return [Count("jobs_cancelled"), failure, *self._end(job, JobState.CANCELLED, message, now)]

    def abandon(self, job: Job, reason: str, now: float) -> list[Effect]:
        """Its request has ended already."""
        if job.asker_done:  # an asker that has everything may hang up before the reply
            return [Count("jobs_completed"), *self._end(job, JobState.COMPLETED, "", now)]
        return [Count("jobs_cancelled"), *self._end(job, JobState.CANCELLED, reason, now)]

    def release_engine(self, job: Job) -> list[Effect]:
        """It computes no more: its room in the store and its engine session are free for the next one."""
        self._store.release(job)
        return self._engine.close(job)

    def _end(self, job: Job, state: JobState, reason: str, now: float) -> list[Effect]:
        computing = self._table.running is job
        effects = drop_lane(job, reason or "done")
        self._table.end(job, state, reason, now)
        if computing:
            if job.ticket is not None:
                effects.append(CancelCommand(job.ticket))
            effects += self.release_engine(job)
        return effects
