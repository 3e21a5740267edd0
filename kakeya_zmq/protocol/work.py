"""The worker side of prefill jobs.

Rules
- A job computes the KV of all its tokens but the last (the asker runs that one itself) and sends the asker the parts it
  lacks, while later segments are still being computed. Everything computed also goes into the worker's own store.
- Jobs wait in one bounded queue that is fair between tenants and askers (kakeya_zmq.protocol.work_queue) and run one at a
  time: the model has one thread.
- The same prefix is computed once. A job whose KV is all in the store does not wait for the engine: neither when it comes,
  nor when another asker's job has just computed it.
- Capacity is checked when a job is submitted and reserved before it computes; a job that cannot fit never starts. Room is
  reserved for what is not there yet, after the job's own prefix has been marked as used, so that it is not evicted for it.
- A prompt comes sealed for holders of the tenant's key, and the first answer proves that this worker has it (wire.job_seal).
  What does not open is refused: so only they have anything computed here.
- The same job id with the same content, from the same node, attaches to the job that exists (the older request ends with
  ABORTED, the transfer starts again on a new lane); other content under a used id is refused.
- A request ends exactly once: by a reply, a failure, or silently when nobody waits any more. A job ends at its deadline
  at the latest. Ended jobs are remembered for a while; their ids are not taken for other content.

Theory of operation
    queued --start--> importing --> computing --> draining --> ended
       '---- all of it is in the store ------------^
A job *starts* by opening an engine session and binding a sender lane; it *imports* its own longest cached prefix, *computes*
the rest segment by segment, then *drains*: the lane holds the last parts until the asker says TransferDone. A job whose KV
is all in the store drains at once and needs no engine. It may end in every phase (cancelled, deadline, peer lost, lane or
engine failed). Engine commands in flight are cancelled at their next segment edge; the next job starts when the engine
session of the last one has been closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from kakeya_zmq.blocks import Part, bind_parts, needed_parts, raw_part
from kakeya_zmq.coverage import best_boundary
from kakeya_zmq.engine import (
    KV_NOT_ENCODED,
    CloseSession,
    CommandFailed,
    Event,
    ImportPrefix,
    ModelFacts,
    OpenSession,
    Prefill,
    PrefixImported,
    SegmentComputed,
)
from kakeya_zmq.protocol.effects import (
    AddCredit,
    CancelCommand,
    CloseLane,
    CommandEnded,
    CommandEvent,
    Count,
    Effect,
    HostEvent,
    LaneFinished,
    LaneOpened,
    Note,
    Refuse,
    RequestArrived,
    RequestCancelled,
    RunCommand,
    SendFailure,
    SendProgress,
    SendReply,
    Ticket,
    UpdateArrived,
)
from kakeya_zmq.protocol.prepare_values import IdAllocator
from kakeya_zmq.protocol.work_door import NOT_SEALED_FOR_US, JobDoor, Submission
from kakeya_zmq.protocol.work_history import JobState, JobView
from kakeya_zmq.protocol.work_job import (
    Job,
    JobPhase,
    WorkSettings,
    check_submission,
    make_job,
    parts_bytes,
)
from kakeya_zmq.protocol.work_lane import bind_lane, drop_lane, feed_lane
from kakeya_zmq.protocol.work_table import JobTable
from kakeya_zmq.store import BlockStore
from wire.errors import CapacityError, FailureCode, InvalidInput, RequestFailed
from wire.job_seal import JobKeys
from wire.messages import (
    Credit,
    JobAccepted,
    JobProgress,
    JobResult,
    SubmitJob,
    TransferDone,
    UpdateBody,
)

__all__ = ["JobPhase", "JobState", "JobView", "WorkService", "WorkSettings"]

SPEED_WEIGHT = 0.25
"""Weight of a new sample in the moving average of the speed."""


class WorkService:
    """Runs prefill jobs on the node's engine. Events and effects: kakeya_zmq.protocol.effects.

    Args:
        facts: the loaded model's.
        tenant_key: key of the tenant this worker serves, 32 bytes: for the hash chain, and to open prompts.
        identity_public_key: this node's own, 32 bytes.
        store: the node's block store.
        ids: numbers for lanes and tickets, shared by all machines of the process.
        has_aes: whether this machine seals faster with AES than with secretbox.
    """

    def __init__(
        self,
        *,
        facts: ModelFacts,
        tenant_key: bytes,
        identity_public_key: bytes,
        store: BlockStore,
        ids: IdAllocator,
        has_aes: bool,
        settings: WorkSettings | None = None,
    ) -> None:
        self._facts = facts
        self._fingerprint = facts.compatibility.fingerprint()
        self._tenant_key = tenant_key
        self._door = JobDoor(JobKeys(tenant_key), self._fingerprint, identity_public_key)
        self._store = store
        self._has_stored = store.presence(self._fingerprint)
        self._ids = ids
        self._has_aes = has_aes
        self._settings = settings or WorkSettings()
        self._job_number = 0
        self._table = JobTable(self._settings)
        self._closing: Ticket | None = None
        """The CloseSession of the job that ran last, until it has ended."""
        self._stopping: str | None = None
        self._told_not_encoded = False
        self.tokens_per_second = 0.0
        """EWMA over finished jobs, of computed tokens only; 0 until one was measured."""

    # --- what others may ask -----------------------------------------------------------------------------------

    @staticmethod
    def handles(body: object) -> bool:
        """Whether a request body is this service's business."""
        return isinstance(body, SubmitJob)

    @property
    def queued_jobs(self) -> int:
        return len(self._table.queued)

    @property
    def running_jobs(self) -> int:
        """Jobs that have started and not ended; at most one of them computes."""
        return len(self._table.under_way())

    @property
    def queued_tokens(self) -> int:
        """Tokens still to compute in queued and running jobs, as far as known."""
        return self._table.queued_tokens()

    @property
    def load(self) -> float:
        """How much of the room for jobs is taken, 0 to 1."""
        return min(1.0, len(self._table.active()) / self._settings.max_jobs)

    @property
    def idle(self) -> bool:
        return not self._table.active() and self._closing is None

    @property
    def changes(self) -> int:
        """Grows whenever :meth:`jobs` may tell something new; a reader that has seen this number need not look again."""
        return self._table.changes

    def jobs(self, now: float) -> tuple[JobView, ...]:
        """Every job: those that ended within the TTL (oldest ending first), the ones under way, then the queue in the order
        in which it is going to start."""
        return self._table.views(now, self._speed)

    def deadline(self) -> float | None:
        """When to send a Tick, seconds on the clock of ``now``: the first deadline of a job."""
        return self._table.deadline()

    # --- the machine -------------------------------------------------------------------------------------------

    def on(self, event: HostEvent, now: float) -> list[Effect]:
        """Advance by one event; events that are not this machine's are ignored."""
        return [*self._pass_time(now), *self._on(event, now)]

    def _on(self, event: HostEvent, now: float) -> list[Effect]:
        match event:
            case RequestArrived(body=SubmitJob() as body):
                return self._submit(event, body, now)
            case UpdateArrived(key=key, body=body):
                job = self._table.find(key)
                return [] if job is None else self._update(job, body, now)
            case RequestCancelled(key=key, reason=reason):
                job = self._table.find(key)
                return [] if job is None else self._abandon(job, reason, now)
            case LaneOpened(lane=lane, grant=grant):
                job = self._table.find_lane(lane)
                if job is None:
                    return []
                job.lane_ready = True
                return [SendProgress(job.key, grant), *feed_lane(job)]
            case LaneFinished():
                return self._lane_finished(event, now)
            case CommandEvent(ticket=ticket, event=engine_event):
                job = self._table.running
                return [] if job is None or job.ticket != ticket else self._engine_event(job, engine_event, now)
            case CommandEnded(ticket=ticket):
                return self._command_ended(ticket, now)
            case _:
                return []

    def _pass_time(self, now: float) -> list[Effect]:
        """End the jobs whose time is over; whoever serves the requests may have done so already."""
        effects: list[Effect] = []
        for job in self._table.late(now):
            effects += self._give_up(job, FailureCode.DEADLINE_EXCEEDED, "the job was not done within its deadline", now)
        return effects

    def shutdown(self, reason: str, now: float) -> list[Effect]:
        """End every job with UNAVAILABLE, so that askers can go elsewhere at once, and take no new ones."""
        self._stopping = reason
        effects: list[Effect] = []
        for job in self._table.active():
            effects += self._fail(job, FailureCode.UNAVAILABLE, reason, now)
        return effects

    def distrust_store(self, now: float) -> list[Effect]:
        """What was in the store may be wrong: jobs that rest on it end, and their askers find another way."""
        effects: list[Effect] = []
        for job in self._table.under_way():
            if job.tokens_reused > 0:
                text = "what this job was to reuse may have come from a node that is revoked now"
                effects += self._fail(job, FailureCode.UNAVAILABLE, text, now)
        return effects

    # --- submission ------------------------------------------------------------------------------------------------

    def _submit(self, event: RequestArrived, body: SubmitJob, now: float) -> list[Effect]:
        try:
            submission = self._open(event, body)
            job = self._admit(event, body, submission, now)
        except RequestFailed as error:
            refused: list[Effect] = [Count("jobs_refused"), SendFailure(event.key, error.code, str(error))]
            untrue = error.code is FailureCode.UNAUTHENTICATED
            return [*refused, Refuse(event.node_id, NOT_SEALED_FOR_US)] if untrue else refused
        if job.key != event.key:
            return self._attach(job, event, body, submission.proof)
        job.expected_reuse = best_boundary(job.chain, self._facts.requirement, self._has_stored)
        if job.expected_reuse == job.target:
            accepted = JobAccepted(proof=job.proof, queued_jobs=0, queued_tokens=0, eta_ms=0)
            return [Count("jobs_accepted"), SendProgress(event.key, accepted), *self._serve(job, now)]
        self._table.enqueue(job)
        accepted = self._table.accepted(job, self._speed)
        return [Count("jobs_accepted"), SendProgress(event.key, accepted), *self._start_next(now)]

    def _open(self, event: RequestArrived, body: SubmitJob) -> Submission:
        """What the asker meant.

        Raises:
            RequestFailed: this worker is stopping, or it cannot open it.
        """
        if self._stopping is not None:
            raise RequestFailed(FailureCode.UNAVAILABLE, self._stopping)
        return self._door.open(event, body)

    def _admit(self, event: RequestArrived, body: SubmitJob, submission: Submission, now: float) -> Job:
        """A new job, or the one that exists under this id.

        Raises:
            RequestFailed: it is refused.
        """
        tokens = check_submission(body, submission.packed_tokens, self._facts, self._settings)
        known = self._table.find_same(event.node_id, body, submission.content_digest, now)
        if known is not None:
            return known
        self._job_number += 1
        job = make_job(
            event,
            body,
            submission,
            tokens,
            facts=self._facts,
            tenant_key=self._tenant_key,
            number=self._job_number,
            now=now,
        )
        needed_bytes = parts_bytes(self._facts, job.chain, job.needed)
        if needed_bytes > self._store.max_bytes:
            text = f"the prompt's KV needs {needed_bytes} bytes and this worker's cache holds {self._store.max_bytes}"
            raise RequestFailed(FailureCode.RESOURCE_EXHAUSTED, text)
        return job

    @property
    def _speed(self) -> float:
        return self.tokens_per_second or self._settings.default_tokens_per_second

    def _attach(self, job: Job, request: RequestArrived, body: SubmitJob, proof: bytes) -> list[Effect]:
        """Serve the newer request; it may want other chunks and seals, and has nothing of what the old lane sent."""
        effects: list[Effect] = [
            Count("jobs_attached"),
            SendFailure(job.key, FailureCode.ABORTED, "the job was taken over by a newer request"),
            *drop_lane(job, "taken over"),
        ]
        self._table.rename(job, request.key)
        job.deadline = request.deadline
        job.body = body
        job.proof = proof
        job.fed = 0
        job.final_fed = False
        job.asker_done = False
        effects.append(SendProgress(job.key, self._table.accepted(job, self._speed)))
        if job.phase is not JobPhase.QUEUED:
            effects += self._bind_lane(job)
        return effects

    # --- running ---------------------------------------------------------------------------------------------------

    def _start_next(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._table.running is None and self._closing is None:
            job = self._table.take_next()
            if job is None:
                break
            effects += self._start(job, now)
        return effects

    def _serve(self, job: Job, now: float) -> list[Effect]:
        """Everything is in the store: nothing to import or compute, since this worker never decodes."""
        held = [part for ref in job.needed if (part := self._store.get(ref, fingerprint=self._fingerprint)) is not None]
        self._store.touch(job.needed, now, fingerprint=self._fingerprint)
        job.position = job.tokens_reused = job.target
        job.make_ready(held)
        self._table.drain(job)
        return [*self._bind_lane(job), Count("job_tokens_reused", job.target), Count("jobs_computed"), self._progress(job)]

    def _serve_same(self, done: Job, now: float) -> list[Effect]:
        """Serve the waiting jobs whose prompts a job has just computed, as far as the store kept them."""
        ends = {block.block_hash for block in done.chain.blocks}
        effects: list[Effect] = []
        for job in self._table.queued:
            if job.chain.blocks[-1].block_hash in ends and all(map(self._has_stored, job.needed)):
                effects += [Count("jobs_shared"), *self._serve(job, now)]
        return effects

    def _start(self, job: Job, now: float) -> list[Effect]:
        requirement = self._facts.requirement
        position = best_boundary(job.chain, requirement, self._has_stored)
        if position == job.target:
            return self._serve(job, now)
        refs = needed_parts(job.chain, position, requirement)
        held = [part for ref in refs if (part := self._store.get(ref, fingerprint=self._fingerprint)) is not None]
        self._store.touch(refs, now, fingerprint=self._fingerprint)
        lacking_bytes = parts_bytes(self._facts, job.chain, (ref for ref in job.needed if not self._has_stored(ref)))
        if lacking_bytes > 0:
            try:
                self._store.reserve(job.reservation_id, lacking_bytes, now)
            except CapacityError as error:
                return self._fail(job, FailureCode.RESOURCE_EXHAUSTED, str(error), now)
        self._table.run(job, position)
        job.phase = JobPhase.IMPORTING
        job.tokens_reused = position
        job.make_ready(held)
        effects = self._bind_lane(job)
        job.session_open = True
        effects.append(RunCommand(self._ids.ticket(), OpenSession(job.engine_session)))
        if position == 0:
            return [*effects, *self._begin_compute(job, now)]
        parts = sorted((raw_part(part) for part in held), key=lambda part: (part.start, part.kind))
        job.ticket = self._ids.ticket()
        return [*effects, RunCommand(job.ticket, ImportPrefix(job.engine_session, position, tuple(parts)))]

    def _begin_compute(self, job: Job, now: float) -> list[Effect]:
        job.phase = JobPhase.COMPUTING
        job.compute_started = now
        job.ticket = self._ids.ticket()
        remaining = job.tokens[job.position : job.target]
        return [
            RunCommand(job.ticket, Prefill(job.engine_session, remaining, capture=True)),
            self._progress(job),
            *feed_lane(job),
        ]

    def _engine_event(self, job: Job, event: Event, now: float) -> list[Effect]:
        match event:
            case PrefixImported(position=position):
                job.position = position
                self._table.changes += 1
                return [Count("job_tokens_reused", position)]
            case SegmentComputed(parts_not_encoded=lost) if lost:
                return self._refuse_kv(job, lost, now)
            case SegmentComputed(position=position, parts=raw_parts):
                computed = position - job.position
                try:
                    parts = bind_parts(job.chain, raw_parts)
                except ValueError:  # the engine cut other blocks than the chain has: nothing that can be sent
                    return self._fail(job, FailureCode.INTERNAL, "the engine's parts do not fit the prompt", now)
                job.position = position
                self._table.changes += 1
                job.make_ready(parts)
                kept = self._keep(job, parts, now)
                return [Count("job_tokens_computed", computed), *kept, self._progress(job), *feed_lane(job)]
            case CommandFailed(message=message):
                if job.phase is JobPhase.IMPORTING:
                    return self._recover_import(job, message)
                return self._fail(job, FailureCode.INTERNAL, f"prefill failed: {message}", now)
            case _:
                return []

    def _refuse_kv(self, job: Job, lost_parts: int, now: float) -> list[Effect]:
        """The codec cannot store what the model computes: no job would deliver, so this one ends as soon as it shows."""
        effects: list[Effect] = [Count("parts_not_encoded", lost_parts)]
        if not self._told_not_encoded:
            self._told_not_encoded = True
            effects.append(Note("error", KV_NOT_ENCODED))
        return [*effects, *self._fail(job, FailureCode.DATA_LOSS, KV_NOT_ENCODED, now)]

    def _recover_import(self, job: Job, message: str) -> list[Effect]:
        """Drop a prefix that cannot be imported and compute it again: a cache fault is only ever a miss."""
        for ref in needed_parts(job.chain, job.tokens_reused, self._facts.requirement):
            self._store.invalidate(ref, fingerprint=self._fingerprint)
        job.tokens_reused = job.position = 0
        job.forget_ready()
        note = Note("warning", f"a cached prefix could not be imported and is computed again: {message}")
        return [Count("import_failures"), note]

    def _command_ended(self, ticket: Ticket, now: float) -> list[Effect]:
        if ticket == self._closing:
            self._closing = None
            return self._start_next(now)
        job = self._table.running
        if job is None or job.ticket != ticket:
            return []
        job.ticket = None
        if job.phase is JobPhase.IMPORTING and job.position == job.tokens_reused:
            return self._begin_compute(job, now)
        if job.position < job.target:
            return self._fail(job, FailureCode.INTERNAL, "the engine stopped before the prompt was done", now)
        return self._finish_compute(job, now)

    def _finish_compute(self, job: Job, now: float) -> list[Effect]:
        assert job.compute_started is not None, "what is all in the store is not computed"
        job.compute_ms = (now - job.compute_started) * 1000
        self._measure(job.target - job.tokens_reused, job.compute_ms)
        self._table.drain(job)
        own = [Count("jobs_computed"), self._progress(job), *feed_lane(job), *self._release_engine(job)]
        return [*own, *self._serve_same(job, now)]

    def _measure(self, computed_tokens: int, elapsed_ms: float) -> None:
        if elapsed_ms <= 0:
            return
        sample = computed_tokens / (elapsed_ms / 1000)
        known = self.tokens_per_second
        self.tokens_per_second = sample if known == 0 else known + SPEED_WEIGHT * (sample - known)

    def _release_engine(self, job: Job) -> list[Effect]:
        self._store.release_reservation(job.reservation_id)
        if not job.session_open:
            return []
        job.session_open = False
        self._closing = self._ids.ticket()
        return [RunCommand(self._closing, CloseSession(job.engine_session))]

    def _keep(self, job: Job, parts: Sequence[Part], now: float) -> list[Effect]:
        """Store what was computed. Room was reserved for what a hit needs; the rest takes what it can get."""
        failures = 0
        needed = frozenset(job.needed)
        for part in parts:
            reservation_id = job.reservation_id if part.meta.ref in needed else None
            try:
                self._store.put(part, fingerprint=self._fingerprint, now=now, reservation_id=reservation_id)
            except (CapacityError, InvalidInput):
                # No room, or somebody published nonsense under this hash. The asker still gets the part over the lane;
                # only later reuse from this worker is lost.
                failures += 1
        return [Count("put_failures", failures)] if failures else []

    # --- lanes -------------------------------------------------------------------------------------------------------

    def _bind_lane(self, job: Job) -> list[Effect]:
        return bind_lane(job, self._ids.lane(), has_aes=self._has_aes)

    def _update(self, job: Job, body: UpdateBody, now: float) -> list[Effect]:
        match body:
            case Credit(credit_bytes=credit_bytes):
                return [] if job.lane is None or job.asker_done else [AddCredit(job.lane, credit_bytes)]
            case TransferDone(complete=complete):
                if job.asker_done:
                    return []
                if not complete:
                    return self._give_up(job, FailureCode.ABORTED, "the asker gave the transfer up", now)
                if job.lane is None:
                    return self._give_up(job, FailureCode.ABORTED, "the asker ended the transfer before it began", now)
                job.asker_done = True
                return [CloseLane(job.lane, True, "done")]
            case _:
                assert_never(body)

    def _lane_finished(self, event: LaneFinished, now: float) -> list[Effect]:
        job = self._table.find_lane(event.lane)
        if job is None:
            return []
        job.lane = None
        if not (event.ok and job.asker_done and job.final_fed):
            return self._fail(job, FailureCode.UNAVAILABLE, f"the transfer ended early: {event.reason}", now)
        result = JobResult(
            tokens_computed=job.target - job.tokens_reused,
            tokens_reused=job.tokens_reused,
            compute_ms=int(job.compute_ms),
            sent_bytes=event.transferred_bytes,
        )
        sent = Count("job_bytes_sent", event.transferred_bytes)
        return [Count("jobs_completed"), sent, SendReply(job.key, result), *self._end(job, JobState.COMPLETED, "", now)]

    # --- endings ---------------------------------------------------------------------------------------------------

    def _fail(self, job: Job, code: FailureCode, message: str, now: float) -> list[Effect]:
        failure = SendFailure(job.key, code, message)
        return [Count("jobs_failed"), failure, *self._end(job, JobState.FAILED, message, now)]

    def _give_up(self, job: Job, code: FailureCode, message: str, now: float) -> list[Effect]:
        """Nobody waits for it any more, but its request is still open."""
        failure = SendFailure(job.key, code, message)
        return [Count("jobs_cancelled"), failure, *self._end(job, JobState.CANCELLED, message, now)]

    def _abandon(self, job: Job, reason: str, now: float) -> list[Effect]:
        if job.asker_done:  # an asker that has everything may hang up before the reply
            return [Count("jobs_completed"), *self._end(job, JobState.COMPLETED, "", now)]
        return [Count("jobs_cancelled"), *self._end(job, JobState.CANCELLED, reason, now)]

    def _end(self, job: Job, state: JobState, reason: str, now: float) -> list[Effect]:
        computing = self._table.running is job
        effects = drop_lane(job, reason or "done")
        self._table.end(job, state, reason, now)
        if computing:
            if job.ticket is not None:
                effects.append(CancelCommand(job.ticket))
            # The runner keeps commands of one engine session in order, so the close comes after the cancelled one.
            effects += self._release_engine(job)
        return effects

    def _progress(self, job: Job) -> Effect:
        body = JobProgress(tokens_done=job.position, tokens_total=job.target, tokens_reused=job.tokens_reused)
        return SendProgress(job.key, body)
