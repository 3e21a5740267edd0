"""Prefill jobs as telemetry tells them: a worker's jobs for others, and what a primary computes itself.

Both are read off the messages that pass by, so neither the job queue nor the preparation of prompts knows of it.

Rules
- A change of state is told at once, progress at most every ``PROGRESS_INTERVAL_S`` for each job; the last progress before a
  pause is told when that time is over, never dropped.
- Progress never goes back while a job lives. A job ends once; what comes later for it is ignored.
- At most ``JOBS_MAX`` jobs are remembered; the oldest ones make room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kakeya_zmq.engine import CommandFailed, Prefill, SegmentComputed
from kakeya_zmq.protocol.effects import (
    CommandEnded,
    CommandEvent,
    RequestArrived,
    RequestCancelled,
    RequestKey,
    RunCommand,
    SendFailure,
    SendProgress,
    SendReply,
    Ticket,
    UpdateArrived,
)
from kakeya_zmq.telemetry import bounded_ms, public_text
from wire.errors import FailureCode
from wire.events import JobEvent
from wire.job_seal import sealed_token_count
from wire.messages import (
    AppendTokens,
    JobAccepted,
    JobProgress,
    JobResult,
    PrefillProgress,
    SubmitJob,
    TransferDone,
    TransferGrant,
)

PROGRESS_INTERVAL_S: Final = 0.25
JOBS_MAX: Final = 1024
FINAL_STATES: Final = frozenset({"completed", "failed", "cancelled"})

Handler = Callable[[Any, float], list[JobEvent]]


@dataclass(slots=True, eq=False)
class Job:
    """One job that has not ended."""

    job_id: str
    place: str
    asker: str
    tokens_total: int
    started: float
    state: str = "queued"
    tokens_done: int = 0
    tokens_reused: int = 0
    waiting_ms: float = 0.0
    """Estimated time until it starts, as told when it was accepted."""
    compute_started: float | None = None
    delivered: bool = False
    """The asker has said that it has everything."""
    told_at: float = -math.inf
    untold: bool = False
    """There is progress that has not been told."""

    def advance(self, done: int, now: float) -> None:
        """The KV of ``done`` tokens is there."""
        if self.compute_started is None:
            self.compute_started = now
        self.tokens_done = max(self.tokens_done, min(done, self.tokens_total))

    def tokens_per_second(self, now: float) -> float:
        computed = self.tokens_done - self.tokens_reused
        elapsed_s = now - self.compute_started if self.compute_started is not None else 0.0
        return computed / elapsed_s if computed > 0 and elapsed_s > 0 else 0.0

    def eta_ms(self, now: float) -> float:
        if self.state == "queued":
            return self.waiting_ms
        rate = self.tokens_per_second(now)
        return (self.tokens_total - self.tokens_done) / rate * 1000 if rate > 0 else 0.0


class JobBook:
    """The jobs that have not ended, and when each was told last."""

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant
        self._jobs: dict[Job, None] = {}

    def open(self, job: Job) -> None:
        if len(self._jobs) >= JOBS_MAX:
            del self._jobs[next(iter(self._jobs))]
        self._jobs[job] = None

    def __contains__(self, job: Job) -> bool:
        return job in self._jobs

    def state_changed(self, job: Job, state: str, now: float) -> list[JobEvent]:
        """Tell at once."""
        if job not in self._jobs or (job.state == state and job.told_at > -math.inf):
            return []
        job.state = state
        return [self._tell(job, now)]

    def progressed(self, job: Job, now: float) -> list[JobEvent]:
        """Tell now, or later when it was told just before."""
        if job not in self._jobs:
            return []
        job.untold = True
        return [self._tell(job, now)] if now >= job.told_at + PROGRESS_INTERVAL_S else []

    def end(self, job: Job, state: str, now: float, reason: str = "", tokens_per_second: float = 0.0) -> list[JobEvent]:
        """The job's last event; nothing when it has ended before."""
        if self._jobs.pop(job, job) is job:
            return []
        job.state = state
        if state == "completed":
            job.tokens_done = job.tokens_total
        return [self._event(job, now, public_text(reason), tokens_per_second)]

    def present(self, now: float) -> list[JobEvent]:
        """Every job that was told of and has not ended, for a reader that has just come."""
        return [self._tell(job, now) for job in self._jobs if job.told_at > -math.inf]

    def deadline(self) -> float | None:
        """When untold progress is to be told."""
        return min((job.told_at + PROGRESS_INTERVAL_S for job in self._jobs if job.untold), default=None)

    def due(self, now: float) -> list[JobEvent]:
        waiting = [job for job in self._jobs if job.untold and now >= job.told_at + PROGRESS_INTERVAL_S]
        return [self._tell(job, now) for job in waiting]

    def _tell(self, job: Job, now: float) -> JobEvent:
        job.told_at = now
        job.untold = False
        return self._event(job, now)

    def _event(self, job: Job, now: float, reason: str = "", tokens_per_second: float = 0.0) -> JobEvent:
        return JobEvent(
            job_id=job.job_id,
            place=job.place,
            state=job.state,
            asker=job.asker,
            tenant=self._tenant,
            tokens_total=job.tokens_total,
            tokens_done=job.tokens_done,
            tokens_reused=job.tokens_reused,
            elapsed_ms=bounded_ms((now - job.started) * 1000),
            tokens_per_second=bounded_ms(tokens_per_second or job.tokens_per_second(now)),
            eta_ms=0.0 if job.state in FINAL_STATES else bounded_ms(job.eta_ms(now)),
            reason=reason,
        )


