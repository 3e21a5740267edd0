"""One prefill job of a worker: what was asked for, how far it is, and what it will cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import numpy as np

from kakeya_zmq.blocks import Chain, Part, checkpoint_parts, needed_parts
from kakeya_zmq.compat import chain_hashes
from kakeya_zmq.engine import ModelFacts, TokenArray
from kakeya_zmq.protocol.effects import LaneId, RequestArrived, RequestKey, Ticket
from kakeya_zmq.protocol.work_door import Submission
from kakeya_zmq.protocol.work_history import JobState
from kakeya_zmq.store import ReservationId
from wire.errors import FailureCode, RequestFailed
from wire.ids import NodeId
from wire.limits import CHUNK_BYTES_MIN, PROMPT_TOKENS_MAX, SLOWEST_LINK_BYTES_PER_S, TOKEN_BYTES
from wire.messages import PartKind, PartRef, SubmitJob

ENDED_JOBS_MAX: Final = 1024

DRAIN_S: Final = 30.0
"""How long a computed job is kept for its asker, beside what sending takes."""
LANE_GRACE_S: Final = 0.25
"""How long a job waits for its asker's word after its lane broke. An asker that cancels hangs up on two connections, and
either may be seen first; that its own lane broke it knows by itself, so that nobody waits for this."""


@dataclass(frozen=True, slots=True)
class WorkSettings:
    """Bounds of the job queue."""

    max_jobs: int = 128
    """Queued, running and draining jobs."""
    max_jobs_per_asker: int = 64
    """The same, of one asker."""
    max_prompt_tokens: int = PROMPT_TOKENS_MAX
    default_tokens_per_second: float = 20.0
    """Assumed until a job has been measured."""
    ended_ttl_s: float = 600.0
    """How long an ended job is remembered: shown, and its id not taken for another prompt."""

    @property
    def max_ended_jobs(self) -> int:
        """Ended jobs that are remembered."""
        return min(2 * self.max_jobs, ENDED_JOBS_MAX)


class JobPhase(Enum):
    QUEUED = "queued"
    IMPORTING = "importing"
    COMPUTING = "computing"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class BrokenLane:
    """A lane that ended before its asker had said that it has everything."""

    reason: str
    transferred_bytes: int
    fails_at: float
    """When the job ends for it, seconds."""


@dataclass(slots=True, eq=False)
class Job:
    """A job and its state; two jobs are the same only if they are one object."""

    key: RequestKey
    """The request that is answered; another one after an attach."""
    node_id: NodeId
    account: str
    """Whose it is: RequestArrived.account."""
    tenant: str
    body: SubmitJob
    proof: bytes
    """Answers the present request: the worker could open it."""
    content_digest: bytes
    tokens: TokenArray
    chain: Chain
    needed: tuple[PartRef, ...]
    """What a hit at the job's last position needs: what capacity is reserved for."""
    wanted: frozenset[PartRef]
    """What is sent: those of them that the asker lacks, and what it wants of checkpoints on the way."""
    engine_session: str
    reservation_id: ReservationId
    submitted_at: float
    deadline: float
    """When nobody waits for it any more, seconds: that of the present request."""
    phase: JobPhase = JobPhase.QUEUED
    session_open: bool = False
    lane: LaneId | None = None
    lane_ready: bool = False
    ready: list[Part] = field(default_factory=list)
    """Parts for the asker, in the order in which they became ready; kept until the end for an asker that attaches."""
    ready_refs: set[PartRef] = field(default_factory=set)
    ready_final: bool = False
    """Nothing will be added to ``ready``."""
    fed: int = 0
    """How many of ``ready`` the present lane has been given."""
    final_fed: bool = False
    position: int = 0
    tokens_reused: int = 0
    expected_reuse: int = 0
    """While it waits: the prefix that was in the store when it came."""
    compute_started: float | None = None
    compute_ms: float = 0.0
    ticket: Ticket | None = None
    """The import or prefill that is under way."""
    asker_done: bool = False
    broken: BrokenLane | None = None
    """The present request's lane has ended early, and its asker has not said why."""

    @property
    def target(self) -> int:
        """Tokens whose KV is to be there: all but the last."""
        return self.chain.tokens

    @property
    def job_id(self) -> str:
        return self.body.job_id.hex()

    @property
    def state(self) -> JobState:
        """Of a job that has not ended."""
        return JobState.QUEUED if self.phase is JobPhase.QUEUED else JobState.RUNNING

    @property
    def remaining_tokens(self) -> int:
        """Tokens still to compute, as far as known."""
        return self.target - (self.expected_reuse if self.phase is JobPhase.QUEUED else self.position)

    def computed_per_second(self, now: float) -> float:
        """Speed of what was computed for it so far, 0 when that is nothing."""
        if self.compute_started is None:
            return 0.0
        elapsed_s = self.compute_ms / 1000 or now - self.compute_started
        computed = self.position - self.tokens_reused
        return computed / elapsed_s if computed > 0 and elapsed_s > 0 else 0.0

    def limit_drain(self, now: float) -> None:
        """All that is left is to send: as much time for that as a very slow link takes, whatever deadline was asked for."""
        size_bytes = sum(part.meta.length_bytes for part in self.ready)
        self.deadline = min(self.deadline, now + DRAIN_S + size_bytes / SLOWEST_LINK_BYTES_PER_S)

    def make_ready(self, parts: Iterable[Part]) -> None:
        """Add those parts that the asker lacks and that are not there yet."""
        for part in parts:
            ref = part.meta.ref
            if ref in self.wanted and ref not in self.ready_refs:
                self.ready_refs.add(ref)
                self.ready.append(part)

    def forget_ready(self) -> None:
        self.ready.clear()
        self.ready_refs.clear()
        self.fed = 0


