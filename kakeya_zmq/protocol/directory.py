"""Who is in the fleet: capability cards, gossip and expiry.

Rules
- A card is signed by its node's identity key; the first key seen for a node id is the only one accepted for it.
- For each node the newest (incarnation, sequence) wins; order and repetition of arrivals cannot matter.
- Our own card is never taken from others. A card older than its TTL is never merged.
- Time-to-live runs on this machine's monotonic clock from the card's age at arrival, so wrong wall clocks do no harm.

Theory of operation
Every ``interval_s`` the machine asks the host to announce a fresh own card on the bus and pulls the cards of one or more
peers (pull-merge: our cards go out with the question, theirs come back), which also serves links that work in one direction
only. New and returning nodes are reported as PeerChanged, vanished ones as PeerGone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from wire.cards import Card, open_card
from wire.errors import RemoteProtocolError
from wire.ids import NodeId
from wire.limits import CARDS_PER_EXCHANGE_MAX


@dataclass(frozen=True, slots=True)
class DirectorySettings:
    """Gossip timing, in seconds."""

    interval_s: float = 10.0
    first_interval_s: float = 1.0
    """Between the first announcements, so that a young fleet converges quickly."""
    first_rounds: int = 5


# --- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CardsArrived:
    """Signed cards from a pull, a push or the bus, with their ages as told by the sender, in ms."""

    cards: tuple[bytes, ...]
    ages_ms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AnnounceNow:
    """Something about this node changed (or a peer just connected): do not wait for the interval."""


@dataclass(frozen=True, slots=True)
class DirectoryTick:
    """``deadline()`` has passed."""


DirectoryEvent: TypeAlias = CardsArrived | AnnounceNow | DirectoryTick


# --- effects -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Announce:
    """Publish our own card on the bus."""

    card: bytes


@dataclass(frozen=True, slots=True)
class PullRound:
    """Exchange cards with every connected peer."""


@dataclass(frozen=True, slots=True)
class PeerChanged:
    """A node appeared or its card changed. ``restarted``: its incarnation is new, so its leases and jobs are gone."""

    card: Card
    appeared: bool
    restarted: bool


@dataclass(frozen=True, slots=True)
class PeerGone:
    node_id: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class CardRefused:
    reason: str


DirectoryEffect: TypeAlias = Announce | PullRound | PeerChanged | PeerGone | CardRefused


@dataclass(slots=True)
class _Held:
    card: Card
    blob: bytes
    born: float
    expires: float


class Directory:
    """The card table of one node.

    Args:
        node_id: our own.
        make_card: builds and signs our current card; called with the next sequence number.
    """

    def __init__(
        self, *, node_id: str, make_card: Callable[[int], bytes], settings: DirectorySettings | None = None
    ) -> None:
        self._node_id = node_id
        self._make_card = make_card
        self._settings = settings or DirectorySettings()
        self._held: dict[str, _Held] = {}
        self._identities: dict[str, bytes] = {}
        self._sequence = 0
        self._rounds = 0
        self._next_round: float | None = 0.0

    # --- views ---------------------------------------------------------------------------------------------------

    def peers(self, now: float) -> tuple[Card, ...]:
        """Live cards of other nodes, by node id."""
        return tuple(held.card for _, held in sorted(self._held.items()) if held.expires >= now)

    def card(self, node_id: str) -> Card | None:
        held = self._held.get(node_id)
        return held.card if held else None

    def exchange(self, now: float) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
        """Our own fresh card and the live ones we hold, with their ages in ms: what an exchange carries."""
        live = [held for _, held in sorted(self._held.items()) if held.expires >= now][: CARDS_PER_EXCHANGE_MAX - 1]
        cards = (self._own_card(), *(held.blob for held in live))
        ages = (0, *(max(0, int((now - held.born) * 1000)) for held in live))
        return cards, ages

    def deadline(self) -> float | None:
        """When the next round or the next expiry is due, in seconds on the caller's clock."""
        times = [held.expires for held in self._held.values()]
        if self._next_round is not None:
            times.append(self._next_round)
        return min(times, default=None)

    # --- the machine -----------------------------------------------------------------------------------------------

    def on(self, event: DirectoryEvent, now: float) -> list[DirectoryEffect]:
        match event:
            case CardsArrived(cards=cards, ages_ms=ages_ms):
                return self._merge(zip(cards, ages_ms, strict=False), now)
            case AnnounceNow():
                return [Announce(self._own_card())]
            case DirectoryTick():
                return [*self._expire(now), *self._round(now)]
            case _:
                assert_never(event)

    def _own_card(self) -> bytes:
        self._sequence += 1
        return self._make_card(self._sequence)

    def _round(self, now: float) -> list[DirectoryEffect]:
        if self._next_round is None or now < self._next_round:
            return []
        young = self._rounds < self._settings.first_rounds
        self._rounds += 1
        self._next_round = now + (self._settings.first_interval_s if young else self._settings.interval_s)
        return [Announce(self._own_card()), PullRound()]

    def _merge(self, arrivals: Iterable[tuple[bytes, int]], now: float) -> list[DirectoryEffect]:
        effects: list[DirectoryEffect] = []
        for blob, age_ms in arrivals:
            effects += self._merge_one(blob, age_ms, now)
        return effects

    def _merge_one(self, blob: bytes, age_ms: int, now: float) -> list[DirectoryEffect]:
        try:
            card = open_card(blob)
        except RemoteProtocolError:
            return [CardRefused("a card is malformed or its signature does not hold")]
        node_id = card.node_id
        if node_id == self._node_id or age_ms >= card.ttl_ms:
            return []
        pinned = self._identities.setdefault(node_id, card.identity_public_key)
        if pinned != card.identity_public_key:
            return [CardRefused("a card claims a node id that belongs to another identity key")]
        held = self._held.get(node_id)
        if held and (card.incarnation, card.sequence) <= (held.card.incarnation, held.card.sequence):
            return []
        born = now - age_ms / 1000
        self._held[node_id] = _Held(card=card, blob=blob, born=born, expires=born + card.ttl_ms / 1000)
        restarted = held is not None and card.incarnation != held.card.incarnation
        return [PeerChanged(card=card, appeared=held is None, restarted=restarted)]

    def _expire(self, now: float) -> list[DirectoryEffect]:
        gone = [node_id for node_id, held in self._held.items() if held.expires < now]
        for node_id in gone:
            del self._held[node_id]
        return [PeerGone(NodeId(node_id), "its card expired") for node_id in gone]
