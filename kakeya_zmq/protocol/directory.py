"""Who is in the fleet: capability cards, gossip and expiry.

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
- Announcements out of turn are limited to one in ``announce_interval_s``; a wish that comes too early is carried out later,
  so the last change is always told.

Theory of operation
Every ``interval_s`` the machine makes a fresh own card, asks the host to announce it on the bus, and exchanges cards with
``fanout`` nodes chosen at random among all it knows of (also with each node that has just been connected). An exchange is a
push and a pull over one connection, so links that work in one direction only do: our card and a digest of what we hold go
out; what is newer there, and the marks of what is newer here, come back; the latter is then sent. Each card thus reaches
each node about once an interval, which makes the traffic of a node linear in the size of the fleet, also of a node that all
others joined through. Nodes that could not be reached are left alone for a while; when a whole round fails, the next one
goes to nodes that are connected. New and returning nodes are reported as PeerChanged, vanished ones as PeerGone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Final, assert_never

from kakeya_zmq.protocol.directory_values import (
    CLOCK_SKEW_NOTED_S,
    IDENTITIES_MAX,
    NODES_MAX,
    Announce,
    AnnounceNow,
    CardRefused,
    CardsArrived,
    ClockSkewed,
    DirectoryEffect,
    DirectoryEvent,
    DirectorySettings,
    DirectoryTick,
    Exchange,
    ExchangeEnded,
    Expelled,
    HeldCard,
    Identity,
    OwnIdClaimed,
    PeerChanged,
    PeerConnected,
    PeerDisconnected,
    PeerGone,
    Slept,
)
from kakeya_zmq.protocol.identities import OTHER_KEY, IdentityBook
from wire.cards import Card, mark_of, open_card, pack_digest, unpack_digest, unpack_marks
from wire.errors import RemoteProtocolError
from wire.ids import NodeId
from wire.limits import ANSWER_BYTES_MAX, CARDS_PER_EXCHANGE_MAX

__all__ = [
    "Announce",
    "AnnounceNow",
    "CardRefused",
    "CardsArrived",
    "ClockSkewed",
    "Directory",
    "DirectoryEffect",
    "DirectoryEvent",
    "DirectorySettings",
    "DirectoryTick",
    "Exchange",
    "ExchangeEnded",
    "Expelled",
    "OwnIdClaimed",
    "PeerChanged",
    "PeerConnected",
    "PeerDisconnected",
    "PeerGone",
    "Slept",
]

OTHER_KEY_CARD: Final = "a card has another identity key than the one known here for that name"


class Directory:
    """The card table of one node.

    Args:
        node_id: our own.
        make_card: builds and signs our current card; called with the next sequence number.
        incarnation: ours, to tell our own earlier cards from those of somebody who runs under our name.
        identities: who is bound to which key, also from earlier runs and other parts of this node; our pins only when None.
        rng: chooses whom to exchange with.
    """

    def __init__(
        self,
        *,
        node_id: str,
        make_card: Callable[[int], bytes],
        settings: DirectorySettings | None = None,
        incarnation: int = 0,
        identities: IdentityBook | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._node_id = node_id
        self._make_card = make_card
        self._settings = settings or DirectorySettings()
        self._incarnation = incarnation
        self._book = identities
        self._rng = rng or random.Random()
        self._held: dict[str, HeldCard] = {}
        self._marks: dict[bytes, str] = {}
        """Of all held cards."""
        self._identities: dict[str, Identity] = {}
        """In the order in which they were last heard of."""
        self._first_expiry = math.inf
        """No card expires before: they are renewed all the time, and a look too early costs less than to look always."""
        self._connected: set[str] = set()
        self._asked: set[str] = set()
        """With whom an exchange is under way."""
        self._avoided: dict[str, float] = {}
        """Nodes that could not be reached: until when they are not chosen."""
        self._chains: dict[str, int] = {}
        """Exchanges with a node that directly followed each other so far."""
        self._round_tried = self._round_succeeded = False
        self._own: tuple[bytes, float] | None = None
        self._own_key: bytes | None = None
        self._sequence = 0
        self._rounds = 0
        self._next_round = 0.0
        self._announced_at = -math.inf
        self._announce_due: float | None = None

    # --- views ---------------------------------------------------------------------------------------------------

    def peers(self, now: float) -> tuple[Card, ...]:
        """Live cards of other nodes, by node id."""
        return tuple(held.card for _, held in sorted(self._held.items()) if held.expires > now)

    def card(self, node_id: str) -> Card | None:
        held = self._held.get(node_id)
        return held.card if held else None

    def age_ms(self, node_id: str, now: float) -> int | None:
        """How old the card held of a node is; None when there is none."""
        held = self._held.get(node_id)
        return held.age_ms(now) if held else None

    def clock_skew_ms(self, node_id: str) -> float | None:
        """How far a node's wall clock is ahead of ours, as far as its card tells; None when it does not."""
        held = self._held.get(node_id)
        return held.skew_ms if held else None

    def answer(
        self, known: bytes | None, asker: str, now: float, *, incarnation: int | None = None
    ) -> tuple[tuple[bytes, ...], tuple[int, ...], bytes, bool]:
        """What another node's question gets: cards newer than its digest, their ages in ms, marks of those that are newer
        there, and whether there are more. Cards it has never seen go first.

        Args:
            incarnation: the asker's. A card of its id with a newer one is sent back to it: somebody else runs under its id.

        Raises:
            RemoteProtocolError: the digest is broken.
        """
        if known is None:
            return (), (), b"", False
        theirs = unpack_digest(known)
        newer: list[tuple[bool, HeldCard]] = []
        for mark, node_id in self._marks.items():
            held, told = self._held[node_id], theirs.get(mark)
            foreign = node_id != asker or (incarnation is not None and held.version[0] > incarnation)
            if (told is None or told < held.version) and held.expires > now and foreign:
                newer.append((told is not None, held))
        own, made_at = self._own_card(now)
        blobs: list[bytes] = []
        ages: list[int] = []
        if theirs.get(mark_of(self._node_id)) != (self._incarnation, self._sequence):
            blobs, ages = [own], [max(0, int((now - made_at) * 1000))]
        room, room_bytes = CARDS_PER_EXCHANGE_MAX - len(blobs), ANSWER_BYTES_MAX - sum(map(len, blobs))
        if len(newer) > room or sum(len(held.blob) for _, held in newer) > room_bytes:
            self._rng.shuffle(newer)
            newer.sort(key=lambda entry: entry[0])
        sizes = accumulate(len(held.blob) for _, held in newer[:room])
        sent = [held for (_, held), size in zip(newer, sizes, strict=False) if size <= room_bytes]
        blobs += [held.blob for held in sent]
        ages += [held.age_ms(now) for held in sent]
        expired = self._expired_marks()
        wanted = b"".join(mark for mark, version in theirs.items() if self._wants(mark, version, expired))
        return tuple(blobs), tuple(ages), wanted[: 8 * CARDS_PER_EXCHANGE_MAX], len(newer) > len(sent)

    def deadline(self) -> float:
        """When the next round, announcement or expiry is due, in seconds on the caller's clock."""
        announce_due = math.inf if self._announce_due is None else self._announce_due
        return min(self._next_round, self._first_expiry, announce_due)

    def forget(self, node_id: str) -> list[DirectoryEffect]:
        """Let the next key that is seen for a node id be its key; what is held of it goes now."""
        effects = self._drop([node_id] if node_id in self._held else [], "its key was forgotten by the administrator")
        self._identities.pop(node_id, None)
        return effects

    # --- the machine -----------------------------------------------------------------------------------------------

    def on(self, event: DirectoryEvent, now: float) -> list[DirectoryEffect]:
        match event:
            case CardsArrived(cards=cards, ages_ms=ages_ms, unix_s=unix_s, told_by=told_by):
                return self._merge_all(cards, ages_ms, unix_s, now, told_by)
            case ExchangeEnded():
                return self._exchange_ended(event, now)
            case PeerConnected(node_id=node_id):
                self._connected.add(node_id)
                self._avoided.pop(node_id, None)
                return [] if node_id in self._asked else [self._ask(node_id, now)]
            case PeerDisconnected(node_id=node_id):
                self._connected.discard(node_id)
                return []
            case AnnounceNow():
                if self._announce_due is None:
                    self._announce_due = max(now, self._announced_at + self._settings.announce_interval_s)
                return self._announce(now)
            case Slept(seconds=seconds):
                return self._slept(seconds, now)
            case Expelled(identity_public_key=key, reason=reason):
                return self._drop(
                    [name for name, held in self._held.items() if held.card.identity_public_key == key], reason
                )
            case DirectoryTick():
                return [*self._expire(now), *self._round(now), *self._announce(now)]
            case _:
                assert_never(event)

    def _own_card(self, now: float) -> tuple[bytes, float]:
        """Our latest card and when it was made; a node that does not announce itself yet is asked for it all the same."""
        if self._own is None or now - self._own[1] >= self._settings.interval_s:
            self._sequence += 1
            self._own = (self._make_card(self._sequence), now)
            if self._own_key is None:
                self._own_key = open_card(self._own[0]).identity_public_key
        return self._own

    def _round(self, now: float) -> list[DirectoryEffect]:
        if now < self._next_round:
            return []
        young = self._rounds < self._settings.first_rounds
        self._rounds += 1
        pause = self._settings.first_interval_s if young else self._settings.interval_s
        # Not all nodes of a fleet that was started together shall speak at the same moment.
        self._next_round = now + pause * (1.0 if young else self._rng.uniform(1.0 - self._settings.jitter, 1.0))
        self._announce_due = now
        announced = self._announce(now)
        chosen = [node_id for node_id in self._choose(now) if node_id not in self._asked]
        self._round_tried, self._round_succeeded = bool(chosen), False
        self._chains.clear()
        return [*announced, *(self._ask(node_id, now) for node_id in chosen)]

    def _choose(self, now: float) -> list[str]:
        """Whom to exchange with in this round."""
        self._avoided = {node_id: until for node_id, until in self._avoided.items() if until > now}
        connected = sorted(self._connected - self._avoided.keys())
        if self._round_tried and not self._round_succeeded and connected:
            candidates = connected
        else:
            known = (
                node_id
                for node_id, held in self._held.items()
                if held.expires > now and held.card.endpoints and node_id not in self._avoided
            )
            candidates = sorted({*connected, *known})
        return self._rng.sample(candidates, min(self._settings.fanout, len(candidates)))

    def _ask(self, node_id: str, now: float) -> Exchange:
        self._asked.add(node_id)
        own, made_at = self._own_card(now)
        versions = [(mark, *self._held[held].version) for mark, held in self._marks.items()]
        return Exchange(NodeId(node_id), (own,), (max(0, int((now - made_at) * 1000)),), pack_digest(versions))

    def _exchange_ended(self, event: ExchangeEnded, now: float) -> list[DirectoryEffect]:
        node_id = event.node_id
        self._asked.discard(node_id)
        if not event.ok:
            self._avoided[node_id] = now + self._settings.avoid_rounds * self._settings.interval_s
            return []
        self._round_succeeded = True
        self._avoided.pop(node_id, None)
        effects = self._merge_all(event.cards, event.ages_ms, event.unix_s, now, node_id)
        news = any(isinstance(effect, PeerChanged) for effect in effects)
        chain = self._chains.get(node_id, 0)
        again = event.more and news and chain < NODES_MAX // CARDS_PER_EXCHANGE_MAX + 1
        if again:
            self._chains[node_id] = chain + 1
        wanted = [
            held
            for mark in self._marks_of(event.wanted)
            if (name := self._marks.get(mark)) is not None and (held := self._held[name]).expires > now
        ][:CARDS_PER_EXCHANGE_MAX]
        sizes = accumulate(len(held.blob) for held in wanted)
        sent = [held for held, size in zip(wanted, sizes, strict=True) if size <= ANSWER_BYTES_MAX]
        if sent:
            cards, ages = tuple(held.blob for held in sent), tuple(held.age_ms(now) for held in sent)
            effects.append(Exchange(node_id, cards, ages, None))
        return [*effects, *([self._ask(node_id, now)] if again else [])]

    @staticmethod
    def _marks_of(wanted: bytes) -> Iterable[bytes]:
        try:
            return unpack_marks(wanted)
        except RemoteProtocolError:  # the other side's mistake costs it the cards it wanted
            return ()

    def _announce(self, now: float) -> list[DirectoryEffect]:
        if self._announce_due is None or now < self._announce_due:
            return []
        self._announce_due = None
        self._announced_at = now
        self._own = None
        return [Announce(self._own_card(now)[0])]

    # --- merging ---------------------------------------------------------------------------------------------------

    def _merge_all(
        self, cards: tuple[bytes, ...], ages_ms: tuple[int, ...], unix_s: float | None, now: float, told_by: str
    ) -> list[DirectoryEffect]:
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
        held = self._held.get(node_id)
        if held is None and len(self._held) >= NODES_MAX:
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
                self._first_expiry = min(self._first_expiry, held.expires)
            return []
        self._remember(node_id, identity or Identity(card.identity_public_key))
        self._held[node_id] = arrived
        self._first_expiry = min(self._first_expiry, arrived.expires)
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
        if self._own_key is not None and card.identity_public_key != self._own_key:
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

    def _wants(self, mark: bytes, version: tuple[int, int], expired: Mapping[bytes, tuple[int, int]]) -> bool:
        """Whether another node's version of a card would be news here."""
        node_id = self._marks.get(mark)
        if node_id is not None:
            return self._held[node_id].version < version
        if mark == mark_of(self._node_id) or len(self._held) >= NODES_MAX:
            return False
        incarnation, sequence = expired.get(mark, (-1, -1))
        return version[0] != incarnation or version[1] > sequence

    def _expired_marks(self) -> Mapping[bytes, tuple[int, int]]:
        """What has expired here, and a relay that is a little behind may still tell of."""
        return {
            mark_of(node_id): identity.expired
            for node_id, identity in self._identities.items()
            if identity.expired is not None and node_id not in self._held
        }

    def _remember(self, node_id: str, identity: Identity) -> None:
        """Pin an identity, or make it the one heard of last; one of a node that is gone makes room."""
        self._identities.pop(node_id, None)
        if len(self._identities) >= IDENTITIES_MAX:
            oldest = next(known for known in self._identities if known not in self._held)
            del self._identities[oldest]
        self._identities[node_id] = identity

    def _expire(self, now: float) -> list[DirectoryEffect]:
        if now < self._first_expiry:
            return []
        return self._drop([node_id for node_id, held in self._held.items() if held.expires <= now], "its card expired")

    def _drop(self, gone: list[str], reason: str) -> list[DirectoryEffect]:
        for node_id in gone:
            self._identities[node_id].expired = self._held.pop(node_id).version
            del self._marks[mark_of(node_id)]
        self._first_expiry = min((held.expires for held in self._held.values()), default=math.inf)
        return [PeerGone(NodeId(node_id), reason) for node_id in gone]

    def _slept(self, seconds: float, now: float) -> list[DirectoryEffect]:
        """This machine was asleep while its monotonic clock stood still: cards have aged, and we have missed rounds."""
        for held in self._held.values():
            held.born -= max(0.0, seconds)
            self._first_expiry = min(self._first_expiry, held.expires)
        self._next_round = now
        self._avoided.clear()
        return [*self._expire(now), *self._round(now)]
