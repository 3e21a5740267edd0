"""A preparation's side of single flight: wait for another one's parts while that pays, and tell others of its own.

Theory of operation: ``start`` looks for a flight to wait for, ``rejoin`` once more when the workers were in vain. While
there is one, ``look`` is called whenever that flight changed and by the own clock; it ends when the parts are there, when
the leader has ended or promises no more, or when it has become too slow. Then the preparation goes on as if it had just
begun (after ``rejoin``: without the fleet), perhaps behind another flight.
"""

from __future__ import annotations

from collections.abc import Iterable

from kakeya_zmq.planner import MeasuredRates
from kakeya_zmq.protocol.effects import Count, Effect
from kakeya_zmq.protocol.estimates import Estimates
from kakeya_zmq.protocol.flights import Flight, Flights, Forecast
from kakeya_zmq.protocol.holdings import Holdings
from kakeya_zmq.protocol.prepare_values import PreparationTask
from kakeya_zmq.store import BlockStore
from wire.limits import TEXT_CHARACTERS_MAX
from wire.messages import Decision, PartKind, PartRef

CHECK_EVERY_S = 0.25
"""How often a follower asks itself whether waiting still pays."""
MARGIN = 0.5
EQUAL_MS = 1.0
"""Costs that differ by less are equal, and then the work is shared."""
PATIENCE_MIN_S = 1.0
"""A leader that is late is itself looking for something better (.hedge), so its followers are more patient than it is, and
leave it for nothing but this machine: what made the leader late would make them late, too."""


