"""Single flight: prompts that begin alike and are prepared at the same time share the work.

Each preparation that uses the local store boards a *flight*: what it is bringing into the store, and when. Another one that
needs the same parts may wait for it and then find them there, as if it had come later.

Rules
 1. Nobody waits for a flight that waits itself, and a flight that has begun to bring something waits again only when nobody
    waits for it. So what waits for what never forms a circle, and everything that waits is waited for by nobody.
 2. A follower is told of every change of its leader's flight, also of its end, and looks for itself what is in the store:
    a flight promises, it hands nothing over. So a store that is too small, or loses parts, costs the wait and nothing else.
 3. It waits only as long as it pays: until the leader's remaining time exceeds what the follower could do by itself, or the
    leader promises no more than is there. The leader ends, whatever the reason: the first follower goes on with what has
    arrived, its flight begins, and the others may follow that.
 4. A full hit at home never comes here.

Pure tables; the preparations drive them (kakeya_zmq.protocol.following), the session table passes the word on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kakeya_zmq.blocks import Chain
from wire.messages import PartKind, PartRef, Requirement

FLIGHTS_LOOKED_AT_MAX = 64
"""Flights that one preparation compares itself with; each comparison walks its chain."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a flight brings and when.

    ``promised``: parts on their way into the local store. The KV stood at ``position`` at time ``since`` and is expected to
    stand at ``target`` at ``until``, growing evenly; times in seconds. ``here``: it is computed on this machine.
    """

    promised: Collection[PartRef] = frozenset()
    position: int = 0
    target: int = 0
    since: float = 0.0
    until: float = 0.0
    here: bool = False

    def remaining_s(self, position: int, now: float) -> float:
        """Expected time until the KV stands at ``position``; once that is over, as long again as it has been overdue."""
        if position <= self.position:
            return 0.0
        share = (position - self.position) / max(1, self.target - self.position)
        expected = self.since + share * max(0.0, self.until - self.since)
        return expected - now if expected > now else now - self.since


def computed_parts(chain: Chain, begin: int, requirement: Requirement, segment_tokens: int) -> frozenset[PartRef]:
    """The parts that computing ``chain`` from ``begin`` on brings: recurrent state only where a segment ends."""
    refs: set[PartRef] = set()
    for block in chain.blocks:
        if block.end <= begin:
            continue
        if requirement.full:
            refs.add(PartRef(block_hash=block.block_hash, kind=PartKind.FULL))
        if requirement.window_tokens > 0:
            refs.add(PartRef(block_hash=block.block_hash, kind=PartKind.WINDOW))
        if requirement.state and (block.end % segment_tokens == 0 or block.end == chain.tokens):
            refs.add(PartRef(block_hash=block.block_hash, kind=PartKind.STATE))
    return frozenset(refs)


@dataclass(slots=True, eq=False)
class Flight:
    """One preparation as the others see it. ``forecast`` None: it waits for another one, or has ended."""

    chain: Chain
    forecast: Forecast | None = None
    leader: Flight | None = None
    version: int = 0
    """Grows with every change that followers should look at."""


class Flights:
    """The preparations under way on one primary, oldest first."""

    def __init__(self) -> None:
        self._flights: dict[Flight, None] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def board(self, chain: Chain) -> Flight:
        """A new preparation; it is nobody's leader before its first forecast."""
        flight = Flight(chain)
        self._flights[flight] = None
        return flight

    def leave(self, flight: Flight) -> None:
        """The preparation has ended; may be called again."""
        if flight in self._flights:
            del self._flights[flight]
            flight.forecast = flight.leader = None
            flight.version += 1

    def bring(self, flight: Flight, forecast: Forecast) -> None:
        """The flight brings something, or gets on; it waits for nobody from now on.

        Followers look again when something is at hand that was not, or other parts are promised; a mere delay they notice
        by their own clocks.
        """
        before = flight.forecast
        flight.leader = None
        flight.forecast = forecast
        if before is None or before.position != forecast.position or before.promised != forecast.promised:
            flight.version += 1

    def withdraw(self, flight: Flight) -> None:
        """The flight brings nothing for now; nobody waits for it."""
        assert not self.is_followed(flight), "a flight that others wait for never waits"
        flight.forecast = None
        flight.version += 1

    def follow(self, flight: Flight, leader: Flight) -> None:
        """``flight`` waits for ``leader``, one that :meth:`choose` returned for it."""
        assert flight.forecast is None, "a flight that brings something never waits"
        assert leader.forecast is not None, "nobody waits for one that waits or has ended"
        flight.leader = leader

    def is_followed(self, flight: Flight) -> bool:
        return any(other.leader is flight for other in self._flights)

    def choose(self, flight: Flight, worth: Callable[[Forecast], int]) -> Flight | None:
        """The flight to wait for, or None.

        Args:
            worth: forecast of another flight to the position that waiting for it would reach; 0: it does not pay.
        """
        best: Flight | None = None
        deepest = 0
        for other in self._candidates(flight):
            assert other.forecast is not None
            position = worth(other.forecast)
            if position > deepest:
                best, deepest = other, position
        return best

    def _candidates(self, flight: Flight) -> list[Flight]:
        """Flights that bring something of a prompt whose first block, or tail, is the same."""
        if not flight.chain.blocks:
            return []
        first = flight.chain.blocks[0].block_hash
        found = [
            other
            for other in self._flights
            if other is not flight and other.forecast is not None and other.chain.blocks[0].block_hash == first
        ]
        return found[-FLIGHTS_LOOKED_AT_MAX:]
