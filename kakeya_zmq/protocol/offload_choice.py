"""Whom offloading asks next, and whether it leaves whom it has asked.

Rules
 1. Cheapest first, only those that pay (all of them when remote is required). One that was left as too slow is tried once
    more when those it was left for have failed and nobody else is there.
 2. Those from which nothing came lately are passed over; where remote is required, they are for when nobody else is left.
 3. Of those that have never proven themselves here, newcomers, one prompt waits for one only: for its first word, as long as
    it takes there and back, at least a second. Who costs that time without proof, whatever it says then, is left alone, and
    for some seconds so are all newcomers. Where remote is required they are tried last, and with patience at the very end.
"""

from __future__ import annotations

from kakeya_zmq.backoff import Trouble
from kakeya_zmq.planner import MeasuredRates
from kakeya_zmq.protocol.estimates import Estimates
from kakeya_zmq.protocol.hedge import CHECK_AGAIN_S, CHECK_EVERY_S, is_too_slow, switch_decision
from kakeya_zmq.protocol.holdings import Holdings
from kakeya_zmq.protocol.offload_attempt import Attempt
from kakeya_zmq.protocol.offload_seal import COST_TIME, NEWCOMER_PROVES_WITHIN_S
from kakeya_zmq.protocol.prepare_values import PreparationTask, WorkerView
from kakeya_zmq.protocol.routes import RouteChoice, choose_route
from wire.ids import NodeId


class WorkerChoice:
    """The choices of one offload.

    Args:
        task: the preparation's.
        holdings: what is at hand.
        rates: measured; they tell who is left alone, and are told which newcomers cost time.
        estimates: of what jobs take.
    """

    def __init__(self, task: PreparationTask, holdings: Holdings, rates: MeasuredRates, estimates: Estimates) -> None:
        self._task = task
        self._settings = task.settings
        self._holdings = holdings
        self._account = holdings.account
        self._rates = rates
        self._estimates = estimates
        self._tried: set[NodeId] = set()
        self._left: set[NodeId] = set()
        """Those of the tried that did not fail, but were too slow; where remote is required, those left alone as well."""
        self._tried_again: set[NodeId] = set()
        self._newcomers_s = 0.0
        """What those that proved nothing have cost in all."""
        self._no_newcomers = False
        """None is tried any more: one has cost time, now or shortly before."""

    # --- who is next -------------------------------------------------------------------------------------------------

    def pass_over(self, now: float) -> None:
        """Go without the workers from which nothing came lately, unless there is no other way."""
        backoff, required = self._rates.backoff, self._task.remote_required
        for worker in self._task.workers:
            why = backoff.left_alone(worker.node_id, now, Trouble.BULK_PORT, Trouble.JOB)
            if why:
                self._tried.add(worker.node_id)
            if why and required:
                self._left.add(worker.node_id)  # for when nobody else is left
            elif why:
                self._account.reason(f"worker {worker.node_id} is {why}")
        wait_s = backoff.newcomers_left_alone_s(now)
        if wait_s > 0 and not required and any(self._is_newcomer(worker) for worker in self._task.workers):
            self._no_newcomers = True
            self._account.reason(
                f"workers that never proved to have the tenant's key are left alone for {wait_s:.0f} s more"
            )

    def next_worker(self) -> NodeId | None:
        """The worker that is best now, which counts as tried from here on; None when none is left that pays."""
        node_id = self._best()
        if node_id is None and self._task.remote_required and self._left:
            self.reconsider()
            node_id = self._best()
        if node_id is not None:
            self._tried.add(node_id)
        return node_id

    def wants_patience(self, node_id: NodeId) -> bool:
        """Whether the first word of this one is waited for as if it were no newcomer; it was just chosen."""
        last = node_id in self._tried_again or not any(map(self._is_open, self._estimates.workers()))
        return self._task.remote_required and last

    def _best(self) -> NodeId | None:
        choice = self._choose(explore=not self._tried)
        self._account.decide(choice.decision("rest"))
        for text in choice.refusals():
            self._account.reason(text)
        return choice.chosen.worker if choice.chosen is not None else None

    def _choose(self, *, explore: bool) -> RouteChoice:
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

    def _is_open(self, worker: WorkerView) -> bool:
        """Whether it may be tried next."""
        return worker.node_id not in self._tried and not (self._no_newcomers and self._is_newcomer(worker))

    def _is_newcomer(self, worker: WorkerView) -> bool:
        return self._rates.backoff.is_newcomer(worker.identity_public_key)

    # --- what came of it ---------------------------------------------------------------------------------------------

    def left_because(self, attempt: Attempt, now: float) -> str:
        """Why to leave a worker now, or nothing; when nothing, the attempt knows when to ask again."""
        remaining_s = attempt.remaining_s(now)
        best = self._choose(explore=False).chosen
        if best is None or not attempt.computing.observed(now):
            attempt.check_at = now + CHECK_EVERY_S
            return ""
        alternative_s = best.cost_ms / 1000.0
        if not is_too_slow(remaining_s, alternative_s):
            attempt.check_at = now + min(CHECK_EVERY_S, max(CHECK_AGAIN_S, alternative_s - remaining_s))
            return ""
        name = f"worker {attempt.node_id}"
        self._account.decide(switch_decision(name, remaining_s, best.name, alternative_s))
        return f"was too slow: {remaining_s * 1000:.0f} ms more against {alternative_s * 1000:.0f}"

    def set_aside(self, node_id: NodeId) -> None:
        """It was left, and may be asked once more when those it was left for have failed."""
        self._left |= {node_id} - self._tried_again

    def charge_newcomer(self, attempt: Attempt, now: float) -> None:
        """It has proven nothing. When it has cost time, alone or with others before it, that is not to happen again soon."""
        self._newcomers_s += now - attempt.started
        if not attempt.cost_time(now) and self._newcomers_s < NEWCOMER_PROVES_WITHIN_S:
            return
        backoff, required = self._rates.backoff, self._task.remote_required
        backoff.failed(attempt.node_id, Trouble.JOB, f"it {COST_TIME}", now)
        backoff.newcomer_cost_time(now)
        self._no_newcomers = not required
        if required and not attempt.patient:
            self.set_aside(attempt.node_id)

    def reconsider(self) -> None:
        """What workers were set aside for has failed: once nobody else is there, they may be asked again, each once."""
        if all(worker.node_id in self._tried for worker in self._task.workers):
            self._tried -= self._left
            self._tried_again |= self._left
            self._left.clear()
