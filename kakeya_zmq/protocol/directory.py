"""Who is in the fleet: capability cards, gossip and expiry.

Rules
- A card is signed by its node's identity key; the first key seen for a node id is the only one accepted for it.
- For each node the newest (incarnation, sequence) wins; order and repetition of arrivals cannot matter. Of one card the
  greatest age told counts: a relay may understate an age by the time the card travelled, never overstate it.
- Our own card is never taken from others. A card that is as old as its TTL is gone, here and on arrival, and does not come
  back through a relay that is a little behind.
- Time-to-live runs on this machine's monotonic clock from the card's age at arrival, so wrong wall clocks do no harm.
- Memory is bounded: so many live cards, so many pinned identities. A full table refuses newcomers; of the identities those
  of nodes long gone make room.
- Announcements out of turn are limited to one in ``announce_interval_s``; a wish that comes too early is carried out later,
  so the last change is always told.

Theory of operation
Every ``interval_s`` the machine asks the host to announce a fresh own card on the bus and pulls the cards of one or more
peers (pull-merge: our cards go out with the question, theirs come back), which also serves links that work in one direction
only. New and returning nodes are reported as PeerChanged, vanished ones as PeerGone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from wire.cards import Card, open_card
from wire.errors import RemoteProtocolError
from wire.ids import NodeId
from wire.limits import CARDS_PER_EXCHANGE_MAX

NODES_MAX = 1024
"""Live cards of other nodes: 16 MiB of the largest. As many as a server has sessions."""
IDENTITIES_MAX = 4096
"""Node ids whose key is remembered, live or not: under 1 KiB each."""


@dataclass(frozen=True, slots=True)
class DirectorySettings:
    """Gossip timing, in seconds."""

    interval_s: float = 10.0
    first_interval_s: float = 1.0
    """Between the first announcements, so that a young fleet converges quickly."""
    first_rounds: int = 5
    announce_interval_s: float = 0.25
    """Least time between two announcements that were asked for: many joiners at once cost four a second, not one each."""


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
    """A node appeared or its card changed. ``restarted``: its incarnation is new, so its leases and jobs are gone.

    A node that restarts after its card expired both appears and has restarted.
    """

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

    @property
    def version(self) -> tuple[int, int]:
        return self.card.incarnation, self.card.sequence

    @property
    def expires(self) -> float:
        return self.born + self.card.ttl_ms / 1000


@dataclass(slots=True)
class _Identity:
    public_key: bytes
    expired: tuple[int, int] | None = None
    """(incarnation, sequence) of the card that expired last: it and older ones of that incarnation are not news."""


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
        self._identities: dict[str, _Identity] = {}
        """In the order in which they were last heard of."""
        self._sequence = 0
        self._rounds = 0
        self._next_round = 0.0
        self._announced_at = -math.inf
        self._announce_due: float | None = None
        self._relay_offset = 0

    # --- views ---------------------------------------------------------------------------------------------------

    def peers(self, now: float) -> tuple[Card, ...]:
        """Live cards of other nodes, by node id."""
        return tuple(held.card for _, held in sorted(self._held.items()) if held.expires > now)

    def card(self, node_id: str) -> Card | None:
        held = self._held.get(node_id)
        return held.card if held else None

    def exchange(self, now: float) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
        """Our own fresh card and live ones we hold, with their ages in ms: what an exchange carries.

        Of more cards than one message takes, each exchange carries the next ones in turn.
        """
        live = [held for _, held in sorted(self._held.items()) if held.expires > now]
        room = CARDS_PER_EXCHANGE_MAX - 1
        if len(live) > room:
            start = self._relay_offset % len(live)
            self._relay_offset = start + room
            live = [*live[start:], *live[:start]][:room]
        cards = (self._own_card(), *(held.blob for held in live))
        ages = (0, *(max(0, int((now - held.born) * 1000)) for held in live))
        return cards, ages

    def deadline(self) -> float:
        """When the next round, announcement or expiry is due, in seconds on the caller's clock."""
        times = [held.expires for held in self._held.values()]
        if self._announce_due is not None:
            times.append(self._announce_due)
        return min([self._next_round, *times])

    # --- the machine -----------------------------------------------------------------------------------------------

    def on(self, event: DirectoryEvent, now: float) -> list[DirectoryEffect]:
        match event:
            case CardsArrived(cards=cards, ages_ms=ages_ms):
                return [effect for pair in zip(cards, ages_ms, strict=False) for effect in self._merge(*pair, now)]
            case AnnounceNow():
                if self._announce_due is None:
                    self._announce_due = max(now, self._announced_at + self._settings.announce_interval_s)
                return self._announce(now)
            case DirectoryTick():
                return [*self._expire(now), *self._round(now), *self._announce(now)]
            case _:
                assert_never(event)

    def _own_card(self) -> bytes:
        self._sequence += 1
        return self._make_card(self._sequence)

    def _round(self, now: float) -> list[DirectoryEffect]:
        if now < self._next_round:
            return []
        young = self._rounds < self._settings.first_rounds
        self._rounds += 1
        self._next_round = now + (self._settings.first_interval_s if young else self._settings.interval_s)
        self._announce_due = now
        return [*self._announce(now), PullRound()]

    def _announce(self, now: float) -> list[DirectoryEffect]:
        if self._announce_due is None or now < self._announce_due:
            return []
        self._announce_due = None
        self._announced_at = now
        return [Announce(self._own_card())]

    # --- merging ---------------------------------------------------------------------------------------------------

    def _merge(self, blob: bytes, age_ms: int, now: float) -> list[DirectoryEffect]:
        try:
            card = open_card(blob)
        except RemoteProtocolError:
            return [CardRefused("a card is malformed or its signature does not hold")]
        node_id = card.node_id
        age_ms = max(0, age_ms)
        if node_id == self._node_id or age_ms >= card.ttl_ms:
            return []
        identity = self._identities.get(node_id)
        if identity is not None and identity.public_key != card.identity_public_key:
            return [CardRefused("a card claims a node id that belongs to another identity key")]
        if identity is not None and _is_expired_version(card, identity):
            return []
        held = self._held.get(node_id)
        arrived = _Held(card=card, blob=blob, born=now - age_ms / 1000)
        if held is not None and arrived.version <= held.version:
            if arrived.version == held.version:
                held.born = min(held.born, arrived.born)
            return []
        if held is None and len(self._held) >= NODES_MAX:
            return [CardRefused(f"a card is not taken: {NODES_MAX} nodes are known already")]
        self._remember(node_id, identity or _Identity(card.identity_public_key))
        self._held[node_id] = arrived
        known = held.version if held is not None else identity.expired if identity is not None else None
        restarted = known is not None and card.incarnation != known[0]
        return [PeerChanged(card=card, appeared=held is None, restarted=restarted)]

    def _remember(self, node_id: str, identity: _Identity) -> None:
        """Pin an identity, or make it the one heard of last; one of a node that is gone makes room."""
        self._identities.pop(node_id, None)
        if len(self._identities) >= IDENTITIES_MAX:
            oldest = next(known for known in self._identities if known not in self._held)
            del self._identities[oldest]
        self._identities[node_id] = identity

    def _expire(self, now: float) -> list[DirectoryEffect]:
        gone = [node_id for node_id, held in self._held.items() if held.expires <= now]
        for node_id in gone:
            self._identities[node_id].expired = self._held.pop(node_id).version
        return [PeerGone(NodeId(node_id), "its card expired") for node_id in gone]


def _is_expired_version(card: Card, identity: _Identity) -> bool:
    """Whether a relay brings back what has expired here. Another incarnation may be older: clocks are set back."""
    if identity.expired is None:
        return False
    incarnation, sequence = identity.expired
    return card.incarnation == incarnation and card.sequence <= sequence
