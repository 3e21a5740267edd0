"""Views of a worker's jobs: what telemetry and status may tell about them."""

from __future__ import annotations

from collections.abc import Sequence

from kakeya_zmq.protocol.work_history import JobState, JobView
from kakeya_zmq.protocol.work_job import Job
from wire.limits import TEXT_CHARACTERS_MAX


def view_of(job: Job, state: JobState, now: float, *, eta_ms: float, reason: str = "") -> JobView:
    """One job as it stands."""
    imported = job.position >= job.tokens_reused
    return JobView(
        job_id=job.job_id,
        asker=job.node_id,
        tenant=job.tenant,
        state=state,
        tokens_total=job.target,
        tokens_done=job.position,
        tokens_reused=job.tokens_reused if imported else 0,
        elapsed_ms=(now - job.submitted_at) * 1000,
        tokens_per_second=job.computed_per_second(now),
        eta_ms=eta_ms,
        reason=reason[:TEXT_CHARACTERS_MAX],
    )


def views_of(under_way: Sequence[Job], queue: Sequence[Job], now: float, *, speed: float) -> tuple[JobView, ...]:
    """The jobs that have started, then those that wait, in the order in which they are going to start.

    Args:
        under_way: the one that computes comes last.
        speed: tokens per second of this worker, > 0; a job that has its own is measured by it.
    """
    views: list[JobView] = []
    ahead_ms = 0.0
    for job in under_way:
        left_ms = job.remaining_tokens / (job.computed_per_second(now) or speed) * 1000
        ahead_ms = max(ahead_ms, left_ms)
        views.append(view_of(job, JobState.RUNNING, now, eta_ms=left_ms))
    for job in queue:
        ahead_ms += job.remaining_tokens / speed * 1000
        views.append(view_of(job, JobState.QUEUED, now, eta_ms=ahead_ms))
    return tuple(views)
