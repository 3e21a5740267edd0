"""The worker side of prefill jobs.

Rules
- A job computes the KV of all its tokens but the last (the asker runs that one itself) and sends the asker the parts it
  lacks, while later segments are still being computed. Everything computed also goes into the worker's own store.
- Jobs wait in one bounded queue, first come first served, and run one at a time: the model has one thread.
- Capacity is checked when a job is submitted and reserved before it computes; a job that cannot fit never starts.
- The same job id with the same content, from the same node, attaches to the job that exists (the older request ends with
  ABORTED); other content under a used id is refused.

Theory of operation
    queued --start--> importing --> computing --> draining --> ended
A job *starts* by opening an engine session and binding a sender lane; it *imports* its own longest cached prefix, *computes*
the rest segment by segment, then *drains*: the lane holds the last parts until the asker says TransferDone. It ends by a
reply, a failure, or because nobody waits any more (cancelled, deadline, peer lost). Engine commands in flight are cancelled
at their next segment edge; the next job starts when the engine session of the last one has been closed.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import assert_never

import numpy as np

from kakeya_zmq.blocks import Chain, Part, RawPart, bind_parts, needed_parts
from kakeya_zmq.compat import chain_hashes
from kakeya_zmq.coverage import best_boundary
from kakeya_zmq.engine import (
    CloseSession,
    CommandFailed,
    ImportPrefix,
    ModelFacts,
    OpenSession,
    Prefill,
    PrefixImported,
    SegmentComputed,
    TokenArray,
)
from kakeya_zmq.protocol.effects import (
    AddCredit,
    BindSender,
    CancelCommand,
    CloseLane,
    CommandEnded,
    CommandEvent,
    Count,
    Effect,
    FeedSender,
    HostEvent,
    LaneFinished,
    LaneId,
    LaneOpened,
    Note,
    RequestArrived,
    RequestCancelled,
    RequestKey,
    RunCommand,
    SendFailure,
    SendProgress,
    SendReply,
    Tick,
    Ticket,
    UpdateArrived,
)
from kakeya_zmq.protocol.prepare_values import IdAllocator
from kakeya_zmq.store import BlockStore, ReservationId
from wire.errors import CapacityError, FailureCode, RequestFailed
from wire.limits import PROMPT_TOKENS_MAX
from wire.messages import (
    CipherSuite,
    Credit,
    JobAccepted,
    JobProgress,
    JobResult,
    PartKind,
    PartRef,
    SubmitJob,
    TransferDone,
)


@dataclass(frozen=True, slots=True)
class WorkSettings:
    """Bounds of the job queue."""

    max_jobs: int = 128
    """Queued and running jobs."""
    max_prompt_tokens: int = PROMPT_TOKENS_MAX
    default_tokens_per_second: float = 20.0
    """Assumed until a job has been measured."""


class JobPhase(Enum):
    QUEUED = "queued"
    IMPORTING = "importing"
    COMPUTING = "computing"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(slots=True)
class _Job:
    key: RequestKey
    node_id: str
    body: SubmitJob
    content_digest: bytes
    tokens: TokenArray
    chain: Chain
    wanted: frozenset[PartRef]
    estimate_bytes: int
    engine_session: str
    reservation_id: ReservationId
    phase: JobPhase = JobPhase.QUEUED
    lane: LaneId | None = None
    lane_ready: bool = False
    fed: int = 0
    """How many of ``ready`` the lane has been given."""
    ready: list[Part] = field(default_factory=list)
    ready_refs: set[PartRef] = field(default_factory=set)
    ready_final: bool = False
    final_fed: bool = False
    position: int = 0
    tokens_reused: int = 0
    compute_started: float = 0.0
    compute_ms: float = 0.0
    ticket: Ticket | None = None
    asker_done: bool = False

    @property
    def target(self) -> int:
        return self.chain.tokens


class WorkService:
    """Runs prefill jobs on the node's engine. Events and effects: kakeya_zmq.protocol.effects.

    Args:
        facts: the loaded model's.
        tenant_key: key of the tenant this worker serves, for the hash chain.
        store: the node's block store.
        ids: numbers for lanes and tickets, shared by all machines of the process.
        has_aes: whether this machine seals faster with AES than with secretbox.
    """

    def __init__(
        self,
        *,
        facts: ModelFacts,
        tenant_key: bytes,
        store: BlockStore,
        ids: IdAllocator,
        has_aes: bool,
        settings: WorkSettings | None = None,
    ) -> None:
        self._facts = facts
        self._fingerprint = facts.compatibility.fingerprint()
        self._tenant_key = tenant_key
        self._store = store
        self._ids = ids
        self._has_aes = has_aes
        self._settings = settings or WorkSettings()
        self._job_number = 0
        self._queue: deque[_Job] = deque()
        self._running: _Job | None = None
        self._draining: dict[RequestKey, _Job] = {}
        self._closing: Ticket | None = None
        self._orphan_lanes: set[LaneId] = set()
        self._orphan_tickets: set[Ticket] = set()
        self.tokens_per_second = 0.0
        """EWMA over finished jobs; 0 until one was measured."""

    # --- what others may ask -----------------------------------------------------------------------------------

    @staticmethod
    def handles(body: object) -> bool:
        """Whether a request body is this service's business."""
        return isinstance(body, SubmitJob)

    @property
    def queued_jobs(self) -> int:
        return len(self._queue)

    @property
    def running_jobs(self) -> int:
        return int(self._running is not None) + len(self._draining)

    @property
    def queued_tokens(self) -> int:
        """Tokens still to compute in queued and running jobs."""
        running = [self._running] if self._running else []
        return sum(job.target - job.position for job in [*running, *self._queue])

    @property
    def idle(self) -> bool:
        return not self._queue and self._running is None and not self._draining and self._closing is None

    def deadline(self) -> float | None:
        """Nothing here runs on a clock: requests carry their own deadlines, lanes their own idle time-outs."""
        return None

    # --- the machine -------------------------------------------------------------------------------------------

    def on(self, event: HostEvent, now: float) -> list[Effect]:
        """Advance by one event; events that are not this machine's are ignored."""
        match event:
            case RequestArrived(body=SubmitJob()):
                return self._submit(event, now)
            case UpdateArrived(key=key, body=body):
                job = self._find(key)
                return [] if job is None else self._update(job, body, now)
            case RequestCancelled(key=key, reason=reason):
                job = self._find(key)
                return [] if job is None else self._abandon(job, reason, now)
            case LaneOpened(lane=lane, grant=grant):
                job = self._find_lane(lane)
                if job is None:
                    return []
                job.lane_ready = True
                return [SendProgress(job.key, grant), *self._feed(job)]
            case LaneFinished():
                return self._lane_finished(event, now)
            case CommandEvent(ticket=ticket, event=engine_event):
                job = self._running
                if job is None or job.ticket != ticket:
                    return []
                return self._engine_event(job, engine_event, now)
            case CommandEnded(ticket=ticket):
                return self._command_ended(ticket, now)
            case Tick():
                return []
            case _:
                return []

    def shutdown(self, reason: str, now: float) -> list[Effect]:
        """End every job with UNAVAILABLE, so that askers can go elsewhere at once."""
        effects: list[Effect] = []
        for job in [*self._queue, *([self._running] if self._running else []), *self._draining.values()]:
            effects += self._fail(job, FailureCode.UNAVAILABLE, reason, now)
        return effects

    # --- submission ------------------------------------------------------------------------------------------------

    def _submit(self, event: RequestArrived, now: float) -> list[Effect]:
        body = event.body
        assert isinstance(body, SubmitJob)
        try:
            tokens = self._validated_tokens(body)
        except RequestFailed as error:
            return [Count("jobs_refused"), SendFailure(event.key, error.code, str(error))]
        digest = hashlib.sha256(body.fingerprint + body.have_tokens.to_bytes(8, "little") + body.tokens).digest()
        known = self._find_job(event.node_id, body.job_id)
        if known is not None:
            if known.content_digest != digest:
                text = "this job id is in use for another prompt"
                return [Count("jobs_refused"), SendFailure(event.key, FailureCode.INVALID_ARGUMENT, text)]
            return self._attach(known, event.key)
        if len(self._queue) + self.running_jobs >= self._settings.max_jobs:
            text = f"the job queue is full ({self._settings.max_jobs} jobs)"
            return [Count("jobs_refused"), SendFailure(event.key, FailureCode.RESOURCE_EXHAUSTED, text)]
        job = self._make_job(event, body, digest, tokens)
        if job.estimate_bytes > self._store.max_bytes:
            text = f"the prompt's KV needs {job.estimate_bytes} bytes and this worker's cache holds {self._store.max_bytes}"
            return [Count("jobs_refused"), SendFailure(event.key, FailureCode.RESOURCE_EXHAUSTED, text)]
        speed = self.tokens_per_second or self._settings.default_tokens_per_second
        waiting_tokens = self.queued_tokens
        accepted = JobAccepted(
            queued_jobs=len(self._queue) + self.running_jobs,
            queued_tokens=waiting_tokens,
            eta_ms=int(waiting_tokens / speed * 1000),
        )
        self._queue.append(job)
        return [Count("jobs_accepted"), SendProgress(event.key, accepted), *self._start_next(now)]

    def _validated_tokens(self, body: SubmitJob) -> TokenArray:
        if body.fingerprint != self._fingerprint:
            raise RequestFailed(FailureCode.FAILED_PRECONDITION, "this worker serves another model or tenant")
        if len(body.tokens) % 4 or len(body.tokens) < 8:
            raise RequestFailed(FailureCode.INVALID_ARGUMENT, "a job needs at least two tokens")
        tokens = np.frombuffer(body.tokens, dtype="<i4").astype(np.int32, copy=False)
        limit = min(self._settings.max_prompt_tokens, self._facts.max_context_tokens)
        if len(tokens) > limit:
            text = f"the prompt has {len(tokens)} tokens; this worker takes at most {limit}"
            raise RequestFailed(FailureCode.INVALID_ARGUMENT, text)
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._facts.vocabulary_size:
            raise RequestFailed(FailureCode.INVALID_ARGUMENT, "a token id is outside the model's vocabulary")
        if body.have_tokens >= len(tokens):
            raise RequestFailed(FailureCode.INVALID_ARGUMENT, "the asker already has the whole prompt")
        return tokens

    def _make_job(self, event: RequestArrived, body: SubmitJob, digest: bytes, tokens: TokenArray) -> _Job:
        facts = self._facts
        requirement = facts.requirement
        chain = chain_hashes(tokens[:-1], self._fingerprint, self._tenant_key, requirement.block_tokens)
        end_of = {block.block_hash: block.end for block in chain.blocks}
        wanted = frozenset(
            ref for ref in needed_parts(chain, chain.tokens, requirement) if end_of[ref.block_hash] > body.have_tokens
        )
        self._job_number += 1
        number = self._job_number
        return _Job(
            key=event.key,
            node_id=event.node_id,
            body=body,
            content_digest=digest,
            tokens=tokens,
            chain=chain,
            wanted=wanted,
            estimate_bytes=estimate_bytes(facts, chain.tokens),
            engine_session=f"job-{number}",
            reservation_id=ReservationId(f"job-{number}".encode()),
        )

    def _attach(self, job: _Job, key: RequestKey) -> list[Effect]:
        effects: list[Effect] = [SendFailure(job.key, FailureCode.ABORTED, "the job was taken over by a newer request")]
        if job.key in self._draining:
            self._draining[key] = self._draining.pop(job.key)
        job.key = key
        effects += self._drop_lane(job, "taken over")
        job.fed = 0
        job.final_fed = False
        effects.append(
            SendProgress(key, JobAccepted(queued_jobs=len(self._queue), queued_tokens=self.queued_tokens, eta_ms=0))
        )
        if job.phase is not JobPhase.QUEUED:
            effects += self._bind_lane(job)
        return effects

    # --- running ---------------------------------------------------------------------------------------------------

    def _start_next(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._running is None and self._closing is None and self._queue:
            job = self._queue.popleft()
            try:
                self._store.reserve(job.reservation_id, job.estimate_bytes, now)
            except CapacityError as error:
                effects += self._fail(job, FailureCode.RESOURCE_EXHAUSTED, str(error), now)
                continue
            self._running = job
            job.phase = JobPhase.IMPORTING
            job.compute_started = now
            effects += self._bind_lane(job)
            effects.append(RunCommand(self._ticket_for_nobody(), OpenSession(job.engine_session)))
            effects += self._begin_import(job, now)
        return effects

    def _begin_import(self, job: _Job, now: float) -> list[Effect]:
        requirement = self._facts.requirement
        position = best_boundary(job.chain, requirement, self._store.has)
        if position == 0:
            return self._begin_compute(job, now)
        refs = needed_parts(job.chain, position, requirement)
        held = [part for ref in refs if (part := self._store.get(ref)) is not None]
        self._store.touch(refs, now)
        if position == job.target:
            # Everything is here already: nothing to import, since this worker never decodes.
            self._make_ready(job, held)
            job.position = job.tokens_reused = position
            return [Count("job_tokens_reused", position), *self._finish_compute(job, now)]
        raw = tuple(
            RawPart(part.meta.kind, part.meta.start, part.meta.token_count, part.payload)
            for part in sorted(held, key=lambda part: (part.meta.start, part.meta.kind))
        )
        job.tokens_reused = position
        job.ready_refs.clear()
        self._make_ready(job, held)
        job.ticket = self._ids.ticket()
        return [RunCommand(job.ticket, ImportPrefix(job.engine_session, position, raw))]

    def _begin_compute(self, job: _Job, now: float) -> list[Effect]:
        job.phase = JobPhase.COMPUTING
        job.compute_started = now
        remaining = job.tokens[job.position : job.target]
        if len(remaining) == 0:
            return self._finish_compute(job, now)
        job.ticket = self._ids.ticket()
        return [
            RunCommand(job.ticket, Prefill(job.engine_session, remaining, capture=True)),
            self._progress(job),
            *self._feed(job),
        ]

    def _engine_event(self, job: _Job, event: object, now: float) -> list[Effect]:
        match event:
            case PrefixImported(position=position):
                job.position = position
                return [Count("job_tokens_reused", position)]
            case SegmentComputed(position=position, parts=raw_parts):
                computed = position - job.position
                job.position = position
                parts = bind_parts(job.chain, raw_parts)
                effects: list[Effect] = [Count("job_tokens_computed", computed)]
                effects += self._keep(job, parts, now)
                self._make_ready(job, parts)
                return [*effects, self._progress(job), *self._feed(job)]
            case CommandFailed(message=message, position=position):
                if job.phase is JobPhase.IMPORTING:
                    # A prefix that cannot be imported is dropped and computed again: a cache fault is only ever a miss.
                    return self._recover_import(job, message)
                job.ticket = None
                return self._fail(job, FailureCode.INTERNAL, f"prefill failed: {message}", now)
            case _:
                return []

    def _recover_import(self, job: _Job, message: str) -> list[Effect]:
        requirement = self._facts.requirement
        for ref in needed_parts(job.chain, job.tokens_reused, requirement):
            self._store.invalidate(ref)
        job.tokens_reused = job.position = 0
        job.ready.clear()
        job.ready_refs.clear()
        job.fed = 0
        note = Note("warning", f"a cached prefix could not be imported and is computed again: {message}")
        return [Count("import_failures"), note]

    def _command_ended(self, ticket: Ticket, now: float) -> list[Effect]:
        if ticket == self._closing:
            self._closing = None
            return self._start_next(now)
        self._orphan_tickets.discard(ticket)
        job = self._running
        if job is None or job.ticket != ticket:
            return []
        job.ticket = None
        if job.phase is JobPhase.IMPORTING:
            return self._begin_compute(job, now)
        if job.position < job.target:
            return self._fail(job, FailureCode.INTERNAL, "the engine stopped before the prompt was done", now)
        return self._finish_compute(job, now)

    def _finish_compute(self, job: _Job, now: float) -> list[Effect]:
        job.compute_ms = (now - job.compute_started) * 1000
        computed = job.target - job.tokens_reused
        if computed > 0 and job.compute_ms > 0:
            sample = computed / (job.compute_ms / 1000)
            self.tokens_per_second = sample if self.tokens_per_second == 0 else 0.75 * self.tokens_per_second + 0.25 * sample
        job.ready_final = True
        job.phase = JobPhase.DRAINING
        self._draining[job.key] = job
        self._running = None
        effects: list[Effect] = [Count("jobs_computed"), self._progress(job), *self._feed(job)]
        return [*effects, *self._release_engine(job, now)]

    def _release_engine(self, job: _Job, now: float) -> list[Effect]:
        self._store.release_reservation(job.reservation_id)
        self._closing = self._ids.ticket()
        return [RunCommand(self._closing, CloseSession(job.engine_session))]

    # --- parts and lanes -----------------------------------------------------------------------------------------

    def _keep(self, job: _Job, parts: Sequence[Part], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for part in parts:
            needed = part.meta.ref in job.wanted or part.meta.kind is PartKind.FULL
            try:
                reservation = job.reservation_id if needed else None
                self._store.put(part, fingerprint=self._fingerprint, now=now, reservation_id=reservation)
            except CapacityError:
                # The asker still gets the part over the lane; only later reuse from this worker is lost.
                effects.append(Count("put_failures"))
        return effects

    def _make_ready(self, job: _Job, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.meta.ref in job.wanted and part.meta.ref not in job.ready_refs:
                job.ready_refs.add(part.meta.ref)
                job.ready.append(part)

    def _bind_lane(self, job: _Job) -> list[Effect]:
        suite = pick_suite(job.body.suites, has_aes=self._has_aes)
        job.lane = self._ids.lane()
        job.lane_ready = False
        return [BindSender(job.lane, suite, job.body.chunk_bytes_max, job.body.credit_bytes)]

    def _feed(self, job: _Job) -> list[Effect]:
        if job.lane is None or not job.lane_ready or job.final_fed:
            return []
        if job.phase is JobPhase.IMPORTING:
            # Parts of a prefix that is still being imported may yet turn out bad.
            return []
        fresh = tuple(job.ready[job.fed :])
        if not fresh and not job.ready_final:
            return []
        job.fed = len(job.ready)
        job.final_fed = job.ready_final
        return [FeedSender(job.lane, fresh, job.ready_final)]

    def _drop_lane(self, job: _Job, reason: str) -> list[Effect]:
        if job.lane is None:
            return []
        lane, job.lane, job.lane_ready = job.lane, None, False
        self._orphan_lanes.add(lane)
        return [CloseLane(lane, False, reason)]

    def _update(self, job: _Job, body: Credit | TransferDone, now: float) -> list[Effect]:
        match body:
            case Credit(credit_bytes=credit_bytes):
                return [] if job.lane is None else [AddCredit(job.lane, credit_bytes)]
            case TransferDone(complete=complete):
                if not complete:
                    return self._fail(job, FailureCode.ABORTED, "the asker gave the transfer up", now)
                job.asker_done = True
                return [] if job.lane is None else [CloseLane(job.lane, True, "done")]
            case _:
                assert_never(body)

    def _lane_finished(self, event: LaneFinished, now: float) -> list[Effect]:
        self._orphan_lanes.discard(event.lane)
        job = self._find_lane(event.lane)
        if job is None:
            return []
        job.lane = None
        if event.ok and job.asker_done and job.phase is JobPhase.DRAINING:
            self._draining.pop(job.key, None)
            job.phase = JobPhase.ENDED
            result = JobResult(
                tokens_computed=job.target - job.tokens_reused,
                tokens_reused=job.tokens_reused,
                compute_ms=int(job.compute_ms),
                sent_bytes=event.transferred_bytes,
            )
            sent = Count("job_bytes_sent", event.transferred_bytes)
            return [Count("jobs_completed"), sent, SendReply(job.key, result)]
        return self._fail(job, FailureCode.UNAVAILABLE, f"the transfer ended early: {event.reason}", now)

    # --- endings ---------------------------------------------------------------------------------------------------

    def _fail(self, job: _Job, code: FailureCode, message: str, now: float) -> list[Effect]:
        if job.phase is JobPhase.ENDED:
            return []
        return [Count("jobs_failed"), SendFailure(job.key, code, message), *self._end(job, message, now)]

    def _abandon(self, job: _Job, reason: str, now: float) -> list[Effect]:
        return [Count("jobs_cancelled"), *self._end(job, reason, now)]

    def _end(self, job: _Job, reason: str, now: float) -> list[Effect]:
        effects = self._drop_lane(job, reason)
        if job.phase is JobPhase.QUEUED and job in self._queue:
            self._queue.remove(job)
        self._draining.pop(job.key, None)
        was_running = self._running is job
        job.phase = JobPhase.ENDED
        if was_running:
            self._running = None
            if job.ticket is not None:
                self._orphan_tickets.add(job.ticket)
                effects.append(CancelCommand(job.ticket))
            # The runner keeps commands of one engine session in order, so the close comes after the cancelled one.
            effects += self._release_engine(job, now)
        return effects

    # --- looking things up -------------------------------------------------------------------------------------------

    def _progress(self, job: _Job) -> Effect:
        done = max(0, job.position)
        return SendProgress(job.key, JobProgress(tokens_done=done, tokens_total=job.target, tokens_reused=job.tokens_reused))

    def _ticket_for_nobody(self) -> Ticket:
        return self._ids.ticket()

    def _jobs(self) -> list[_Job]:
        running = [self._running] if self._running else []
        return [*running, *self._draining.values(), *self._queue]

    def _find(self, key: RequestKey) -> _Job | None:
        return next((job for job in self._jobs() if job.key == key), None)

    def _find_lane(self, lane: LaneId) -> _Job | None:
        return next((job for job in self._jobs() if job.lane == lane), None)

    def _find_job(self, node_id: str, job_id: bytes) -> _Job | None:
        return next((job for job in self._jobs() if job.node_id == node_id and job.body.job_id == job_id), None)


def pick_suite(offered: Sequence[CipherSuite], *, has_aes: bool) -> CipherSuite:
    """AES-256-GCM where this machine has AES instructions and the asker offers it, else NaCl secretbox."""
    if has_aes and CipherSuite.AES_256_GCM in offered:
        return CipherSuite.AES_256_GCM
    return CipherSuite.SECRETBOX if CipherSuite.SECRETBOX in offered else offered[0]


def estimate_bytes(facts: ModelFacts, tokens: int) -> int:
    """Bytes of the parts that a hit at ``tokens`` needs: full rows of all, window rows of what is retained, one state."""
    full, window, state = facts.part_bytes_per_token
    requirement = facts.requirement
    retained = 0
    if requirement.window_tokens:
        retained = min(tokens, requirement.window_tokens + requirement.sink_tokens + 2 * requirement.block_tokens)
    return full * tokens + window * retained + state