def check_submission(body: SubmitJob, packed_tokens: bytes, facts: ModelFacts, settings: WorkSettings) -> TokenArray:
    """The job's tokens, int32, shape (N,), N >= 2.

    Raises:
        RequestFailed: INVALID_ARGUMENT for anything that can never be served.
    """
    if len(packed_tokens) % TOKEN_BYTES:
        raise RequestFailed(FailureCode.INVALID_ARGUMENT, "tokens must be packed 32-bit integers")
    tokens = np.frombuffer(packed_tokens, dtype="<i4").astype(np.int32, copy=False)
    limit = min(settings.max_prompt_tokens, facts.max_context_tokens)
    problem = ""
    if len(tokens) < 2:
        problem = "a job needs at least two tokens"
    elif len(tokens) > limit:
        problem = f"the prompt has {len(tokens)} tokens; this worker takes at most {limit}"
    elif int(tokens.min()) < 0 or int(tokens.max()) >= facts.vocabulary_size:
        problem = "a token id is outside the model's vocabulary"
    elif body.have_tokens >= len(tokens) - 1:
        problem = "the asker already has all the KV that a job computes"
    elif body.checkpoint_tokens % facts.requirement.block_tokens:
        problem = f"checkpoints are at multiples of {facts.requirement.block_tokens} tokens, not of {body.checkpoint_tokens}"
    elif body.credit_bytes < CHUNK_BYTES_MIN:
        problem = f"a credit of {body.credit_bytes} bytes lets no chunk through; the least is {CHUNK_BYTES_MIN}"
    if problem:
        raise RequestFailed(FailureCode.INVALID_ARGUMENT, problem)
    return tokens


def make_job(
    request: RequestArrived,
    body: SubmitJob,
    submission: Submission,
    tokens: TokenArray,
    *,
    facts: ModelFacts,
    tenant_key: bytes,
    number: int,
    now: float,
) -> Job:
    """A queued job. ``number`` names its engine session and reservation; each is used once."""
    requirement = facts.requirement
    chain = chain_hashes(tokens[:-1], body.fingerprint, tenant_key, requirement.block_tokens)
    end_of = {block.block_hash: block.end for block in chain.blocks}
    needed = needed_parts(chain, chain.tokens, requirement)
    lacking = {ref for ref in needed if end_of[ref.block_hash] > body.have_tokens}
    checkpoints = checkpoint_parts(chain, body.checkpoint_tokens, body.have_tokens, requirement)
    return Job(
        key=request.key,
        node_id=request.node_id,
        account=request.account,
        tenant=facts.compatibility.tenant_namespace,
        body=body,
        proof=submission.proof,
        content_digest=submission.content_digest,
        tokens=tokens,
        chain=chain,
        needed=needed,
        wanted=frozenset(lacking.union(checkpoints)),
        engine_session=f"job-{number}",
        reservation_id=ReservationId(f"job-{number}".encode()),
        submitted_at=now,
        deadline=request.deadline,
    )


def parts_bytes(facts: ModelFacts, chain: Chain, refs: Iterable[PartRef]) -> int:
    """Payload bytes of these parts of the chain, as the model's geometry gives them."""
    full, window, state = facts.part_bytes_per_token
    count_of = {block.block_hash: block.token_count for block in chain.blocks}
    total = 0
    for ref in refs:
        match ref.kind:
            case PartKind.FULL:
                total += full * count_of[ref.block_hash]
            case PartKind.WINDOW:
                total += window * count_of[ref.block_hash]
            case PartKind.STATE:
                total += state
    return total
