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
- A lane that breaks does not end its job at once: the asker's cancellation, or its word that it has everything, may be
  behind it on another connection.
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

from typing import assert_never

from kakeya_zmq.blocks import bind_parts
from kakeya_zmq.engine import KV_NOT_ENCODED, CommandFailed, Event, ModelFacts, PrefixImported, SegmentComputed
from kakeya_zmq.protocol.effects import (
    AddCredit,
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
    SendFailure,
    SendProgress,
    Ticket,
    UpdateArrived,
)
from kakeya_zmq.protocol.prepare_values import IdAllocator
from kakeya_zmq.protocol.work_admission import JobAdmission
from kakeya_zmq.protocol.work_door import NOT_SEALED_FOR_US
from kakeya_zmq.protocol.work_ending import JobEnding
from kakeya_zmq.protocol.work_engine import JobEngine
from kakeya_zmq.protocol.work_history import JobState, JobView
from kakeya_zmq.protocol.work_job import LANE_GRACE_S, BrokenLane, Job, JobPhase, WorkSettings
from kakeya_zmq.protocol.work_lane import bind_lane, drop_lane, feed_lane
from kakeya_zmq.protocol.work_store import JobStore
from kakeya_zmq.protocol.work_table import JobTable
from kakeya_zmq.store import BlockStore
from wire.errors import CapacityError, FailureCode, RequestFailed
from wire.messages import Credit, JobAccepted, JobProgress, SubmitJob, TransferDone, UpdateBody

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
        self._ids = ids
        self._has_aes = has_aes
        self._settings = settings or WorkSettings()
        self._table = JobTable(self._settings)
        self._store = JobStore(facts, store)
        self._engine = JobEngine(ids)
        self._ending = JobEnding(self._table, self._store, self._engine)
        self._admission = JobAdmission(
            facts=facts,
            tenant_key=tenant_key,
            identity_public_key=identity_public_key,
            settings=self._settings,
            table=self._table,
            store=self._store,
        )
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
        return not self._table.active() and not self._engine.closing

    @property
    def changes(self) -> int:
        """Grows whenever :meth:`jobs` may tell something new; a reader that has seen this number need not look again."""
        return self._table.changes

    def jobs(self, now: float) -> tuple[JobView, ...]:
        """Every job: those that ended within the TTL (oldest ending first), the ones under way, then the queue in the order
        in which it is going to start."""
        return self._table.views(now, self._speed)

    def deadline(self) -> float | None:
        """When to send a Tick, seconds on the clock of ``now``: the first deadline of a job or broken lane."""
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
                return [] if job is None else self._ending.abandon(job, reason, now)
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
        text = "the job was not done within its deadline"
        for job in self._table.late(now):
            effects += self._ending.give_up(job, FailureCode.DEADLINE_EXCEEDED, text, now)
        for job in self._table.broken():
            if job.broken is not None and now >= job.broken.fails_at:
                early = f"the transfer ended early: {job.broken.reason}"
                effects += self._ending.fail(job, FailureCode.UNAVAILABLE, early, now)
        return effects

    def shutdown(self, reason: str, now: float) -> list[Effect]:
        """End every job with UNAVAILABLE, so that askers can go elsewhere at once, and take no new ones."""
        self._admission.stop(reason)
        effects: list[Effect] = []
        for job in self._table.active():
            effects += self._ending.fail(job, FailureCode.UNAVAILABLE, reason, now)
        return effects

    def distrust_store(self, now: float) -> list[Effect]:
        """What was in the store may be wrong: jobs that rest on it end, and their askers find another way."""
        effects: list[Effect] = []
        for job in self._table.under_way():
            if job.tokens_reused > 0:
                text = "what this job was to reuse may have come from a node that is revoked now"
                effects += self._ending.fail(job, FailureCode.UNAVAILABLE, text, now)
        return effects

    # --- submission ------------------------------------------------------------------------------------------------

    def _submit(self, event: RequestArrived, body: SubmitJob, now: float) -> list[Effect]:
        try:
            job, submission = self._admission.admit(event, body, now)
        except RequestFailed as error:
            refused: list[Effect] = [Count("jobs_refused"), SendFailure(event.key, error.code, str(error))]
            untrue = error.code is FailureCode.UNAUTHENTICATED
            return [*refused, Refuse(event.node_id, NOT_SEALED_FOR_US)] if untrue else refused
        if job.key != event.key:
            return self._attach(job, event, body, submission.proof, now)
        job.expected_reuse = self._store.prefix_of(job)
        if job.expected_reuse == job.target:
            accepted = JobAccepted(proof=job.proof, queued_jobs=0, queued_tokens=0, eta_ms=0)
            return [Count("jobs_accepted"), SendProgress(event.key, accepted), *self._serve(job, now)]
        self._table.enqueue(job)
        accepted = self._table.accepted(job, self._speed)
        return [Count("jobs_accepted"), SendProgress(event.key, accepted), *self._start_next(now)]

    @property
    def _speed(self) -> float:
        return self.tokens_per_second or self._settings.default_tokens_per_second

    def _attach(self, job: Job, request: RequestArrived, body: SubmitJob, proof: bytes, now: float) -> list[Effect]:
        """Serve the newer request; it may want other chunks and seals, and has nothing of what the old lane sent."""
        effects: list[Effect] = [
            Count("jobs_attached"),
            SendFailure(job.key, FailureCode.ABORTED, "the job was taken over by a newer request"),
            *drop_lane(job, "taken over"),
        ]
        self._table.rename(job, request.key)
        job.deadline = request.deadline
        if job.phase is JobPhase.DRAINING:
            job.limit_drain(now)
        job.body = body
        job.proof = proof
        job.fed = 0
        job.final_fed = False
        job.asker_done = False
        job.broken = None
        effects.append(SendProgress(job.key, self._table.accepted(job, self._speed)))
        if job.phase is not JobPhase.QUEUED:
            effects += self._bind_lane(job)
        return effects

    # --- running ---------------------------------------------------------------------------------------------------

    def _start_next(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._table.running is None and not self._engine.closing:
            job = self._table.take_next()
            if job is None:
                break
            effects += self._start(job, now)
        return effects

    def _serve(self, job: Job, now: float) -> list[Effect]:
        """Everything is in the store: nothing to import or compute, since this worker never decodes."""
        held = self._store.take_all(job, now)
        job.position = job.tokens_reused = job.target
        job.make_ready(held)
        self._table.drain(job)
        job.limit_drain(now)
        return [*self._bind_lane(job), Count("job_tokens_reused", job.target), Count("jobs_computed"), self._progress(job)]

    def _serve_same(self, done: Job, now: float) -> list[Effect]:
        """Serve the waiting jobs whose prompts a job has just computed, as far as the store kept them."""
        ends = {block.block_hash for block in done.chain.blocks}
        effects: list[Effect] = []
        for job in self._table.queued:
            if job.chain.blocks[-1].block_hash in ends and self._store.holds_all(job):
                effects += [Count("jobs_shared"), *self._serve(job, now)]
        return effects

    def _start(self, job: Job, now: float) -> list[Effect]:
        position = self._store.prefix_of(job)
        if position == job.target:
            return self._serve(job, now)
        held = self._store.take_prefix(job, position, now)
        try:
            self._store.reserve(job, now)
        except CapacityError as error:
            return self._ending.fail(job, FailureCode.RESOURCE_EXHAUSTED, str(error), now)
        self._table.run(job, position)
        job.phase = JobPhase.IMPORTING
        job.tokens_reused = position
        job.make_ready(held)
        effects = [*self._bind_lane(job), *self._engine.open(job)]
        if position == 0:
            return [*effects, *self._begin_compute(job, now)]
        return [*effects, *self._engine.import_prefix(job, position, held)]

    def _begin_compute(self, job: Job, now: float) -> list[Effect]:
        return [*self._engine.compute(job, now), self._progress(job), *feed_lane(job)]

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
                    return self._ending.fail(job, FailureCode.INTERNAL, "the engine's parts do not fit the prompt", now)
                job.position = position
                self._table.changes += 1
                job.make_ready(parts)
                kept = self._store.keep(job, parts, now)
                return [Count("job_tokens_computed", computed), *kept, self._progress(job), *feed_lane(job)]
            case CommandFailed(message=message):
                if job.phase is JobPhase.IMPORTING:
                    return self._recover_import(job, message)
                return self._ending.fail(job, FailureCode.INTERNAL, f"prefill failed: {message}", now)
            case _:
                return []

    def _refuse_kv(self, job: Job, lost_parts: int, now: float) -> list[Effect]:
        """The codec cannot store what the model computes: no job would deliver, so this one ends as soon as it shows."""
        effects: list[Effect] = [Count("parts_not_encoded", lost_parts)]
        if not self._told_not_encoded:
            self._told_not_encoded = True
            effects.append(Note("error", KV_NOT_ENCODED))
        return [*effects, *self._ending.fail(job, FailureCode.DATA_LOSS, KV_NOT_ENCODED, now)]

    def _recover_import(self, job: Job, message: str) -> list[Effect]:
        """Drop a prefix that cannot be imported and compute it again: a cache fault is only ever a miss."""
        self._store.drop_prefix(job, job.tokens_reused)
        job.tokens_reused = job.position = 0
        job.forget_ready()
        note = Note("warning", f"a cached prefix could not be imported and is computed again: {message}")
        return [Count("import_failures"), note]

    def _command_ended(self, ticket: Ticket, now: float) -> list[Effect]:
        if self._engine.has_closed(ticket):
            return self._start_next(now)
        job = self._table.running
        if job is None or job.ticket != ticket:
            return []
        job.ticket = None
        if job.phase is JobPhase.IMPORTING and job.position == job.tokens_reused:
            return self._begin_compute(job, now)
        if job.position < job.target:
            return self._ending.fail(job, FailureCode.INTERNAL, "the engine stopped before the prompt was done", now)
        return self._finish_compute(job, now)

    def _finish_compute(self, job: Job, now: float) -> list[Effect]:
        assert job.compute_started is not None, "what is all in the store is not computed"
        job.compute_ms = (now - job.compute_started) * 1000
        self._measure(job.target - job.tokens_reused, job.compute_ms)
        self._table.drain(job)
        job.limit_drain(now)
        own = [Count("jobs_computed"), self._progress(job), *feed_lane(job), *self._ending.release_engine(job)]
        return [*own, *self._serve_same(job, now)]

    def _measure(self, computed_tokens: int, elapsed_ms: float) -> None:
        if elapsed_ms <= 0:
            return
        sample = computed_tokens / (elapsed_ms / 1000)
        known = self.tokens_per_second
        self.tokens_per_second = sample if known == 0 else known + SPEED_WEIGHT * (sample - known)

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
                    return self._ending.give_up(job, FailureCode.ABORTED, "the asker gave the transfer up", now)
                if job.broken is not None and job.final_fed:
                    job.asker_done = True
                    return self._ending.complete(job, job.broken.transferred_bytes, now)
                if job.lane is None:
                    text = "the asker ended the transfer before it began"
                    return self._ending.give_up(job, FailureCode.ABORTED, text, now)
                job.asker_done = True
                return [CloseLane(job.lane, True, "done")]
            case _:
                assert_never(body)

    def _lane_finished(self, event: LaneFinished, now: float) -> list[Effect]:
        job = self._table.find_lane(event.lane)
        if job is None:
            return []
        job.lane = None
        if event.ok and job.asker_done and job.final_fed:
            return self._ending.complete(job, event.transferred_bytes, now)
        if job.asker_done or not job.lane_ready:
            # The asker is told, too; but what keeps a lane from opening, as a lack of ports, is to be mended here.
            note = Note("warning", f"a transfer could not be opened: {event.reason}")
            failed = self._ending.fail(job, FailureCode.UNAVAILABLE, f"the transfer ended early: {event.reason}", now)
            return failed if job.lane_ready or job.asker_done else [note, *failed]
        job.broken = BrokenLane(event.reason, event.transferred_bytes, now + LANE_GRACE_S)
        return []

    def _progress(self, job: Job) -> Effect:
        body = JobProgress(tokens_done=job.position, tokens_total=job.target, tokens_reused=job.tokens_reused)
        return SendProgress(job.key, body)
