"""The cards that are held of other nodes: which is taken, which replaces which, and when it goes.

Rules
- A card is signed by its node's identity key; the first key seen for a node id is the only one accepted for it. New names
  are charged to whoever told them (kakeya_zmq.protocol.identities).
- For each node the newest (incarnation, sequence) wins; order and repetition of arrivals cannot matter. Of one card the
  greatest age told counts: a relay may understate an age by the time the card travelled, never overstate it.
- Our own card is never taken from others. A card that is as old as its TTL is gone, here and on arrival, and does not come
  back through a relay that is a little behind.
- Time-to-live runs on this machine's monotonic clock from the card's age at arrival, so wrong wall clocks do no harm. How
  far they are off is told to people, and used for nothing.
- Memory is bounded: so many live cards, so many pinned identities. A full table refuses newcomers; of the identities those
  of nodes long gone make room.

A *mark* is the short name of a node in a digest (wire.cards): what two nodes hold is compared by marks and versions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

from kakeya_zmq.protocol.directory_values import (
    CLOCK_SKEW_NOTED_S,
    IDENTITIES_MAX,
    NODES_MAX,
    CardRefused,
    ClockSkewed,
    DirectoryEffect,
    HeldCard,
    Identity,
    OwnIdClaimed,
    PeerChanged,
    PeerGone,
)
from kakeya_zmq.protocol.identities import OTHER_KEY, IdentityBook
from wire.cards import Card, mark_of, open_card
from wire.errors import RemoteProtocolError
from wire.ids import NodeId

OTHER_KEY_CARD: Final = "a card has another identity key than the one known here for that name"


class CardTable:
    """The cards held by one node.

    Args:
        node_id: our own.
        incarnation: ours, to tell our own earlier cards from those of somebody who runs under our name.
        identities: who is bound to which key, also from earlier runs and other parts of this node; our pins only when None.
    """

    def __init__(self, *, node_id: str, incarnation: int, identities: IdentityBook | None) -> None:
        self._node_id = node_id
        self._incarnation = incarnation
        self._book = identities
        self.own_key: bytes | None = None
        """Our identity key, as soon as there is a card of ours to know it from."""
        self.held: dict[str, HeldCard] = {}
        """By node id, for others to read. What has expired is there until the next :meth:`expire`."""
        self._marks: dict[bytes, str] = {}
        """Of all held cards."""
        self._identities: dict[str, Identity] = {}
        """In the order in which they were last heard of."""
        self.first_expiry = math.inf
        """No card expires before: they are renewed all the time, and a look too early costs less than to look always."""

    # --- comparing with another node -------------------------------------------------------------------------------

    def versions(self) -> list[tuple[bytes, int, int]]:
        """(mark, incarnation, sequence) of all held cards: what a digest tells."""
        return [(mark, *self.held[node_id].version) for mark, node_id in self._marks.items()]

    def by_mark(self, mark: bytes) -> HeldCard | None:
        """The card of the node with this mark, None when there is none."""
        node_id = self._marks.get(mark)
        return None if node_id is None else self.held[node_id]

    def newer_than(
        self, theirs: Mapping[bytes, tuple[int, int]], asker: str, incarnation: int | None, now: float
    ) -> list[tuple[bool, HeldCard]]:
        """Cards that would be news to an asker with this digest, each with whether it has an older one of that node.

        Its own card is none, unless one with a newer ``incarnation`` than its own is held: somebody else runs under its id.
        """
        newer: list[tuple[bool, HeldCard]] = []
        for mark, node_id in self._marks.items():
            held, told = self.held[node_id], theirs.get(mark)
            foreign = node_id != asker or (incarnation is not None and held.version[0] > incarnation)
            if (told is None or told < held.version) and held.expires > now and foreign:
                newer.append((told is not None, held))
        return newer

    def wanted(self, theirs: Mapping[bytes, tuple[int, int]]) -> Iterator[bytes]:
        """Marks of the cards of another node's digest that would be news here."""
        expired = self._expired_marks()
        return (mark for mark, version in theirs.items() if self._wants(mark, version, expired))

    def _wants(self, mark: bytes, version: tuple[int, int], expired: Mapping[bytes, tuple[int, int]]) -> bool:
        """Whether another node's version of a card would be news here."""
        node_id = self._marks.get(mark)
        if node_id is not None:
            return self.held[node_id].version < version
        if mark == mark_of(self._node_id) or len(self.held) >= NODES_MAX:
            return False
        incarnation, sequence = expired.get(mark, (-1, -1))
        return version[0] != incarnation or version[1] > sequence

    def _expired_marks(self) -> Mapping[bytes, tuple[int, int]]:
        """What has expired here, and a relay that is a little behind may still tell of."""
        return {
            mark_of(node_id): identity.expired
            for node_id, identity in self._identities.items()
            if identity.expired is not None and node_id not in self.held
        }

    # --- cards that come ------------------------------------------------------------------------------------------

    def merge_all(
        self, cards: tuple[bytes, ...], ages_ms: tuple[int, ...], unix_s: float | None, now: float, told_by: str
    ) -> list[DirectoryEffect]:
        """Take cards of others, as far as they are news, with their ages as told by ``told_by``."""
        pairs = zip(cards, ages_ms, strict=False)
        return [effect for blob, age_ms in pairs for effect in self._merge(blob, max(0, age_ms), unix_s, now, told_by)]

    def _merge(self, blob: bytes, age_ms: int, unix_s: float | None, now: float, told_by: str) -> list[DirectoryEffect]:
        try:
            card = open_card(blob)
        except RemoteProtocolError:
            return [CardRefused("a card is malformed or its signature does not hold")]
        node_id = card.node_id
        if node_id == self._node_id:
            return self._own_id(card, age_ms)
        if age_ms >= card.ttl_ms:
            return []
        identity = self._identities.get(node_id)
        if identity is not None and identity.public_key != card.identity_public_key:
            return [CardRefused(f"two nodes are called {node_id[:64]}: {OTHER_KEY_CARD}")]
        held = self.held.get(node_id)
        if held is None and len(self.held) >= NODES_MAX:
            return [CardRefused(f"a card is not taken: {NODES_MAX} nodes are known already")]
        if refusal := self._refusal(card, told_by):
            text = OTHER_KEY_CARD if refusal == OTHER_KEY else f"a card is not taken: {refusal}"
            return [CardRefused(f"{node_id[:64]}: {text}")]
        if identity is not None and identity.has_expired(card):
            return []
        arrived = HeldCard(card=card, blob=blob, born=now - age_ms / 1000)
        if held is not None and arrived.version <= held.version:
            if arrived.version == held.version:
                held.born = min(held.born, arrived.born)
                self.first_expiry = min(self.first_expiry, held.expires)
            return []
        self._remember(node_id, identity or Identity(card.identity_public_key))
        self.held[node_id] = arrived
        self.first_expiry = min(self.first_expiry, arrived.expires)
        if held is None:
            self._marks[mark_of(node_id)] = node_id
        known = held.version if held is not None else identity.expired if identity is not None else None
        restarted = known is not None and card.incarnation != known[0]
        skewed = self._judge_clock(arrived, held, age_ms, unix_s)
        return [PeerChanged(card=card, appeared=held is None, restarted=restarted), *skewed]

    def _refusal(self, card: Card, told_by: str) -> str:
        if self._book is None:
            return ""
        return self._book.admit(card.node_id, card.identity_public_key, card.roles, told_by=told_by)

    def _own_id(self, card: Card, age_ms: int) -> list[DirectoryEffect]:
        """Our own card coming back is no news, unless it is not ours."""
        if self.own_key is not None and card.identity_public_key != self.own_key:
            return [OwnIdClaimed("another node of this fleet has the same node id")]
        if self._incarnation and card.incarnation > self._incarnation and age_ms < card.ttl_ms:
            return [OwnIdClaimed("another process runs under this node's id and identity key")]
        return []

    def _judge_clock(
        self, arrived: HeldCard, held: HeldCard | None, age_ms: int, unix_s: float | None
    ) -> list[DirectoryEffect]:
        card = arrived.card
        if unix_s is None or card.announced_at_unix <= 0:
            return []
        arrived.skew_ms = (card.announced_at_unix - unix_s) * 1000 + age_ms
        arrived.skew_told = held is not None and held.skew_told
        wrong_s = abs(arrived.skew_ms) / 1000
        if arrived.skew_told:
            arrived.skew_told = wrong_s > CLOCK_SKEW_NOTED_S / 2
        elif wrong_s > CLOCK_SKEW_NOTED_S:
            arrived.skew_told = True
            return [ClockSkewed(NodeId(card.node_id), arrived.skew_ms)]
        return []

    def _remember(self, node_id: str, identity: Identity) -> None:
        """Pin an identity, or make it the one heard of last; one of a node that is gone makes room."""
        self._identities.pop(node_id, None)
        if len(self._identities) >= IDENTITIES_MAX:
            oldest = next(known for known in self._identities if known not in self.held)
            del self._identities[oldest]
        self._identities[node_id] = identity

    # --- cards that go --------------------------------------------------------------------------------------------

    def expire(self, now: float) -> list[DirectoryEffect]:
        """Hold no card any more that is as old as its TTL."""
        if now < self.first_expiry:
            return []
        return self._drop([node_id for node_id, held in self.held.items() if held.expires <= now], "its card expired")

    def age(self, seconds: float) -> None:
        """All cards are older by so much: the clock stood still."""
        for held in self.held.values():
            held.born -= seconds
            self.first_expiry = min(self.first_expiry, held.expires)

    def drop_key(self, identity_public_key: bytes, reason: str) -> list[DirectoryEffect]:
        """Hold nothing that this key has signed."""
        return self._drop(
            [name for name, held in self.held.items() if held.card.identity_public_key == identity_public_key], reason
        )

    def forget(self, node_id: str) -> list[DirectoryEffect]:
        """Let the next key that is seen for a node id be its key; what is held of it goes now."""
        effects = self._drop([node_id] if node_id in self.held else [], "its key was forgotten by the administrator")
        self._identities.pop(node_id, None)
        return effects

    def _drop(self, gone: list[str], reason: str) -> list[DirectoryEffect]:
        for node_id in gone:
            self._identities[node_id].expired = self.held.pop(node_id).version
            del self._marks[mark_of(node_id)]
        self.first_expiry = min((held.expires for held in self.held.values()), default=math.inf)
        return [PeerGone(NodeId(node_id), reason) for node_id in gone]