class WorkerJobs:
    """Follows the jobs that other nodes submit to this one."""

    def __init__(self, book: JobBook) -> None:
        self._book = book
        self._by_key: dict[RequestKey, Job] = {}
        self._by_id: dict[tuple[str, bytes], RequestKey] = {}

    def handlers(self) -> Mapping[type, Handler]:
        """By type of event or effect, what to call with it and the time."""
        return {
            RequestArrived: self._arrived,
            UpdateArrived: self._updated,
            RequestCancelled: self._cancelled,
            SendProgress: self._progress,
            SendReply: self._replied,
            SendFailure: self._failed,
        }

    def _arrived(self, event: RequestArrived, now: float) -> list[JobEvent]:
        body = event.body
        if not isinstance(body, SubmitJob):
            return []
        name = (event.node_id, body.job_id)
        former = self._by_id.get(name)
        job = self._by_key.pop(former, None) if former is not None else None
        if job is None or job not in self._book:
            tokens = max(0, sealed_token_count(body.prompt) - 1)
            job = Job(body.job_id.hex(), "worker", event.node_id, tokens, now)
            self._book.open(job)
        self._forget_ended()
        self._by_key[event.key] = job
        self._by_id[name] = event.key
        return []

    def _updated(self, event: UpdateArrived, now: float) -> list[JobEvent]:
        job = self._by_key.get(event.key)
        if job is not None and event.body == TransferDone(complete=True):
            job.delivered = True
        return []

    def _progress(self, effect: SendProgress, now: float) -> list[JobEvent]:
        job = self._by_key.get(effect.key)
        if job is None:
            return []
        match effect.body:
            case JobAccepted(eta_ms=eta_ms):
                job.waiting_ms = float(eta_ms)
                return self._book.state_changed(job, job.state, now)
            case TransferGrant():
                return self._book.state_changed(job, "running", now)
            case JobProgress(tokens_done=done, tokens_total=total, tokens_reused=reused):
                job.tokens_total = total
                job.tokens_reused = reused
                job.advance(done, now)
                if job.state == "running":
                    return self._book.progressed(job, now)
                return self._book.state_changed(job, "running", now)
            case _:
                return []

    def _replied(self, effect: SendReply, now: float) -> list[JobEvent]:
        job = self._end(effect.key)
        if job is None:
            return []
        body = effect.body
        rate = 0.0
        if isinstance(body, JobResult):
            job.tokens_reused = body.tokens_reused
            rate = body.tokens_computed / body.compute_ms * 1000 if body.compute_ms else 0.0
        return self._book.end(job, "completed", now, tokens_per_second=rate)

    def _failed(self, effect: SendFailure, now: float) -> list[JobEvent]:
        job = self._end(effect.key)
        if job is None:
            return []
        state = "cancelled" if effect.code is FailureCode.CANCELLED else "failed"
        return self._book.end(job, state, now, effect.message)

    def _cancelled(self, event: RequestCancelled, now: float) -> list[JobEvent]:
        job = self._end(event.key)
        if job is None:
            return []
        # An asker that has everything may hang up before the reply.
        state = "completed" if job.delivered else "cancelled"
        return self._book.end(job, state, now, "" if job.delivered else event.reason)

    def _end(self, key: RequestKey) -> Job | None:
        job = self._by_key.pop(key, None)
        if job is not None:
            self._by_id = {name: known for name, known in self._by_id.items() if known != key}
        return job

    def _forget_ended(self) -> None:
        """Requests whose jobs made room for others."""
        if len(self._by_key) >= JOBS_MAX:
            self._by_key = {key: job for key, job in self._by_key.items() if job in self._book}
            self._by_id = {name: key for name, key in self._by_id.items() if key in self._by_key}


