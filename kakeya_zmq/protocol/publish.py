"""Background publishing: give new parts to cache peers, without anybody waiting for it.

Rules
 1. Nothing here ever delays a user: the queue is bounded in deliveries and bytes, and the oldest delivery is dropped (and
    counted) to make room.
 2. A run of parts goes to the peers that rendezvous hashing ranks first for its first block. Runs begin where a prompt left
    what was known, so that one prompt's new blocks stay together, different prompts spread over the fleet, and the same
    prefix computed twice lands on the same peer.
 3. A failed delivery is tried once more, on another peer if there is one. Every attempt ends as a success or a failure in
    the counters.
    A peer that would only fail again is passed over for a while (.publish_queue).
 4. One delivery a peer at a time: a peer that hangs delays what is for it, and nothing that is for others.
 5. Payloads are referenced, never copied.

Theory of operation: one delivery is one PublishOffer to one peer, ``OFFERED → SENDING → AWAITING_RESULT``; a peer that wants
nothing skips to the result. Each delivery has a stall clock that every event of its own winds up, and an absolute deadline.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kakeya_zmq.backoff import Trouble
from kakeya_zmq.blocks import Part
from kakeya_zmq.planner import LINK_COMPRESSION_CHOICES, MeasuredRates, decide_link_codec, rank_replicas
from kakeya_zmq.protocol.effects import (
    NO_CONNECTION,
    AddCredit,
    Ask,
    AskFailed,
    AskId,
    AskProgressed,
    AskReplied,
    CancelAsk,
    CloseLane,
    ConnectSender,
    Count,
    Effect,
    HostEvent,
    LaneFinished,
    LaneId,
    Tick,
)
from kakeya_zmq.protocol.prepare_values import WHY_CHARACTERS_MAX, IdAllocator, ValueSetter
from kakeya_zmq.protocol.publish_queue import Delivery, DeliveryQueue, Recipients, batches
from wire import limits
from wire.cards import Card
from wire.codec import unpack_bitmap
from wire.errors import FailureCode, LocalProtocolError, RemoteProtocolError
from wire.ids import NodeId
from wire.messages import CipherSuite, Credit, Cut, PublishGrant, PublishOffer, PublishResult, ValueBytes
from wire.text import clean

_UNWILLING = frozenset({FailureCode.PERMISSION_DENIED, FailureCode.UNIMPLEMENTED, FailureCode.FAILED_PRECONDITION})
"""Answers that will be the same for everything of this namespace."""
_NOTHING_TAKEN = "nothing was taken at its bulk port"


def replica_candidates(cards: Iterable[Card], fingerprint: bytes) -> tuple[NodeId, ...]:
    """Nodes whose cards say that they hold KV for others and take this namespace; a node's own card is not among them."""
    return tuple(
        NodeId(card.node_id)
        for card in cards
        if "cache" in card.roles
        and card.cache is not None
        and (not card.cache.fingerprints or fingerprint in card.cache.fingerprints)
    )


@dataclass(frozen=True, slots=True)
class PublishSettings:
    """Bounds of background publishing."""

    replication_factor: int = 1
    """Peers that get each part; 0 switches publishing off."""
    attempts_max: int = 2
    in_flight_max: int = 2
    """Deliveries at once, each to another peer."""
    queue_deliveries_max: int = 256
    queue_bytes_max: int = 512 * limits.MIB
    """Payloads kept alive by waiting deliveries."""
    batch_parts_max: int = 1024
    """About 130 KiB of descriptions in one offer."""
    batch_bytes_max: int = 256 * limits.MIB
    delivery_timeout_s: float = 120.0
    stall_timeout_s: float = 15.0
    full_pause_s: float = 30.0
    """How long a peer is passed over that had no room."""
    unwilling_pause_s: float = 600.0
    """How long a peer is passed over that does not take the namespace."""
    suites: tuple[CipherSuite, ...] = (CipherSuite.AES_256_GCM, CipherSuite.SECRETBOX)
    chunk_bytes: int = limits.CHUNK_BYTES_DEFAULT
    link_compression: str = "auto"
    """One of planner.LINK_COMPRESSION_CHOICES. The rate of a link is learned from fetches, and taken for both ways."""
    value_bytes: ValueBytes = 1
    """Width of a value in the parts, for link codecs."""

    def __post_init__(self) -> None:
        counts = (
            self.attempts_max,
            self.in_flight_max,
            self.queue_deliveries_max,
            self.queue_bytes_max,
            self.batch_bytes_max,
        )
        if min(counts) <= 0 or self.replication_factor < 0:
            raise LocalProtocolError("publish limits must be positive")
        if self.link_compression not in LINK_COMPRESSION_CHOICES:
            raise LocalProtocolError(f"there is no link compression {self.link_compression!r}")
        if not 0 < self.batch_parts_max <= limits.PARTS_PER_MANIFEST_MAX:
            raise LocalProtocolError(f"a batch has 1 to {limits.PARTS_PER_MANIFEST_MAX} parts")
        pauses = (self.full_pause_s, self.unwilling_pause_s)
        if min(self.delivery_timeout_s, self.stall_timeout_s, *pauses) <= 0 or not self.suites:
            raise LocalProtocolError("publish timeouts must be positive, and a cipher suite must be offered")


