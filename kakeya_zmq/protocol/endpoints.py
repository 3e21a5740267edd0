"""Which of its endpoints a node is reached through.

Rules
- The endpoint of the highest priority that works is used; among equal ones that with the shortest measured round trip.
- A broken endpoint is failed over at once: all others of the node are dialled, best first, and the first one up is used.
- A better endpoint is looked for in the background and used only after it has held for a while, the longer the more often it
  has broken (hysteresis); a shorter round trip alone must be shorter by a third. So nothing flaps.
- An endpoint that a probe cannot reach is left alone for twice as long each time.

Theory of operation, for each endpoint:

    state      event                           next       what happens
    IDLE       first, or next one not up       DIALLING   Dial; another follows when this one is not up after ATTEMPT_S
    IDLE       probe due, another in use       DIALLING   Dial
    DIALLING   Connected, none in use          USED       Use; HangUp all worse ones that are dialling
    DIALLING   Connected, another in use       SETTLING
    DIALLING   not up within PROBE_S           IDLE       HangUp; the next probe comes later
    SETTLING   held for settle_s, better       USED       Use; HangUp the other
    SETTLING   held for settle_s, not better   IDLE       HangUp
    SETTLING   Disconnected                    IDLE       HangUp; the next probe comes later
    USED       Disconnected                    DIALLING   Use(None); the others are dialled, too

Nothing is hung up while nothing is in use: whatever comes back first is taken. The host's connections dial again by
themselves after a loss, so DIALLING lasts until something is up or HangUp.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

DEFAULT_PRIORITIES: Final[Mapping[str, int]] = {
    "thunderbolt": 100,
    "lan": 50,
    "tailscale": 25,
    "public": 10,
    "loopback": 5,
}
"""By network, when none is given. Loopback is last: to other machines it leads nowhere, and on its own machine so does every
other address at the same speed."""
CONFIGURED: Final = "configured"
"""The network of an address that only the settings know (a seed); anything a card announces is preferred to it."""
ATTEMPT_S: Final = 1.0
"""A node's next endpoint is dialled, too, when the one before is not up after this long: several slow round trips."""
PROBE_S: Final = 6.0
"""A probe may take as long as a handshake that is given up (session_values.PEER_LOST_S), and a little more."""
PROBE_PAUSE_S: Final = 15.0
PROBE_PAUSE_LAST_S: Final = 240.0
COMPARE_PAUSE_S: Final = 120.0
"""Between two looks at an equally preferred endpoint that was not faster."""
SETTLE_S: Final = 3.0
SETTLE_LAST_S: Final = 60.0
FORGIVEN_S: Final = 60.0
"""An endpoint that was used for so long without a break is as good as one that never broke."""
FASTER: Final = 2 / 3
ROUND_TRIP_WEIGHT: Final = 0.2
"""Weight of a new sample in the moving average of the round trip time."""


@dataclass(frozen=True, slots=True)
class EndpointOffer:
    """One way to reach a node, as its card or the settings tell. ``address`` names it."""

    address: str
    network: str
    priority: int
    generation: int = 0
    """Of the PSK it admits; a later one is preferred, whatever the priority."""

    @property
    def preference(self) -> tuple[int, int]:
        return self.generation, self.priority


# --- events and effects ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Offered:
    """All endpoints of the node, as known now. One that is missing is not dialled again, but used on while it works."""

    offers: tuple[EndpointOffer, ...]


@dataclass(frozen=True, slots=True)
class Connected:
    address: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A session ended, or an attempt failed."""

    address: str


@dataclass(frozen=True, slots=True)
class RoundTrip:
    address: str
    round_trip_ms: float


@dataclass(frozen=True, slots=True)
class EndpointTick:
    """``deadline()`` has passed."""


EndpointEvent: TypeAlias = Offered | Connected | Disconnected | RoundTrip | EndpointTick


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a connection and keep trying until HangUp."""

    address: str


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close the connection, once what is under way over it has ended."""

    address: str


@dataclass(frozen=True, slots=True)
class Use:
    """From now on the node is reached through this endpoint; None: it is not reached."""

    address: str | None


EndpointEffect: TypeAlias = Dial | HangUp | Use


class EndpointState(enum.Enum):
    IDLE = "idle"
    DIALLING = "dialling"
    SETTLING = "settling"
    USED = "in use"


@dataclass(slots=True)
class _Endpoint:
    offer: EndpointOffer
    order: int
    """Place in the card: the node's own preference among equals."""
    state: EndpointState = EndpointState.IDLE
    offered: bool = True
    since: float = 0.0
    """When the present state began."""
    round_trip_ms: float | None = None
    breaks: int = 0
    misses: int = 0
    """Probes in a row that reached nothing."""
    probe_at: float = 0.0

    @property
    def rank(self) -> tuple[int, int, float, int]:
        """Sort key, best first."""
        round_trip_ms = self.round_trip_ms if self.round_trip_ms is not None else float("inf")
        return -self.offer.generation, -self.offer.priority, round_trip_ms, self.order

    @property
    def settle_s(self) -> float:
        return min(SETTLE_LAST_S, SETTLE_S * 2.0 ** min(self.breaks, 16))