class Following:
    """The flight of one preparation.

    Args:
        flights: shared by the preparations of one primary.
        store: the local store, through which parts are shared.
    """

    def __init__(
        self, task: PreparationTask, holdings: Holdings, rates: MeasuredRates, flights: Flights, store: BlockStore
    ) -> None:
        self._task = task
        self._holdings = holdings
        self._account = holdings.account
        self._estimates = Estimates(task, rates, holdings.held_by)
        self._flights = flights
        self._store = store
        self._flight: Flight | None = None
        self._seen = -1
        self._goal = 0
        self._began_at = 0
        self._followed_since = 0.0
        self._check_at = 0.0
        self._workers_failed = False
        self.at_hand = 0
        """Tokens of this prompt that the flight has brought so far, and what was there before: for the user to see."""

    @property
    def waiting(self) -> bool:
        return self._flight is not None and self._flight.leader is not None

    @property
    def goal(self) -> int:
        """Where the one that is waited for is to bring this prompt."""
        return self._goal

    @property
    def followed(self) -> bool:
        return self._flight is not None and self._flights.is_followed(self._flight)

    def deadline(self) -> float | None:
        return self._check_at if self.waiting else None

    def start(self, at_hand: int, now: float) -> list[Effect]:
        """Wait for a flight, if there is one that pays; ``waiting`` tells."""
        self._flight = self._flights.board(self._task.chain)
        self._began_at = at_hand
        if not self._choose(at_hand, now):
            return []
        return [Count("prefills_shared")]

    def rejoin(self, at_hand: int, now: float) -> list[Effect]:
        """No worker brings the rest: wait for a flight after all, unless others wait for this one; ``waiting`` tells."""
        self._workers_failed = True
        if self._flight is None or self.followed:
            return []
        self._flights.withdraw(self._flight)
        self._began_at = at_hand
        return [Count("prefills_shared")] if self._choose(at_hand, now) else []

    def has_news(self) -> bool:
        """Whether the flight that is waited for has changed since the last look."""
        leader = self._flight.leader if self._flight is not None else None
        return leader is not None and leader.version != self._seen

    def look(self, at_hand: int, now: float) -> list[Effect]:
        """Is it still worth waiting? ``at_hand``: tokens that are there by now. ``waiting`` tells."""
        flight = self._flight
        if flight is None or flight.leader is None:
            return []
        leader = flight.leader
        self._seen, self._check_at = leader.version, now + CHECK_EVERY_S
        self.at_hand = at_hand
        if at_hand >= self._task.target:
            return self._stop(at_hand)
        forecast = leader.forecast
        if forecast is not None and at_hand < self._goal:
            self._goal = self._reach(forecast)
            if forecast.position >= self._goal > at_hand:
                return self._stop(at_hand)  # it was there, and the store did not keep it
            if self._goal > at_hand:
                if not self._is_late(forecast, at_hand, now):
                    return []
                self._account.reason(f"another session that prepares the same {self._goal} tokens was too slow")
                return [Count("prefill_waits_abandoned"), *self._stop(at_hand)]
        flight.leader = None
        if self._choose(at_hand, now):
            return []
        return self._stop(at_hand)

    def tell(self, forecast: Forecast) -> None:
        """What this preparation brings; it is waiting for nobody."""
        if self._flight is not None:
            self._flights.bring(self._flight, forecast)

    def leave(self) -> None:
        """The preparation has ended."""
        if self._flight is not None:
            self._flights.leave(self._flight)
            self._flight = None

    # --- what pays ---------------------------------------------------------------------------------------------------

    def _choose(self, at_hand: int, now: float) -> bool:
        flight = self._flight
        assert flight is not None

        def worth(forecast: Forecast) -> int:
            goal = self._reach(forecast)
            if goal - at_hand < self._task.facts.requirement.block_tokens and goal < self._task.target:
                return 0
            if goal <= max(at_hand, forecast.position) or not self._has_room(forecast.promised):
                return 0
            return goal if self._pays(forecast, goal, at_hand, now) else 0

        leader = self._flights.choose(flight, worth)
        if leader is None or leader.forecast is None:
            return False
        self._flights.follow(flight, leader)
        self._followed_since = now
        self._seen, self._check_at = leader.version, now + CHECK_EVERY_S
        self._goal = worth(leader.forecast)
        self._decide(leader.forecast, at_hand, now)
        return True

    def _reach(self, forecast: Forecast) -> int:
        """How deep this prompt gets with what is at hand and what the flight promises."""
        holdings, promised = self._holdings, forecast.promised
        return holdings.reach(lambda ref: ref in promised or holdings.has(ref)).position

    def _has_room(self, promised: Iterable[PartRef]) -> bool:
        """Whether the store can hold what is promised until it is used."""
        sizes, block_tokens = self._task.facts.part_bytes_per_token, self._task.facts.requirement.block_tokens
        needed = sum(sizes[ref.kind] * (1 if ref.kind is PartKind.STATE else block_tokens) for ref in promised)
        return needed <= self._store.room_bytes(self._task.fingerprint)

    def _alternative_ms(self, forecast: Forecast, goal: int, at_hand: int) -> float:
        """What getting to ``goal`` costs without the flight.

        Computing here is none where it is forbidden, nor where the flight does just that: there is one engine.
        """
        everything = self._task.target - at_hand
        worth_a_job = self._estimates.worth_a_job(everything) and not self._workers_failed
        workers = self._estimates.workers() if worth_a_job else ()
        base = self._holdings.job_base()
        jobs = [self._estimates.job_ms(worker, base) for worker in workers]
        here = [] if self._task.remote_required or forecast.here else [self._estimates.here_ms(goal - at_hand, everything)]
        return min([*here, *jobs], default=float("inf"))

    def _pays(self, forecast: Forecast, goal: int, at_hand: int, now: float) -> bool:
        return forecast.remaining_s(goal, now) * 1000.0 <= self._alternative_ms(forecast, goal, at_hand) + EQUAL_MS

    def _is_late(self, forecast: Forecast, at_hand: int, now: float) -> bool:
        """Whether computing here would be clearly quicker by now."""
        if forecast.here or self._task.remote_required or now < self._followed_since + PATIENCE_MIN_S:
            return False
        here_ms = self._estimates.here_ms(self._goal - at_hand, self._task.target - at_hand)
        return forecast.remaining_s(self._goal, now) * 1000.0 > here_ms * (1 + MARGIN)

    def _decide(self, forecast: Forecast, at_hand: int, now: float) -> None:
        wait_ms = forecast.remaining_s(self._goal, now) * 1000.0
        alone_ms = self._alternative_ms(forecast, self._goal, at_hand)
        costs = {"wait for another session": round(wait_ms, 3)}
        text = f"another session prepares the same {self._goal} tokens: {wait_ms:.0f} ms"
        if alone_ms < float("inf"):
            costs["alone"] = round(alone_ms, 3)
            text += f" against {alone_ms:.0f} ms alone"
        self._account.decide(
            Decision(what="share", chosen="wait for another session", costs_ms=costs, text=text[:TEXT_CHARACTERS_MAX])
        )

    def _stop(self, at_hand: int) -> list[Effect]:
        """Wait no longer; the preparation tells its own forecast as soon as it has decided how to go on."""
        if self._flight is not None:
            self._flight.leader = None
        gained = at_hand - self._began_at
        if gained <= 0:
            return []
        self._account.reason(f"tokens {self._began_at} to {at_hand} were prepared for another session at the same time")
        self._began_at = at_hand
        return [Count("prefills_shared_tokens", gained)]
