"""Who is in the fleet: capability cards and their gossip. Which cards are held: kakeya_zmq.protocol.directory_table.

Rules
- Our own card is never told to anybody when it is older than ``interval_s``: a fresh one is made.
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
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import assert_never

from kakeya_zmq.protocol.directory_table import CardTable
from kakeya_zmq.protocol.directory_values import (
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
    OwnIdClaimed,
    PeerChanged,
    PeerConnected,
    PeerDisconnected,
    PeerGone,
    Slept,
)
from kakeya_zmq.protocol.identities import IdentityBook
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


class Directory:
    """One node's part in the gossip, and its view of the fleet.

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
        self._rng = rng or random.Random()
        self._table = CardTable(node_id=node_id, incarnation=incarnation, identities=identities)
        self._connected: set[str] = set()
        self._asked: set[str] = set()
        """With whom an exchange is under way."""
        self._avoided: dict[str, float] = {}
        """Nodes that could not be reached: until when they are not chosen."""
        self._chains: dict[str, int] = {}
        """Exchanges with a node that directly followed each other so far."""
        self._round_tried = self._round_succeeded = False
        self._own: tuple[bytes, float] | None = None
        self._sequence = 0
        self._rounds = 0
        self._next_round = 0.0
        self._announced_at = -math.inf
        self._announce_due: float | None = None

    # --- views ---------------------------------------------------------------------------------------------------

    def peers(self, now: float) -> tuple[Card, ...]:
        """Live cards of other nodes, by node id."""
        return tuple(held.card for _, held in sorted(self._table.held.items()) if held.expires > now)

    def card(self, node_id: str) -> Card | None:
        held = self._table.held.get(node_id)
        return held.card if held else None

    def age_ms(self, node_id: str, now: float) -> int | None:
        """How old the card held of a node is; None when there is none."""
        held = self._table.held.get(node_id)
        return held.age_ms(now) if held else None

    def clock_skew_ms(self, node_id: str) -> float | None:
        """How far a node's wall clock is ahead of ours, as far as its card tells; None when it does not."""
        held = self._table.held.get(node_id)
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
        newer = self._table.newer_than(theirs, asker, incarnation, now)
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
        wanted = b"".join(self._table.wanted(theirs))
        return tuple(blobs), tuple(ages), wanted[: 8 * CARDS_PER_EXCHANGE_MAX], len(newer) > len(sent)

    def deadline(self) -> float:
        """When the next round, announcement or expiry is due, in seconds on the caller's clock."""
        announce_due = math.inf if self._announce_due is None else self._announce_due
        return min(self._next_round, self._table.first_expiry, announce_due)

    def forget(self, node_id: str) -> list[DirectoryEffect]:
        """Let the next key that is seen for a node id be its key; what is held of it goes now."""
        return self._table.forget(node_id)

    # --- the machine -----------------------------------------------------------------------------------------------

    def on(self, event: DirectoryEvent, now: float) -> list[DirectoryEffect]:
        match event:
            case CardsArrived(cards=cards, ages_ms=ages_ms, unix_s=unix_s, told_by=told_by):
                return self._table.merge_all(cards, ages_ms, unix_s, now, told_by)
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
                return self._table.drop_key(key, reason)
            case DirectoryTick():
                return [*self._table.expire(now), *self._round(now), *self._announce(now)]
            case _:
                assert_never(event)

    def _own_card(self, now: float) -> tuple[bytes, float]:
        """Our latest card and when it was made; a node that does not announce itself yet is asked for it all the same."""
        if self._own is None or now - self._own[1] >= self._settings.interval_s:
            self._sequence += 1
            self._own = (self._make_card(self._sequence), now)
            if self._table.own_key is None:
                self._table.own_key = open_card(self._own[0]).identity_public_key
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
                for node_id, held in self._table.held.items()
                if held.expires > now and held.card.endpoints and node_id not in self._avoided
            )
            candidates = sorted({*connected, *known})
        return self._rng.sample(candidates, min(self._settings.fanout, len(candidates)))

    def _ask(self, node_id: str, now: float) -> Exchange:
        self._asked.add(node_id)
        own, made_at = self._own_card(now)
        digest = pack_digest(self._table.versions())
        return Exchange(NodeId(node_id), (own,), (max(0, int((now - made_at) * 1000)),), digest)

    def _exchange_ended(self, event: ExchangeEnded, now: float) -> list[DirectoryEffect]:
        node_id = event.node_id
        self._asked.discard(node_id)
        if not event.ok:
            self._avoided[node_id] = now + self._settings.avoid_rounds * self._settings.interval_s
            return []
        self._round_succeeded = True
        self._avoided.pop(node_id, None)
        effects = self._table.merge_all(event.cards, event.ages_ms, event.unix_s, now, node_id)
        news = any(isinstance(effect, PeerChanged) for effect in effects)
        chain = self._chains.get(node_id, 0)
        again = event.more and news and chain < NODES_MAX // CARDS_PER_EXCHANGE_MAX + 1
        if again:
            self._chains[node_id] = chain + 1
        wanted = [
            held
            for mark in self._marks_of(event.wanted)
            if (held := self._table.by_mark(mark)) is not None and held.expires > now
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

    def _slept(self, seconds: float, now: float) -> list[DirectoryEffect]:
        """This machine was asleep while its monotonic clock stood still: cards have aged, and we have missed rounds."""
        self._table.age(max(0.0, seconds))
        self._next_round = now
        self._avoided.clear()
        return [*self._table.expire(now), *self._round(now)]
