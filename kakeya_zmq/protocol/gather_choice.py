"""What gathering weighs: is a fetch the cheapest way on, is an answer worth waiting for, is a peer to be left?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kakeya_zmq.planner import MeasuredRates
from kakeya_zmq.protocol.estimates import Estimates, LinkShare
from kakeya_zmq.protocol.gather_peer import PeerFetch
from kakeya_zmq.protocol.hedge import CHECK_AGAIN_S, CHECK_EVERY_S, is_too_slow, switch_decision
from kakeya_zmq.protocol.holdings import Holdings
from kakeya_zmq.protocol.prepare_values import PeerView, PreparationTask
from kakeya_zmq.protocol.routes import Route, RouteChoice, choose_route

LOOKUP_PATIENCE_MIN_S = 0.05
"""A lookup is awaited for this long however little it can save: most peers answer in a few milliseconds."""


class GatherChoice:
    """The weighing of one gathering.

    Args:
        floor: tokens that are there without asking anybody.
    """

    def __init__(self, task: PreparationTask, holdings: Holdings, rates: MeasuredRates, floor: int) -> None:
        self._task = task
        self._settings = task.settings
        self._holdings = holdings
        self._account = holdings.account
        self._rates = rates
        self._floor = floor
        self.estimates = Estimates(task, rates, holdings.held_by)

    def at_hand(self) -> int:
        return max(self._floor, self._holdings.reach(self._holdings.has).position)

    def fetch_pays(self, shares: Sequence[LinkShare], reach: int) -> bool:
        """Whether getting ``shares``, and with them to ``reach``, is the way to take; remembered with its reasons."""
        total = self._holdings.received_bytes + sum(share.size_bytes for share in shares)
        if total > self._settings.max_import_bytes:
            self._account.reason(f"{total / 1e6:.0f} MB from caches are more than the import limit")
            return False
        choice = self._choose(shares, reach, explore=True)
        self._account.decide(choice.decision("prefix"))
        for text in choice.refusals():
            self._account.reason(text)
        return choice.chosen is not None and choice.chosen.imports

    def patience_s(self, known: Sequence[LinkShare], reach: int, waiting: Sequence[PeerView]) -> float:
        """How long open lookups are worth waiting for: what the best answer one of these peers could give would save.

        Args:
            known: what would have to be fetched to get to ``reach``, as far as the answers tell.
        """
        deepest = self._holdings.importable.tokens
        if reach >= deepest:
            return 0.0
        if self._task.remote_required:
            return math.inf
        best = self._choose(known, reach, explore=False).chosen
        known_ms = best.cost_ms if best is not None else math.inf
        at_hand = self.at_hand()
        size_bytes = self.estimates.job_bytes(at_hand)
        ideal_ms = min(self.estimates.ideal_import_ms(view, size_bytes, deepest, at_hand) for view in waiting)
        return max(LOOKUP_PATIENCE_MIN_S, (known_ms - ideal_ms) / 1000.0)

    def left_because(
        self, name: str, fetch: PeerFetch, aim: int, others: Sequence[LinkShare], others_reach: int, now: float
    ) -> str:
        """Why to leave a peer now, or nothing; when nothing, the fetch knows when to ask again.

        Args:
            aim: where the fetches under way lead.
            others: what other peers would have to deliver instead, to get to ``others_reach``.
        """
        fetch.check_at = now + CHECK_EVERY_S
        best = self._choose(others, others_reach, explore=False).chosen
        if best is None or not fetch.watch.observed(now):
            return ""
        after_ms = self.estimates.rest_ms(aim, self.at_hand())
        alternative_s = max(0.0, best.cost_ms - after_ms) / 1000.0
        remaining_s = fetch.watch.remaining_s(now)
        if not is_too_slow(remaining_s, alternative_s):
            fetch.check_at = now + min(CHECK_EVERY_S, max(CHECK_AGAIN_S, alternative_s - remaining_s))
            return ""
        self._account.decide(switch_decision(name, remaining_s, best.name, alternative_s))
        return f"was too slow: {remaining_s * 1000:.0f} ms more against {alternative_s * 1000:.0f}"

    def _choose(self, shares: Sequence[LinkShare], reach: int, *, explore: bool) -> RouteChoice:
        """The ways on from what is at hand, with ``shares`` for getting to ``reach``."""
        estimates, at_hand = self.estimates, self.at_hand()
        affordable = self._holdings.importable.tokens == self._task.target
        workers = estimates.workers() if affordable else ()
        routes: list[Route] = []
        if reach > at_hand:
            routes += estimates.imports(at_hand, reach, shares, workers)
        if estimates.worth_a_job(self._task.target - at_hand):
            base = self._holdings.job_base()
            # From a worker that holds everything the parts are fetched, as from any other node: there is nothing to compute.
            fetched = reach == self._task.target
            jobs = [worker for worker in workers if not (fetched and estimates.job_tokens(worker.node_id) == 0)]
            routes += [estimates.job(worker, base, at_hand) for worker in jobs]
        return choose_route(
            [*routes, estimates.here(at_hand)],
            minimum_savings_ratio=self._settings.minimum_savings_ratio,
            remote_required=self._task.remote_required,
            passed_over=self._rates.passed_over if explore else None,
        )
