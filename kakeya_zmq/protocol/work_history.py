"""What a worker tells about its jobs, and its memory of those that have ended: bounded in number and in time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from wire.ids import NodeId


class JobState(Enum):
    """The values are the names telemetry uses."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """By the asker, by its vanishing, or by its deadline."""

    @property
    def final(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True, slots=True)
class JobView:
    """One job at one moment. Holds nothing of the prompt.

    ``tokens_total`` are those whose KV the job is about (all but the prompt's last). ``elapsed_ms`` since it was submitted,
    until it ended; ``tokens_per_second`` of what was computed for it, 0 until something was; ``eta_ms`` until it will have
    computed everything, the queue ahead included, 0 when it has; ``reason``: why it ended, empty when it is going well.
    """

    job_id: str
    """The asker's random id, hexadecimal; unique for one asker."""
    asker: NodeId
    tenant: str
    state: JobState
    tokens_total: int
    tokens_done: int
    tokens_reused: int
    elapsed_ms: float
    tokens_per_second: float
    eta_ms: float
    reason: str


@dataclass(frozen=True, slots=True)
class EndedJob:
    view: JobView
    content_digest: bytes
    ended_at: float


class JobHistory:
    """Jobs that have ended, the latest of each id.

    Args:
        jobs_max: how many are kept; the oldest one goes.
        ttl_s: how long each is kept.
    """

    def __init__(self, jobs_max: int, ttl_s: float) -> None:
        self._jobs_max = jobs_max
        self._ttl_s = ttl_s
        self._jobs: dict[tuple[NodeId, str], EndedJob] = {}
        """In the order in which they ended."""

    def add(self, view: JobView, content_digest: bytes, now: float) -> None:
        key = view.asker, view.job_id
        self._jobs.pop(key, None)
        self._jobs[key] = EndedJob(view, content_digest, now)
        self._expire(now)

    def find(self, asker: NodeId, job_id: str, now: float) -> EndedJob | None:
        self._expire(now)
        return self._jobs.get((asker, job_id))

    def forget(self, asker: NodeId, job_id: str) -> None:
        """The id is in use again."""
        self._jobs.pop((asker, job_id), None)

    def views(self, now: float) -> tuple[JobView, ...]:
        """Oldest ending first."""
        self._expire(now)
        return tuple(job.view for job in self._jobs.values())

    def _expire(self, now: float) -> None:
        while self._jobs:
            oldest = next(iter(self._jobs))
            if len(self._jobs) <= self._jobs_max and now - self._jobs[oldest].ended_at < self._ttl_s:
                return
            del self._jobs[oldest]