class EndpointChoice:
    """The endpoints of one node; see the module's theory of operation."""

    def __init__(self) -> None:
        self._endpoints: dict[str, _Endpoint] = {}

    # --- views ---------------------------------------------------------------------------------------------------

    @property
    def in_use(self) -> str | None:
        """The address the node is reached through."""
        used = self._used()
        return used.offer.address if used is not None else None

    def state(self, address: str) -> EndpointState:
        endpoint = self._endpoints.get(address)
        return endpoint.state if endpoint is not None else EndpointState.IDLE

    def round_trip_ms(self, address: str) -> float | None:
        """Moving average; None until measured."""
        endpoint = self._endpoints.get(address)
        return endpoint.round_trip_ms if endpoint is not None else None

    def offers(self) -> tuple[EndpointOffer, ...]:
        """Best first."""
        return tuple(endpoint.offer for endpoint in self._ranked())

    def deadline(self) -> float | None:
        """When to call with EndpointTick at the latest."""
        used = self._used()
        due: list[float] = []
        for endpoint in self._endpoints.values():
            match endpoint.state:
                case EndpointState.SETTLING:
                    due.append(endpoint.since + endpoint.settle_s)
                case EndpointState.DIALLING if used is not None:
                    due.append(endpoint.since + PROBE_S)
                case EndpointState.IDLE if endpoint.offered and used is not None and self._worth_a_probe(endpoint, used):
                    due.append(endpoint.probe_at)
                case _:
                    pass
        if used is None and (next_dial := self._next_dial()) is not None:
            due.append(next_dial)
        return min(due, default=None)

    # --- the machine ------------------------------------------------------------------------------------------------

    def on(self, event: EndpointEvent, now: float) -> list[EndpointEffect]:
        match event:
            case Offered(offers=offers):
                effects = self._offered(offers, now)
            case Connected(address=address):
                effects = self._connected(address, now)
            case Disconnected(address=address):
                effects = self._disconnected(address, now)
            case RoundTrip(address=address, round_trip_ms=sample_ms):
                effects = []
                if (endpoint := self._endpoints.get(address)) is not None:
                    mean_ms = endpoint.round_trip_ms
                    endpoint.round_trip_ms = (
                        sample_ms if mean_ms is None else mean_ms + ROUND_TRIP_WEIGHT * (sample_ms - mean_ms)
                    )
            case EndpointTick():
                effects = self._settle(now)
            case _:
                assert_never(event)
        return [*effects, *self._probe(now), *self._dial(now)]

    def _offered(self, offers: tuple[EndpointOffer, ...], now: float) -> list[EndpointEffect]:
        for endpoint in self._endpoints.values():
            endpoint.offered = False
        for order, offer in enumerate(offers):
            known = self._endpoints.get(offer.address)
            if known is None:
                self._endpoints[offer.address] = _Endpoint(offer, order, since=now, probe_at=now)
            elif not known.offered:  # of two offers of one address the first counts
                known.offer, known.order, known.offered = offer, order, True
        effects: list[EndpointEffect] = []
        for address, endpoint in list(self._endpoints.items()):
            if endpoint.offered or endpoint.state is EndpointState.USED:
                continue
            if endpoint.state is not EndpointState.IDLE:
                effects.append(HangUp(address))
            del self._endpoints[address]
        return effects

    def _connected(self, address: str, now: float) -> list[EndpointEffect]:
        endpoint = self._endpoints.get(address)
        if endpoint is None or endpoint.state in (EndpointState.USED, EndpointState.SETTLING):
            return []
        endpoint.misses = 0
        if self._used() is None:
            return self._use(endpoint, now)
        self._enter(endpoint, EndpointState.SETTLING, now)
        return []

    def _use(self, endpoint: _Endpoint, now: float) -> list[EndpointEffect]:
        before = self._used()
        effects: list[EndpointEffect] = [Use(endpoint.offer.address)]
        self._enter(endpoint, EndpointState.USED, now)
        if before is not None:
            effects += self._hang_up(before, now, COMPARE_PAUSE_S)
        for other in list(self._endpoints.values()):  # hanging up forgets what is no longer offered
            dialling = other is not endpoint and other.state is EndpointState.DIALLING
            if dialling and other.rank > endpoint.rank:
                effects += self._hang_up(other, now, PROBE_PAUSE_S)
            elif dialling:
                other.since = now  # from now on it is a probe
        return effects

    def _disconnected(self, address: str, now: float) -> list[EndpointEffect]:
        endpoint = self._endpoints.get(address)
        if endpoint is None:
            return []
        match endpoint.state:
            case EndpointState.USED:
                endpoint.breaks = 1 if now - endpoint.since >= FORGIVEN_S else endpoint.breaks + 1
                self._enter(endpoint, EndpointState.DIALLING, now)
                effects: list[EndpointEffect] = [Use(None)]
                if not endpoint.offered:
                    effects.append(HangUp(address))
                    del self._endpoints[address]
                settled = [other for other in self._ranked() if other.state is EndpointState.SETTLING]
                return [*effects, *self._use(settled[0], now)] if settled else effects
            case EndpointState.SETTLING:
                endpoint.breaks += 1
                return self._missed(endpoint, now)
            case EndpointState.IDLE | EndpointState.DIALLING:
                return []
            case _:
                assert_never(endpoint.state)

    def _settle(self, now: float) -> list[EndpointEffect]:
        effects: list[EndpointEffect] = []
        for endpoint in self._ranked():
            used = self._used()
            if used is None:
                break
            if endpoint.state is EndpointState.SETTLING and now >= endpoint.since + endpoint.settle_s:
                if _is_better(endpoint, used):
                    effects += self._use(endpoint, now)
                else:
                    effects += self._hang_up(endpoint, now, COMPARE_PAUSE_S)
            elif endpoint.state is EndpointState.DIALLING and now >= endpoint.since + PROBE_S:
                effects += self._missed(endpoint, now)
        return effects

    def _missed(self, endpoint: _Endpoint, now: float) -> list[EndpointEffect]:
        pause_s = min(PROBE_PAUSE_LAST_S, PROBE_PAUSE_S * 2.0 ** min(endpoint.misses, 16))
        endpoint.misses += 1
        return self._hang_up(endpoint, now, pause_s)

    def _hang_up(self, endpoint: _Endpoint, now: float, pause_s: float) -> list[EndpointEffect]:
        self._enter(endpoint, EndpointState.IDLE, now)
        endpoint.probe_at = now + pause_s
        if not endpoint.offered:
            del self._endpoints[endpoint.offer.address]
        return [HangUp(endpoint.offer.address)]

    # --- dialling ----------------------------------------------------------------------------------------------------

    def _probe(self, now: float) -> list[EndpointEffect]:
        """With one in use: look whether a better one works."""
        used = self._used()
        if used is None:
            return []
        due = [
            endpoint
            for endpoint in self._ranked()
            if endpoint.state is EndpointState.IDLE
            and endpoint.offered
            and now >= endpoint.probe_at
            and self._worth_a_probe(endpoint, used)
        ]
        for endpoint in due:
            self._enter(endpoint, EndpointState.DIALLING, now)
        return [Dial(endpoint.offer.address) for endpoint in due]

    def _dial(self, now: float) -> list[EndpointEffect]:
        """With none in use: dial one after another, without giving any of them up."""
        effects: list[EndpointEffect] = []
        while self._used() is None and (due := self._next_dial()) is not None and due <= now:
            endpoint = next(each for each in self._ranked() if each.state is EndpointState.IDLE)
            self._enter(endpoint, EndpointState.DIALLING, now)
            effects.append(Dial(endpoint.offer.address))
        return effects

    def _next_dial(self) -> float | None:
        if all(endpoint.state is not EndpointState.IDLE for endpoint in self._endpoints.values()):
            return None
        dialling = [endpoint for endpoint in self._endpoints.values() if endpoint.state is EndpointState.DIALLING]
        if not dialling or any(endpoint.breaks for endpoint in dialling):
            return float("-inf")  # nothing is under way, or what was used has just broken: at once
        return max(endpoint.since for endpoint in dialling) + ATTEMPT_S

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _used(self) -> _Endpoint | None:
        return next((each for each in self._endpoints.values() if each.state is EndpointState.USED), None)

    def _ranked(self) -> list[_Endpoint]:
        return sorted(self._endpoints.values(), key=lambda endpoint: endpoint.rank)

    @staticmethod
    def _worth_a_probe(endpoint: _Endpoint, used: _Endpoint) -> bool:
        return endpoint.offer.preference >= used.offer.preference

    @staticmethod
    def _enter(endpoint: _Endpoint, state: EndpointState, now: float) -> None:
        endpoint.state = state
        endpoint.since = now


def _is_better(endpoint: _Endpoint, used: _Endpoint) -> bool:
    if endpoint.offer.preference != used.offer.preference:
        return endpoint.offer.preference > used.offer.preference
    if endpoint.round_trip_ms is None or used.round_trip_ms is None:
        return False
    return endpoint.round_trip_ms < FASTER * used.round_trip_ms