class DeliveryPhase(enum.Enum):
    OFFERED = enum.auto()
    SENDING = enum.auto()
    AWAITING_RESULT = enum.auto()


@dataclass(slots=True, eq=False)
class _Active:
    delivery: Delivery
    ask: AskId
    deadline: float
    stall_deadline: float
    phase: DeliveryPhase = DeliveryPhase.OFFERED
    lane: LaneId | None = None
    wanted_bytes: int = 0
    is_taken: bool = False
    """The peer has given credit: bytes of ours have reached it."""


def _ignore_value(name: str, value: object) -> None:
    """The default for a host that keeps no values."""


class Publisher:
    """Feed it parts with :meth:`publish` and the host's events with :meth:`on`; it never has an outcome.

    Args:
        settings: bounds.
        ids: numbers for asks and lanes.
        set_value: takes ``last_publish_error`` of the ``prefill`` telemetry section.
        rates: measured, to choose link codecs; None: nothing is known of any link.
    """

    def __init__(
        self,
        settings: PublishSettings,
        ids: IdAllocator,
        set_value: ValueSetter = _ignore_value,
        rates: MeasuredRates | None = None,
    ) -> None:
        self._settings = settings
        self._ids = ids
        self._set_value = set_value
        self._rates = MeasuredRates() if rates is None else rates
        self._recipients = Recipients(self._rates.backoff)
        self._queue = DeliveryQueue(
            self._recipients, deliveries_max=settings.queue_deliveries_max, bytes_max=settings.queue_bytes_max
        )
        self._active: list[_Active] = []
        self._took: dict[NodeId, float] = {}

    @property
    def waiting(self) -> int:
        """Deliveries that have not begun."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        return not self._queue and not self._active

    def took_at(self, node_id: NodeId) -> float | None:
        """When a peer last said that it holds what it was offered; None when it never did."""
        return self._took.get(node_id)

    def deadline(self) -> float | None:
        return min((min(active.deadline, active.stall_deadline) for active in self._active), default=None)

    def owns(self, event: HostEvent) -> bool:
        """Whether the event belongs to a delivery that is under way."""
        match event:
            case AskReplied(ask=ask) | AskProgressed(ask=ask) | AskFailed(ask=ask):
                return any(active.ask == ask for active in self._active)
            case LaneFinished(lane=lane):
                return any(active.lane == lane for active in self._active)
            case _:
                return False

    def publish(
        self, parts: Sequence[Part], fingerprint: bytes, peers: Sequence[NodeId], now: float, cuts: Sequence[Cut] = ()
    ) -> list[Effect]:
        """Queue parts for the peers that rendezvous ranks first.

        Args:
            parts: of one prompt; any order.
            fingerprint: 32 bytes.
            peers: cache peers that may hold this fingerprint.
            cuts: tails that are the beginnings of these parts' blocks.
        """
        replicas = self._settings.replication_factor
        if not parts or not peers or replicas == 0:
            return []
        # A turn's append and its answer may both have exported a block; a peer refuses an offer that names a part twice.
        distinct = {part.meta.ref: part for part in parts}.values()
        ordered = sorted(distinct, key=lambda part: (part.meta.start, part.meta.kind))
        ranked = rank_replicas(ordered[0].meta.block_hash, self._recipients.willing(peers, fingerprint, now))
        runs = batches(ordered, parts_max=self._settings.batch_parts_max, bytes_max=self._settings.batch_bytes_max)
        if not ranked:
            return [Count("publish_dropped", len(runs))]
        effects: list[Effect] = []
        for batch in runs:
            hashes = {part.meta.block_hash for part in batch}
            own = tuple(cut for cut in cuts if cut.within in hashes)[: limits.PARTS_PER_MANIFEST_MAX]
            for node_id in ranked[:replicas]:
                effects += self._enqueue(Delivery(fingerprint, batch, node_id, ranked[replicas:], cuts=own))
        return [*effects, *self._begin_waiting(now)]

    def on(self, event: HostEvent, now: float) -> list[Effect]:
        """Take one event; those that belong to nothing under way are ignored."""
        effects: list[Effect] = []
        match event:
            case AskReplied(ask=ask) | AskProgressed(ask=ask) | AskFailed(ask=ask):
                for active in [active for active in self._active if active.ask == ask]:
                    effects += self._ask_event(active, event, now)
            case LaneFinished(lane=lane):
                for active in [active for active in self._active if active.lane == lane]:
                    effects += self._lane_finished(active, event, now)
            case Tick():
                pass
            case _:
                return []
        for active in [active for active in self._active if now >= min(active.deadline, active.stall_deadline)]:
            effects += self._fail(active, self._stall(active, now), now)
        return [*effects, *self._begin_waiting(now)]

    def close(self) -> list[Effect]:
        """Drop everything; used at shutdown."""
        effects: list[Effect] = []
        if dropped := len(self._queue) + len(self._active):
            effects.append(Count("publish_dropped", dropped))
        for active in list(self._active):
            effects += self._end(active, "shutting down", ok=False, cancel=True)
        self._queue.clear()
        return effects

    # --- what waits --------------------------------------------------------------------------------------------------

    def _enqueue(self, delivery: Delivery) -> list[Effect]:
        dropped = self._queue.add(delivery)
        return [Count("publish_dropped", dropped)] if dropped else []

    def _begin_waiting(self, now: float) -> list[Effect]:
        busy = [active.delivery.node_id for active in self._active]
        begun = self._queue.take(self._settings.in_flight_max - len(busy), busy, now)
        return [effect for delivery in begun for effect in self._begin(delivery, now)]

    def _begin(self, delivery: Delivery, now: float) -> list[Effect]:
        settings = self._settings
        ask = self._ids.ask()
        self._active.append(
            _Active(delivery, ask, deadline=now + settings.delivery_timeout_s, stall_deadline=now + settings.stall_timeout_s)
        )
        link = decide_link_codec(
            settings.link_compression, delivery.node_id, delivery.size_bytes, self._rates, frame_bytes=settings.chunk_bytes
        )
        offer = PublishOffer(
            fingerprint=delivery.fingerprint,
            parts=tuple(part.meta for part in delivery.parts),
            suites=settings.suites,
            chunk_bytes_max=settings.chunk_bytes,
            link_codec=link.codec,
            cuts=delivery.cuts,
        )
        return [Count("publish_attempts"), Ask(ask, delivery.node_id, offer, settings.delivery_timeout_s)]

    # --- one delivery ------------------------------------------------------------------------------------------------

    def _ask_event(self, active: _Active, event: AskReplied | AskProgressed | AskFailed, now: float) -> list[Effect]:
        active.stall_deadline = now + self._settings.stall_timeout_s
        match event:
            case AskProgressed(body=PublishGrant() as grant):
                return self._granted(active, grant, now)
            case AskProgressed(body=Credit(credit_bytes=credit_bytes)):
                self._rates.backoff.succeeded(active.delivery.node_id, Trouble.BULK_PORT)
                active.is_taken = True
                sending = active.lane is not None and active.phase is DeliveryPhase.SENDING
                return [AddCredit(active.lane, credit_bytes)] if sending and active.lane is not None else []
            case AskProgressed():
                return []
            case AskReplied(body=PublishResult() as result):
                return self._concluded(active, result, now)
            case AskReplied():
                return self._fail(active, "was answered with something else", now, cancel=False)
            case AskFailed(code=code, message=message):
                if code is FailureCode.RESOURCE_EXHAUSTED:
                    self._recipients.pause(active.delivery, now + self._settings.full_pause_s)
                elif code in _UNWILLING:
                    self._recipients.pause(active.delivery, now + self._settings.unwilling_pause_s)
                what = f"failed ({code.name.lower().replace('_', ' ')}: {message})"
                return self._fail(active, what, now, cancel=False)

    def _granted(self, active: _Active, grant: PublishGrant, now: float) -> list[Effect]:
        if active.phase is not DeliveryPhase.OFFERED:
            return []
        parts = active.delivery.parts
        try:
            flags = unpack_bitmap(grant.wanted, len(parts))
        except RemoteProtocolError:  # the peer's bitmap does not fit the offer: its fault, another peer may do better
            return self._fail(active, "was granted for other parts", now)
        wanted = tuple(part for part, is_wanted in zip(parts, flags, strict=True) if is_wanted)
        if grant.grant is None or not wanted:
            active.phase = DeliveryPhase.AWAITING_RESULT
            return []
        active.phase = DeliveryPhase.SENDING
        active.lane = self._ids.lane()
        active.wanted_bytes = sum(part.meta.length_bytes for part in wanted)
        node_id, value_bytes = active.delivery.node_id, self._settings.value_bytes
        return [ConnectSender(active.lane, node_id, grant.grant, grant.credit_bytes, wanted, value_bytes)]

    def _lane_finished(self, active: _Active, event: LaneFinished, now: float) -> list[Effect]:
        active.lane = None
        if event.reason == NO_CONNECTION and not event.ok:
            self._rates.backoff.failed(active.delivery.node_id, Trouble.BULK_PORT, NO_CONNECTION, now)
        if not event.ok:
            return self._fail(active, f"broke off: {event.reason}", now)
        self._rates.backoff.succeeded(active.delivery.node_id, Trouble.BULK_PORT)
        active.phase = DeliveryPhase.AWAITING_RESULT
        active.stall_deadline = now + self._settings.stall_timeout_s
        return [Count("bytes_published", event.transferred_bytes)]

    def _concluded(self, active: _Active, result: PublishResult, now: float) -> list[Effect]:
        kept = result.stored_parts + result.already_held_parts
        if kept == 0 and result.refused_parts > 0:
            if active.phase is DeliveryPhase.OFFERED:
                # Refused before anything was sent: it has no room. A transfer that broke says nothing about room.
                self._recipients.pause(active.delivery, now + self._settings.full_pause_s)
            reason = clean(result.reason, WHY_CHARACTERS_MAX)
            return self._fail(active, f"was refused: {reason}" if reason else "was refused", now, cancel=False)
        self._took[active.delivery.node_id] = now
        effects: list[Effect] = [Count("publish_successes")]
        if active.phase is DeliveryPhase.SENDING:
            # The result may overtake the lane's own report; the peer has taken what it wanted.
            effects.append(Count("bytes_published", active.wanted_bytes))
        effects += self._end(active, "the peer has concluded", ok=True, cancel=False)
        if result.refused_parts:
            effects.append(Count("publish_parts_refused", result.refused_parts))
        return effects

    def _stall(self, active: _Active, now: float) -> str:
        """What to say of a delivery that did not go on. A port behind a firewall answers nothing at all."""
        if active.phase is not DeliveryPhase.SENDING or active.is_taken:
            return "timed out"
        self._rates.backoff.failed(active.delivery.node_id, Trouble.BULK_PORT, _NOTHING_TAKEN, now)
        return f"timed out: {_NOTHING_TAKEN}"

    def _fail(self, active: _Active, what: str, now: float, *, cancel: bool = True) -> list[Effect]:
        delivery = active.delivery
        effects = [*self._end(active, what, ok=False, cancel=cancel), Count("publish_failures")]
        self._set_value("last_publish_error", f"publish to {delivery.node_id} {what}")
        if delivery.attempt >= self._settings.attempts_max:
            return effects
        return [*effects, *self._enqueue(self._recipients.retried(delivery, now))]

    def _end(self, active: _Active, reason: str, *, ok: bool, cancel: bool) -> list[Effect]:
        self._active.remove(active)
        effects: list[Effect] = []
        if active.lane is not None:
            effects.append(CloseLane(active.lane, ok=ok, reason=reason))
        if cancel:
            effects.append(CancelAsk(active.ask))
        return effects
