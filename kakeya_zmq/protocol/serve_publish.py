"""Publishes of others: which parts of an offer are taken, and what becomes of them when they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kakeya_zmq.blocks import Part
from kakeya_zmq.protocol.effects import BindReceiver, CloseLane, Count, Effect, LaneId, RequestArrived, SendReply
from kakeya_zmq.protocol.serve_promises import Promises
from kakeya_zmq.protocol.serve_transfers import Transfers
from kakeya_zmq.protocol.serve_values import (
    Incoming,
    TransferPhase,
    clip,
    fitting_prefix,
    offer_problem,
    publish_result,
    refuse,
)
from kakeya_zmq.store import BlockStore, PutOutcome
from wire import limits
from wire.codec import pack_bitmap
from wire.errors import CapacityError, FailureCode, InvalidInput
from wire.ids import LeaseId
from wire.messages import CipherSuite, Cut, PartMeta, PartRef, PublishOffer


class Publishing:
    """Takes offers into a store.

    Args:
        store: where parts go.
        transfers: those of the service, fetches included.
        promises: what offers count on.
        lanes: makes lane ids that are unique in this process.
        part_bytes_max: larger parts are not accepted.
    """

    def __init__(
        self,
        store: BlockStore,
        transfers: Transfers,
        promises: Promises,
        *,
        lanes: Callable[[], LaneId],
        part_bytes_max: int,
    ) -> None:
        self._store = store
        self._transfers = transfers
        self._promises = promises
        self._new_lane = lanes
        self._part_bytes_max = part_bytes_max

    def answer(self, event: RequestArrived, body: PublishOffer, suite: CipherSuite | None, now: float) -> list[Effect]:
        """Refuse an offer, or say that everything is there, or bind a lane for what is lacking and fits.

        Args:
            suite: what the parts would be sealed with; None when the peer offers none that can be used.
        """
        key = event.key
        problem = "no usable cipher suite" if suite is None else offer_problem(body, self._store, self._part_bytes_max)
        if suite is None or problem:
            return refuse(key, FailureCode.INVALID_ARGUMENT, problem)
        held, lacking = self._sort(body)
        self._store.touch(held, now, fingerprint=body.fingerprint)
        count = Count("cache_publishes")
        if not lacking:
            self._cut(body.fingerprint, body.cuts)
            return [count, SendReply(key, publish_result(0, len(held), 0, ""))]
        largest_bytes = max(meta.length_bytes for meta in lacking)
        refusal = self._transfers.refusal(event.account)
        refusal = refusal or self._transfers.receiving_refusal(event.account, largest_bytes)
        if refusal is not None:
            return refuse(key, FailureCode.RESOURCE_EXHAUSTED, refusal)
        return [count, *self._receive(event, body, suite, held, lacking, now)]

    def store_parts(self, lane: LaneId, transfer: Incoming, parts: Sequence[Part], now: float) -> list[Effect]:
        """Store what has come; with the last part the publish is done."""
        stored = refused = 0
        for part in parts:
            expected = transfer.outstanding.get(part.meta.ref)
            if expected != part.meta:
                continue  # the lane hands over only what it was told to expect; repeats are harmless
            del transfer.outstanding[part.meta.ref]
            transfer.received_bytes += part.meta.length_bytes
            self._promises.came(transfer.account, part.meta.length_bytes, now)
            try:
                outcome = self._store.put(part, fingerprint=transfer.fingerprint, now=now, publisher=transfer.account)
            except (CapacityError, InvalidInput) as error:  # quota, or another publish stored something contradicting
                refused += 1
                transfer.reason = clip(error.message)
                continue
            if outcome is PutOutcome.STORED:
                stored += 1
            else:
                transfer.already_held += 1
        transfer.stored += stored
        transfer.refused += refused
        effects = [Count(name, n) for name, n in (("cache_published_parts", stored), ("cache_refused_parts", refused)) if n]
        if transfer.outstanding:
            return [*effects]
        self._transfers.end(lane)
        return [*effects, CloseLane(lane, True, "done"), self.reply(transfer)]

    def reply(self, transfer: Incoming) -> SendReply:
        """What was stored, to whoever offered it."""
        self._cut(transfer.fingerprint, transfer.cuts)
        result = publish_result(transfer.stored, transfer.already_held, transfer.refused, transfer.reason)
        return SendReply(transfer.key, result)

    # --- an offer ------------------------------------------------------------------------------------------------------

    def _sort(self, body: PublishOffer) -> tuple[list[PartRef], list[PartMeta]]:
        """What of an offer is held, and what is lacking."""
        held: list[PartRef] = []
        lacking: list[PartMeta] = []
        has = self._store.presence(body.fingerprint)
        for meta in body.parts:
            if has(ref := meta.ref) or self._store.is_cut(meta, fingerprint=body.fingerprint):
                held.append(ref)
            else:
                lacking.append(meta)
        return held, lacking

    def _receive(
        self,
        event: RequestArrived,
        body: PublishOffer,
        suite: CipherSuite,
        held: Sequence[PartRef],
        lacking: Sequence[PartMeta],
        now: float,
    ) -> list[Effect]:
        held_lease_id = self._hold(held, body.fingerprint, event.account, now)
        wanted = fitting_prefix(lacking, self._room_bytes(event, body, lacking, now))
        refused = len(lacking) - len(wanted)
        counts: list[Effect] = [Count("cache_refused_parts", refused)] if refused else []
        reason = "the store has no room for all of them" if refused else ""
        if not wanted:
            if held_lease_id is not None:
                self._store.release(held_lease_id)
            return [*counts, SendReply(event.key, publish_result(0, len(held), refused, reason))]
        lane = self._new_lane()
        outstanding = {meta.ref: meta for meta in wanted}
        transfer = Incoming(
            key=event.key,
            account=event.account,
            phase=TransferPhase.OPENING,
            idle_at=now + self._promises.patience(event.account, now),
            fingerprint=body.fingerprint,
            wanted=pack_bitmap([meta.ref in outstanding for meta in body.parts]),
            outstanding=outstanding,
            held_lease_id=held_lease_id,
            cuts=body.cuts,
            stored=0,
            already_held=len(held),
            refused=refused,
            reason=reason,
            largest_part_bytes=max(meta.length_bytes for meta in wanted),
        )
        self._transfers.begin(lane, transfer)
        expected = tuple(meta for meta in body.parts if meta.ref in outstanding)
        chunk_bytes = min(body.chunk_bytes_max, limits.CHUNK_BYTES_DEFAULT)
        return [*counts, BindReceiver(lane, suite, chunk_bytes, expected, body.link_codec)]

    def _room_bytes(self, event: RequestArrived, body: PublishOffer, lacking: Sequence[PartMeta], now: float) -> int:
        """What the store could make for an offer, less what the offers of others count on."""
        promised = self._promises.counted(self._transfers.offers(), event.account)
        needed_bytes = sum(promised.values()) + sum(meta.length_bytes for meta in lacking)
        self._store.let_yield(needed_bytes, now, node=event.account)
        return self._store.room_bytes(body.fingerprint, publisher=event.account, promised=promised)

    def _hold(self, refs: Sequence[PartRef], fingerprint: bytes, account: str, now: float) -> LeaseId | None:
        """Keep already held parts of an offer in the store until its request ends; they count among the asker's leases."""
        if not refs:
            return None
        try:
            longest_ms = 86_400_000  # the protocol's longest deadline; released with the request
            return self._store.lease(refs, now, longest_ms, fingerprint=fingerprint, owner=account).lease_id
        except CapacityError:  # too many leases: the publish goes on, its prefix may be evicted
            return None

    def _cut(self, fingerprint: bytes, cuts: Sequence[Cut]) -> None:
        """Drop tails that are beginnings of what is held now."""
        for cut in cuts:
            self._store.cut(cut, fingerprint=fingerprint)
