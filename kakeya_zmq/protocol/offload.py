"""Offloading: have a prefill worker compute the rest of a prefix and keep the parts it streams back.

Rules
 1. Workers are tried one after another, cheapest first, only those that pay (all of them when remote is required); one
    that was left as too slow is tried once more when those it was left for have failed. The whole stage ends by
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
    Of those that have never proven themselves here, newcomers, one prompt waits for one only: for its first word, as long as
    it takes there and back, at least a second. Who costs that time without proof, whatever it says then, is left alone, and
    for some seconds so are all newcomers. Where remote is required they are tried last, and with patience at the very end.
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
from kakeya_zmq.protocol.hedge import CHECK_AGAIN_S, CHECK_EVERY_S, is_too_slow, switch_decision
from kakeya_zmq.protocol.holdings import Holdings, Reach
from kakeya_zmq.protocol.offload_attempt import Attempt, Attempts
from kakeya_zmq.protocol.offload_seal import (
    COST_TIME,
    COULD_NOT_OPEN,
    NEWCOMER_PROVES_WITHIN_S,
    UNANSWERED,
    WITHOUT_PROOF,
)
from kakeya_zmq.protocol.prepare_values import IdAllocator, PreparationTask, Progress, WorkerView
from kakeya_zmq.protocol.routes import RouteChoice, choose_route
from wire.errors import FailureCode
from wire.ids import NodeId
from wire.messages import Credit, JobAccepted, JobProgress, JobResult, SourceKind, TransferDone, TransferGrant
from wire.text import clean

WHY_CHARACTERS_MAX = 120
"""Of what a worker says was exhausted."""


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
        self._ids = ids
        self._rates = rates
        self._estimates = Estimates(task, rates, holdings.held_by)
        self._attempts = Attempts(task, holdings, ids, rates, self._estimates, random_bytes)
        self._tried: set[NodeId] = set()
        self._left: set[NodeId] = set()
        """Those of the tried that did not fail, but were too slow; where remote is required, those left alone as well."""
        self._newcomers_s = 0.0
        """What those that proved nothing have cost in all."""
        self._no_newcomers = False
        """None is tried any more: one has cost time, now or shortly before."""
        self._tried_again: set[NodeId] = set()
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
        self._leave_alone(now)
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

    def _leave_alone(self, now: float) -> None:
        """Pass over the workers from which nothing came lately, unless there is no other way."""
        backoff, required = self._rates.backoff, self._task.remote_required
        for worker in self._task.workers:
            why = backoff.left_alone(worker.node_id, now, Trouble.BULK_PORT, Trouble.JOB)
            if why:
                self._tried.add(worker.node_id)
            if why and required:
                self._left.add(worker.node_id)  # for when nobody else is left
            elif why:
                self._holdings.reason(f"worker {worker.node_id} is {why}")
        wait_s = backoff.newcomers_left_alone_s(now)
        if wait_s > 0 and not required and any(self._is_newcomer(worker) for worker in self._task.workers):
            self._no_newcomers = True
            self._holdings.reason(
                f"workers that never proved to have the tenant's key are left alone for {wait_s:.0f} s more"
            )

    def _is_newcomer(self, worker: WorkerView) -> bool:
        return self._rates.backoff.is_newcomer(worker.identity_public_key)

    def _is_open(self, worker: WorkerView) -> bool:
        """Whether it may be tried next."""
        return worker.node_id not in self._tried and not (self._no_newcomers and self._is_newcomer(worker))

    # --- choice ------------------------------------------------------------------------------------------------------

    def _choice(self, *, explore: bool) -> RouteChoice:
        """The workers that were not tried yet, and computing here."""
        base = self._holdings.job_base()
        at_hand = max(self._task.live_position, self._holdings.reach(self._holdings.has).position)
        worth_it = self._estimates.worth_a_job(self._task.target - at_hand)
        workers = [worker for worker in self._estimates.workers() if worth_it and self._is_open(worker)]
        return choose_route(
            [*(self._estimates.job(worker, base, at_hand) for worker in workers), self._estimates.here(at_hand)],
            minimum_savings_ratio=self._settings.minimum_savings_ratio,
            remote_required=self._task.remote_required,
            passed_over=self._rates.passed_over if explore else None,
        )

    def _next(self, now: float) -> list[Effect]:
        """Ask the worker that is best now; finish when nothing is missing, or none is left that pays."""
        task = self._task
        base = self._holdings.job_base()
        node_id: NodeId | None = None
        if base < task.target and now < self._stage_deadline:
            node_id = self._best()
            if node_id is None and task.remote_required and self._left:
                self._reconsider_left()
                node_id = self._best()
        if node_id is None:
            self.phase = OffloadPhase.FINISHED
            return []
        self._tried.add(node_id)
        self._holdings.hold(Reach(base, task.chain), now)
        last = node_id in self._tried_again or not any(map(self._is_open, self._estimates.workers()))
        attempt = self._attempt = self._attempts.begin(node_id, base, now, patient=task.remote_required and last)
        self._report(base, task.target)
        submission = self._attempts.submission(attempt, max(0.001, self._stage_deadline - now))
        return [Count("remote_jobs"), submission]

    def _best(self) -> NodeId | None:
        choice = self._choice(explore=not self._tried)
        self._holdings.decide(choice.decision("rest"))
        for text in choice.refusals():
            self._holdings.reason(text)
        return choice.chosen.worker if choice.chosen is not None else None

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
        return [ConnectReceiver(attempt.lane, attempt.node_id, grant, expected, budget_bytes, idle_s)]

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
        self._holdings.spend((SourceKind.WORKER, attempt.node_id), 0, (now - attempt.started) * 1000.0)
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
        self._holdings.spend((SourceKind.WORKER, attempt.node_id), 0, (now - attempt.started) * 1000.0)
        if attempt.newcomer:
            self._charge_newcomer(attempt, now)
        effects = self._drop_attempt(what)
        effects.append(Count("hedges") if slow else Count("remote_job_failures"))
        if slow:
            self._left |= {attempt.node_id} - self._tried_again
        else:
            self._reconsider_left()
        effects += self._holdings.fallback(f"worker {attempt.node_id} {what}")
        return [*effects, *self._next(now)]

    def _charge_newcomer(self, attempt: Attempt, now: float) -> None:
        """It has proven nothing. When it has cost time, alone or with others before it, that is not to happen again soon."""
        self._newcomers_s += now - attempt.started
        if not attempt.cost_time(now) and self._newcomers_s < NEWCOMER_PROVES_WITHIN_S:
            return
        backoff, required = self._rates.backoff, self._task.remote_required
        backoff.failed(attempt.node_id, Trouble.JOB, f"it {COST_TIME}", now)
        backoff.newcomer_cost_time(now)
        self._no_newcomers = not required
        if required and not attempt.patient:
            self._left |= {attempt.node_id} - self._tried_again

    def _reconsider_left(self) -> None:
        """What the slow workers were left for has failed: once nobody else is there, they may be asked again, each once."""
        if all(worker.node_id in self._tried for worker in self._task.workers):
            self._tried -= self._left
            self._tried_again |= self._left
            self._left.clear()

    def _check(self, attempt: Attempt, now: float) -> list[Effect]:
        """Leave the worker when the best way without it would have won."""
        remaining_s = attempt.remaining_s(now)
        best = self._choice(explore=False).chosen
        if best is None or not attempt.computing.observed(now):
            attempt.check_at = now + CHECK_EVERY_S
            return []
        alternative_s = best.cost_ms / 1000.0
        if not is_too_slow(remaining_s, alternative_s):
            attempt.check_at = now + min(CHECK_EVERY_S, max(CHECK_AGAIN_S, alternative_s - remaining_s))
            return []
        name = f"worker {attempt.node_id}"
        self._holdings.decide(switch_decision(name, remaining_s, best.name, alternative_s))
        if attempt.computing.begun is not None:
            projected_ms = (now - attempt.computing.begun + remaining_s) * 1000.0
            self._rates.worker_was_left(attempt.node_id, int(attempt.computing.total), projected_ms)
        what = f"was too slow: {remaining_s * 1000:.0f} ms more against {alternative_s * 1000:.0f}"
        return self._fail(what, now, slow=True)

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
        self._holdings.set_value("remote_job_tokens_total", min(total, target))
        self._holdings.set_value("remote_job_tokens_computed", min(done, target))
        before = self.progress.tokens_done if self.progress is not None else 0
        # A second worker may start below the first one's mark; what a user sees never goes back.
        self.progress = Progress(max(before, min(done, target)), target, SourceKind.WORKER)
