"""A worker's jobs: where each of them stands, who is next, and what is remembered of those that have ended.

A job is in exactly one place: in the queue, running (one at most), draining, or among the ended ones.
"""

from __future__ import annotations

from kakeya_zmq.protocol.effects import LaneId, RequestArrived, RequestKey
from kakeya_zmq.protocol.work_history import JobHistory, JobState, JobView
from kakeya_zmq.protocol.work_job import Job, JobPhase, WorkSettings
from kakeya_zmq.protocol.work_queue import FairQueue
from kakeya_zmq.protocol.work_views import view_of, views_of
from wire.errors import FailureCode, RequestFailed
from wire.messages import JobAccepted, SubmitJob


class JobTable:
    """See the module's text. ``running`` is set by the service, everything else by the methods."""

    def __init__(self, settings: WorkSettings) -> None:
        self._settings = settings
        self._queue: FairQueue[Job] = FairQueue()
        self._queued: dict[RequestKey, Job] = {}
        """The jobs in the queue, by their present requests."""
        self._draining: list[Job] = []
        self._history = JobHistory(settings.max_ended_jobs, settings.ended_ttl_s)
        self.running: Job | None = None
        self.changes = 0
        """Grows whenever :meth:`views` may tell something new."""

    # --- looking at them ---------------------------------------------------------------------------------------------

    @property
    def queued(self) -> tuple[Job, ...]:
        """The waiting jobs, in no particular order."""
        return tuple(self._queued.values())

    def under_way(self) -> list[Job]:
        """Jobs that have started and not ended; the one that computes comes last."""
        return [*self._draining, *([self.running] if self.running else [])]

    def active(self) -> list[Job]:
        return [*self.under_way(), *self._queued.values()]

    def find(self, key: RequestKey) -> Job | None:
        return self._queued.get(key) or next((job for job in self.under_way() if job.key == key), None)

    def find_lane(self, lane: LaneId) -> Job | None:
        return next((job for job in self.under_way() if job.lane == lane), None)

    def in_order(self) -> list[Job]:
        """The waiting jobs in the order in which they are going to start."""
        return self._queue.in_order(lambda job: job.remaining_tokens)

    def late(self, now: float) -> list[Job]:
        """Jobs whose deadline has passed."""
        return [job for job in self.active() if now >= job.deadline]

    def broken(self) -> list[Job]:
        """Jobs that wait for the word of an asker whose lane broke."""
        return [job for job in self.under_way() if job.broken is not None]

    def deadline(self) -> float | None:
        due = [job.deadline for job in self.active()]
        return min([*due, *(job.broken.fails_at for job in self.under_way() if job.broken is not None)], default=None)

    def queued_tokens(self) -> int:
        """Tokens still to compute, as far as known."""
        running = [self.running] if self.running else []
        return sum(job.remaining_tokens for job in [*running, *self._queued.values()])

    def accepted(self, job: Job, tokens_per_second: float) -> JobAccepted:
        """What stands between a job and its start."""
        ahead: list[Job] = []
        if job.phase is JobPhase.QUEUED:
            order = self.in_order()
            ahead = [*([self.running] if self.running else []), *order[: order.index(job)]]
        tokens = sum(other.remaining_tokens for other in ahead)
        eta_ms = int(tokens / tokens_per_second * 1000)
        return JobAccepted(proof=job.proof, queued_jobs=len(ahead), queued_tokens=tokens, eta_ms=eta_ms)

    def views(self, now: float, tokens_per_second: float) -> tuple[JobView, ...]:
        """Those that ended within the TTL (oldest ending first), the ones under way, then the queue in its order."""
        active = views_of(self.under_way(), self.in_order(), now, speed=tokens_per_second)
        return (*self._history.views(now), *active)

    # --- moving them -------------------------------------------------------------------------------------------------

    def find_same(self, request: RequestArrived, body: SubmitJob, content_digest: bytes, now: float) -> Job | None:
        """The job that is meant by this submission and has not ended; None when there is room for a new one.

        Raises:
            RequestFailed: the id is taken for other content, or there is no room.
        """
        asker = request.node_id
        of_asker = [job for job in self.active() if job.node_id == asker]
        known = next((job for job in of_asker if job.body.job_id == body.job_id), None)
        ended = self._history.find(asker, body.job_id.hex(), now)
        for same_id in (known, ended):
            if same_id is not None and same_id.content_digest != content_digest:
                raise RequestFailed(FailureCode.INVALID_ARGUMENT, "this job id is in use for another prompt")
        settings = self._settings
        if known is None and len(self.active()) >= settings.max_jobs:
            raise RequestFailed(FailureCode.RESOURCE_EXHAUSTED, f"the job queue is full ({settings.max_jobs} jobs)")
        own = sum(job.account == request.account for job in self.active())
        if known is None and own >= settings.max_jobs_per_asker:
            text = f"{asker} already has {own} jobs here, as many as one node may have"
            raise RequestFailed(FailureCode.RESOURCE_EXHAUSTED, text)
        return known

    def enqueue(self, job: Job) -> None:
        self._forget_ended(job)
        self._queued[job.key] = job
        self._queue.push(job, tenant=job.tenant, asker=job.account)

    def take_next(self) -> Job | None:
        """The job that is to start, out of the queue."""
        job = self._queue.pop()
        if job is not None:
            del self._queued[job.key]
        return job

    def rename(self, job: Job, key: RequestKey) -> None:
        """Another request stands for the job now."""
        self.changes += 1
        if self._queued.pop(job.key, None) is not None:
            self._queued[key] = job
        job.key = key

    def run(self, job: Job, position: int) -> None:
        """It starts to compute from ``position`` on."""
        self.changes += 1
        self.running = job
        self._queue.charge(job.target - position, tenant=job.tenant, asker=job.account)

    def drain(self, job: Job) -> None:
        """It has everything; wherever it was, only its lane is still at work."""
        self._forget_ended(job)
        self._leave(job)
        job.ready_final = True
        job.phase = JobPhase.DRAINING
        self._draining.append(job)

    def end(self, job: Job, state: JobState, reason: str, now: float) -> None:
        """It has come to its final state."""
        self.changes += 1
        self._history.add(view_of(job, state, now, eta_ms=0.0, reason=reason), job.content_digest, now)
        self._leave(job)
        job.phase = JobPhase.ENDED

    def _forget_ended(self, job: Job) -> None:
        self.changes += 1
        self._history.forget(job.node_id, job.job_id)

    def _leave(self, job: Job) -> None:
        if self._queued.pop(job.key, None) is not None:
            self._queue.remove(job)
        if job in self._draining:
            self._draining.remove(job)
        if self.running is job:
            self.running = None
