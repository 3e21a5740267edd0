"""Offloading: have a prefill worker compute the rest of a prefix and keep the parts it streams back.

Rules
 1. Workers are tried one after another, in the order that .offload_choice tells. The whole stage ends by
    ``worker_timeout_s``.
 2. A job asks for the parts that a hit at the target needs beyond the deepest position already at hand. What a failed
    worker has sent is kept: the next one is asked for less. Where a hit needs parts that a later one does not (a window, a
    state), the worker also sends those at checkpoints on its way, as often as the link affords: otherwise nothing of a job
    that breaks off could be used.
 3. A job is left when another worker, or computing here, would have won by now (see .hedge); what it has sent is kept.
    Whatever ends a job, the ways on are compared anew.
 4. The prompt travels sealed for holders of the tenant's key, and a worker proves with its first word that it has it
    (wire.job_seal). Until then nothing it says counts. Whoever cannot is reported; whoever says nothing for PROVE_WITHIN_S
    is given up. Both are left alone for a while, and the job goes to another one or is done here.
 5. A worker that says nothing for ``worker_stall_timeout_s`` plus the time it needs for two segments, the waiting time it
    announced aside, is given up.

Theory of operation: one attempt at a time, ``SubmitJob → JobAccepted → TransferGrant → parts and JobProgress → lane
finished``. The stage is finished when every part is at hand or no worker is left. The JobResult is awaited by nobody; when
it comes before the preparation ends, it tells the worker's speed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from kakeya_zmq.backoff import Trouble
from kakeya_zmq.planner import MeasuredRates
from kakeya_zmq.protocol.effects import (
    NO_CONNECTION,
    UNREACHED_PORT,
    AskFailed,
    AskId,
    AskProgressed,
    AskReplied,
    CancelAsk,
    ConnectReceiver,
    Count,
    CreditEarned,
    Effect,
    HostEvent,
    LaneFinished,
    PartsReceived,
    Refuse,
    SendUpdate,
)
from kakeya_zmq.protocol.estimates import Estimates
from kakeya_zmq.protocol.holdings import Holdings, Reach
from kakeya_zmq.protocol.offload_attempt import Attempt, Attempts
from kakeya_zmq.protocol.offload_choice import WorkerChoice
from kakeya_zmq.protocol.offload_seal import COULD_NOT_OPEN, UNANSWERED, WITHOUT_PROOF
from kakeya_zmq.protocol.prepare_values import WHY_CHARACTERS_MAX, IdAllocator, PreparationTask, Progress
from wire.errors import FailureCode
from wire.ids import NodeId
from wire.messages import Credit, JobAccepted, JobProgress, JobResult, SourceKind, TransferDone, TransferGrant
from wire.text import clean


class OffloadPhase(enum.Enum):
    IDLE = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Offload:
    """Bring the parts of the target position into ``holdings`` with the help of prefill workers.

    Args:
        task: the preparation's.
        holdings: where parts go.
        ids: numbers for asks and lanes.
        rates: measured; worker rates are added.
        random_bytes: n → n random bytes, for job ids.
    """

    def __init__(
        self,
        task: PreparationTask,
        holdings: Holdings,
        ids: IdAllocator,
        rates: MeasuredRates,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._task = task
        self._settings = task.settings
        self._holdings = holdings
        self._account = holdings.account
        self._ids = ids
        self._rates = rates
        estimates = Estimates(task, rates, holdings.held_by)
        self._attempts = Attempts(task, holdings, ids, rates, estimates, random_bytes)
        self._choice = WorkerChoice(task, holdings, rates, estimates)
        self._attempt: Attempt | None = None
        self._closing: dict[AskId, NodeId] = {}
        self._stage_deadline = 0.0
        self.phase = OffloadPhase.IDLE
        self.progress: Progress | None = None

    @property
    def finished(self) -> bool:
        return self.phase is OffloadPhase.FINISHED

    @property
    def aim(self) -> Reach | None:
        """What the job under way is to make possible."""
        return Reach(self._task.target, self._holdings.importable) if self._attempt is not None else None

    def deadline(self) -> float | None:
        if self._attempt is None:
            return None
        return min(self._stage_deadline, self._attempt.stall_deadline, self._attempt.check_at)

    def remaining_s(self, now: float) -> float:
        """Projected time until the job under way is done; 0 when there is none."""
        return self._attempt.remaining_s(now) if self._attempt is not None else 0.0

    def owns(self, event: HostEvent) -> bool:
        """Whether the event belongs to a job that is still open here."""
        attempt = self._attempt
        match event:
            case AskReplied(ask=ask) | AskProgressed(ask=ask) | AskFailed(ask=ask):
                return ask in self._closing or (attempt is not None and attempt.ask == ask)
            case PartsReceived(lane=lane) | CreditEarned(lane=lane) | LaneFinished(lane=lane):
                return attempt is not None and attempt.lane == lane
            case _:
                return False

    def start(self, now: float) -> list[Effect]:
        self.phase = OffloadPhase.RUNNING
        self._choice.pass_over(now)
        self._stage_deadline = now + self._settings.worker_timeout_s
        return self._next(now)

    def on(self, event: HostEvent, now: float) -> list[Effect]:
        effects: list[Effect] = []
        attempt = self._attempt
        match event:
            case AskReplied(ask=ask) | AskFailed(ask=ask) if ask in self._closing:
                self._close_ask(event)
            case AskReplied(ask=ask) | AskFailed(ask=ask) | AskProgressed(ask=ask) if attempt and attempt.ask == ask:
                effects = self._ask_event(attempt, event, now)
            case PartsReceived(lane=lane) | CreditEarned(lane=lane) | LaneFinished(lane=lane) if (
                attempt and attempt.lane == lane
            ):
                effects = self._lane_event(attempt, event, now)
            case _:
                pass
        due = self.deadline()
        if due is not None and now >= due:
            effects += self._expire(now)
        return effects

    def cancel(self, now: float) -> list[Effect]:
        """Leave nothing open; also called when the preparation ends."""
        effects = [*self._drop_attempt("no longer wanted"), *(CancelAsk(ask) for ask in sorted(self._closing))]
        self._closing.clear()
        self.phase = OffloadPhase.FINISHED
        return effects

    def _next(self, now: float) -> list[Effect]:
        """Ask the worker that is best now; finish when nothing is missing, or none is left that pays."""
        task = self._task
        base = self._holdings.job_base()
        node_id: NodeId | None = None
        if base < task.target and now < self._stage_deadline:
            node_id = self._choice.next_worker()
        if node_id is None:
            self.phase = OffloadPhase.FINISHED
            return []
        self._holdings.hold(Reach(base, task.chain), now)
        patient = self._choice.wants_patience(node_id)
        attempt = self._attempt = self._attempts.begin(node_id, base, now, patient=patient)
        self._report(base, task.target)
        submission = self._attempts.submission(attempt, max(0.001, self._stage_deadline - now))
        return [Count("remote_jobs"), submission]

    # --- one attempt -------------------------------------------------------------------------------------------------

    def _ask_event(self, attempt: Attempt, event: AskReplied | AskProgressed | AskFailed, now: float) -> list[Effect]:
        attempt.stall_deadline = now + attempt.patience_s
        match event:
            case AskProgressed(body=body):
                return self._progressed(attempt, body, now)
            case AskReplied(body=result):
                attempt.ask_open = False
                if attempt.job.proven:
                    self._learn(attempt.node_id, result)
                return self._fail("ended the job without sending", now) if attempt.lane is None else []
            case AskFailed():
                attempt.ask_open = False
                return self._refused(attempt, event, now)

    def _progressed(self, attempt: Attempt, body: object, now: float) -> list[Effect]:
        if not attempt.job.vouched(body):
            return self._impostor(attempt, WITHOUT_PROOF, now)
        if attempt.newcomer:
            attempt.newcomer = False
            self._rates.backoff.proved(attempt.worker.identity_public_key)
        match body:
            case JobAccepted(eta_ms=eta_ms):
                attempt.stall_deadline += eta_ms / 1000.0
                # The worker knows its queue better than its card did.
                attempt.computing.expected_s = eta_ms / 1000.0 + attempt.computing.work_s
            case JobProgress(tokens_done=done, tokens_total=total):
                attempt.computing.advance_to(min(done, total) - attempt.computed_from, now)
                self._report(done, total)
            case TransferGrant() if attempt.lane is None:
                return self._open_lane(attempt, body, now)
            case _:
                pass
        return []

    def _open_lane(self, attempt: Attempt, grant: TransferGrant, now: float) -> list[Effect]:
        attempt.lane = self._ids.lane()
        attempt.computing.begin(now)
        attempt.sending.begin(now)
        expected = self._holdings.expected(attempt.wanted)
        expected += self._holdings.expected(attempt.checkpoints, optional=True)
        left_bytes = self._settings.max_import_bytes - self._holdings.received_bytes
        budget_bytes = max(1, min(left_bytes, sum(part.bytes_max for part in expected)))
        # A worker is silent on its lane while it computes a segment: this machine's own stall clock judges it.
        idle_s = self._settings.worker_timeout_s
        # What a worker computes is published: a cache would refuse it, and all that hangs on it, for a wrong digest.
        return [ConnectReceiver(attempt.lane, attempt.node_id, grant, expected, budget_bytes, idle_s, verify_digests=True)]

    def _refused(self, attempt: Attempt, failure: AskFailed, now: float) -> list[Effect]:
        """The worker has ended the job with a failure."""
        match failure.code:
            case FailureCode.DATA_LOSS:
                what = "cannot store the KV of this model or prompt with its codec"
                self._rates.backoff.failed(attempt.node_id, Trouble.JOB, f"it {what}", now)
                return self._fail(what, now)
            case FailureCode.UNAUTHENTICATED:
                return self._impostor(attempt, COULD_NOT_OPEN, now)
            case FailureCode.RESOURCE_EXHAUSTED:
                # Of what: its queue, its memory, its store, or the rate it allows; each is mended elsewhere.
                return self._fail(f"job failed (resource exhausted): {clean(failure.message, WHY_CHARACTERS_MAX)}", now)
            case code:
                return self._fail(f"job failed ({code.name.lower().replace('_', ' ')})", now)

    def _impostor(self, attempt: Attempt, reason: str, now: float) -> list[Effect]:
        """It offers work for the tenant and does not have its key."""
        self._rates.backoff.failed(attempt.node_id, Trouble.JOB, "it did not prove that it has this tenant's key", now)
        failed = self._fail("did not prove that it has this tenant's key", now)
        return [Refuse(attempt.node_id, reason), *failed]

    def _lane_event(self, attempt: Attempt, event: PartsReceived | CreditEarned | LaneFinished, now: float) -> list[Effect]:
        attempt.stall_deadline = now + attempt.patience_s
        match event:
            case PartsReceived(parts=parts):
                self._rates.backoff.succeeded(attempt.node_id, Trouble.BULK_PORT)
                size_bytes = sum(part.meta.length_bytes for part in parts)
                attempt.sending.advance_to(attempt.sending.done + size_bytes, now)
                return self._holdings.accept(parts, (SourceKind.WORKER, attempt.node_id), now)
            case CreditEarned(credit_bytes=credit_bytes):
                return [SendUpdate(attempt.ask, Credit(credit_bytes=credit_bytes))] if attempt.ask_open else []
            case LaneFinished(ok=True):
                return self._complete(attempt, now)
            case LaneFinished(reason=reason) if reason == NO_CONNECTION:
                attempt.lane = None
                self._rates.backoff.failed(attempt.node_id, Trouble.BULK_PORT, reason, now)
                return self._fail(UNREACHED_PORT, now)
            case LaneFinished(reason=reason):
                attempt.lane = None
                return self._fail(f"broke off the transfer: {reason}", now)

    def _complete(self, attempt: Attempt, now: float) -> list[Effect]:
        attempt.lane = None
        self._rates.backoff.succeeded(attempt.node_id, Trouble.JOB)
        if self._holdings.missing(Reach(self._task.target, self._task.chain)):
            return self._fail("sent less than was needed", now)
        self._account.spend_time((SourceKind.WORKER, attempt.node_id), (now - attempt.started) * 1000.0)
        self._attempt = None
        self.phase = OffloadPhase.FINISHED
        self._report(self._task.target, self._task.target)
        effects: list[Effect] = [Count("remote_jobs_completed")]
        if attempt.ask_open:
            self._closing[attempt.ask] = attempt.node_id
            effects.append(SendUpdate(attempt.ask, TransferDone(complete=True)))
        return effects

    def _fail(self, what: str, now: float, *, slow: bool = False) -> list[Effect]:
        attempt = self._attempt
        if attempt is None:
            return []
        self._account.spend_time((SourceKind.WORKER, attempt.node_id), (now - attempt.started) * 1000.0)
        if attempt.newcomer:
            self._choice.charge_newcomer(attempt, now)
        effects = self._drop_attempt(what)
        effects.append(Count("hedges") if slow else Count("remote_job_failures"))
        if slow:
            self._choice.set_aside(attempt.node_id)
        else:
            self._choice.reconsider()
        effects += self._account.fallback(f"worker {attempt.node_id} {what}")
        return [*effects, *self._next(now)]

    def _check(self, attempt: Attempt, now: float) -> list[Effect]:
        """Leave the worker when the best way without it would have won."""
        why = self._choice.left_because(attempt, now)
        if not why:
            return []
        if attempt.computing.begun is not None:
            projected_ms = (now - attempt.computing.begun + attempt.remaining_s(now)) * 1000.0
            self._rates.worker_was_left(attempt.node_id, int(attempt.computing.total), projected_ms)
        return self._fail(why, now, slow=True)

    def _drop_attempt(self, reason: str) -> list[Effect]:
        attempt, self._attempt = self._attempt, None
        return [] if attempt is None else attempt.drop(reason)

    def _expire(self, now: float) -> list[Effect]:
        attempt = self._attempt
        if now >= self._stage_deadline:
            return self._fail("did not finish in time", now)
        if attempt is not None and now < attempt.stall_deadline:
            return self._check(attempt, now)
        if attempt is not None and not attempt.job.proven:
            self._rates.backoff.failed(attempt.node_id, Trouble.JOB, f"it {UNANSWERED}", now)
            return self._fail(UNANSWERED, now)
        return self._fail("stalled", now)

    def _close_ask(self, event: AskReplied | AskFailed) -> None:
        node_id = self._closing.pop(event.ask)
        if isinstance(event, AskReplied):
            self._learn(node_id, event.body)

    def _learn(self, node_id: NodeId, body: object) -> None:
        if isinstance(body, JobResult):
            self._rates.observe_worker(node_id, body.tokens_computed, body.compute_ms)

    def _report(self, done: int, total: int) -> None:
        target = self._task.target
        self._account.set_value("remote_job_tokens_total", min(total, target))
        self._account.set_value("remote_job_tokens_computed", min(done, target))
        before = self.progress.tokens_done if self.progress is not None else 0
        # A second worker may start below the first one's mark; what a user sees never goes back.
        self.progress = Progress(max(before, min(done, target)), target, SourceKind.WORKER)