@dataclass(slots=True, eq=False)
class _Append:
    """An append under way, whose prefill may run here."""

    session_id: str
    node_id: str
    target: int = 0
    """Tokens whose KV is to be there; 0 until it has been told."""


class LocalPrefills:
    """Follows what a primary computes of its sessions' prompts itself: one job for each prefill command of an append.

    Args:
        random_bytes: makes job ids.
    """

    def __init__(self, book: JobBook, random_bytes: Callable[[int], bytes]) -> None:
        self._book = book
        self._random_bytes = random_bytes
        self._appends: dict[RequestKey, _Append] = {}
        self._jobs: dict[Ticket, tuple[Job, _Append, int]] = {}
        """With the tokens the command computes."""
        self._reasons: dict[Ticket, str] = {}

    def handlers(self) -> Mapping[type, Handler]:
        """By type of event or effect, what to call with it and the time."""
        return {
            RequestArrived: self._arrived,
            RequestCancelled: self._append_ended,
            SendProgress: self._progress,
            SendReply: self._append_ended,
            SendFailure: self._append_ended,
            RunCommand: self._run,
            CommandEvent: self._engine_event,
            CommandEnded: self._engine_ended,
        }

    def _arrived(self, event: RequestArrived, now: float) -> list[JobEvent]:
        if isinstance(event.body, AppendTokens):
            if len(self._appends) >= JOBS_MAX:
                del self._appends[next(iter(self._appends))]
            self._appends[event.key] = _Append(event.body.session_id, event.node_id)
        return []

    def _append_ended(self, seen: SendReply | SendFailure | RequestCancelled, now: float) -> list[JobEvent]:
        self._appends.pop(seen.key, None)
        return []

    def _progress(self, effect: SendProgress, now: float) -> list[JobEvent]:
        append = self._appends.get(effect.key)
        if append is None or not isinstance(effect.body, PrefillProgress):
            return []
        append.target = effect.body.tokens_total
        for job, owner, computed in self._jobs.values():
            if owner is append:
                _place(job, append, computed)
        return []

    def _run(self, effect: RunCommand, now: float) -> list[JobEvent]:
        command = effect.command
        if not isinstance(command, Prefill):
            return []
        append = next((a for a in self._appends.values() if a.session_id == command.session_id), None)
        if append is None:
            return []
        computed = len(command.tokens)
        job = Job(self._random_bytes(16).hex(), "primary", append.node_id, computed, now, compute_started=now)
        _place(job, append, computed)
        if len(self._jobs) >= JOBS_MAX:
            del self._jobs[next(iter(self._jobs))]
        self._jobs[effect.ticket] = (job, append, computed)
        self._book.open(job)
        return self._book.state_changed(job, "running", now)

    def _engine_event(self, event: CommandEvent, now: float) -> list[JobEvent]:
        entry = self._jobs.get(event.ticket)
        if entry is None:
            return []
        match event.event:
            case SegmentComputed(position=position):
                entry[0].advance(position, now)
                return self._book.progressed(entry[0], now)
            case CommandFailed(message=message):
                self._reasons[event.ticket] = message
            case _:
                pass
        return []

    def _engine_ended(self, event: CommandEnded, now: float) -> list[JobEvent]:
        entry = self._jobs.pop(event.ticket, None)
        if entry is None:
            return []
        job = entry[0]
        reason = self._reasons.pop(event.ticket, "")
        if event.cancelled:
            return self._book.end(job, "cancelled", now, reason)
        if reason or job.tokens_done < job.tokens_total:
            return self._book.end(job, "failed", now, reason or "the engine stopped early")
        return self._book.end(job, "completed", now)


def _place(job: Job, append: _Append, computed: int) -> None:
    """Say where in the prompt the computation stands, once the prompt's length is known."""
    if append.target >= computed:
        job.tokens_total = append.target
        job.tokens_reused = append.target - computed
        job.tokens_done = max(job.tokens_done, job.tokens_reused)
