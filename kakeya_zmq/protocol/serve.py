"""The cache service: what any node with a store does for its peers. Lookup, fetch, release, publish.

Rules

* Every request ends exactly once: with a reply, with a failure, or silently when it was cancelled.
* A lane that was bound is closed or finishes by itself; it is counted against the bounds until LaneFinished has come,
  also when its request ended long before. CloseLane and LaneFinished may cross: the host ignores CloseLane for a lane
  that is gone.
* A publish is promised room before its lane is bound: what the store could make, less what the offers of others count on,
  which has a bound for each node (kakeya_zmq.protocol.serve_promises). Nothing is evicted for a promise, only for parts that
  have come.
* Parts of an offer that are already held in its namespace are leased until its request ends: they are the prefix the new
  parts hang on. What other namespaces hold under the same hashes changes nothing of an answer.
* A lease serves the node that it was given to, as long as its namespace exists for that node; for others it is unknown.
* A fetch keeps the asker's lease alive while it runs, also when the asker releases it in the middle: what lanes send is held
  in the store, and counts there. When the lease yields to somebody who needs the room, the fetch ends.
* Bounds of one peer, and whose a lease is, go by the identity that it has proven, not by the name that it gives itself.
* An asker has as much time for a fetch as a very slow link takes. Its updates do not give it more: they cost it nothing.

Theory of operation. Lookup and ReleaseLease are answered at once. Fetch and PublishOffer are transfers (the lane of a fetch
is fed when it is bound); a transfer goes through these phases, and what an event does depends on nothing else:

    phase     fetch                                   publish
    OPENING   LaneOpened -> send grant, RUNNING       LaneOpened -> send grant, RUNNING
    RUNNING   Credit -> AddCredit                     CreditEarned -> send Credit
              TransferDone -> close, reply            PartsReceived -> store; the last one: close, reply
              LaneFinished -> failure (or reply), gone LaneFinished -> reply with what was stored, gone
    both      RequestCancelled -> close, CLOSING; silence beyond the idle time -> close, failure, CLOSING;
              LaneFinished while OPENING -> failure, gone
    CLOSING   the request has ended; LaneFinished -> gone; everything else is late and ignored

A lane may finish before all its events were read by us only in that order: events of one lane come in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, assert_never

from msgspec.structs import replace

from kakeya_zmq.protocol.effects import (
    AddCredit,
    BindSender,
    CloseLane,
    Count,
    CreditEarned,
    Effect,
    FeedSender,
    HostEvent,
    LaneFinished,
    LaneId,
    LaneOpened,
    Note,
    PartsReceived,
    RequestArrived,
    RequestCancelled,
    RequestKey,
    SendFailure,
    SendProgress,
    SendReply,
    UpdateArrived,
)
from kakeya_zmq.protocol.serve_lookup import NO_LEASE, answer_lookup
from kakeya_zmq.protocol.serve_promises import Promises
from kakeya_zmq.protocol.serve_publish import Publishing
from kakeya_zmq.protocol.serve_transfers import Transfers
from kakeya_zmq.protocol.serve_values import Incoming, Outgoing, Transfer, TransferPhase, clip, refuse, renew_at
from kakeya_zmq.store import BlockStore, LeaseError, LeaseInfo
from wire import limits
from wire.bulk import choose_suite
from wire.errors import FailureCode, RemoteProtocolError
from wire.ids import LeaseId
from wire.limits import HASH_BYTES
from wire.messages import (
    CipherSuite,
    Credit,
    Done,
    Fetch,
    Lookup,
    PublishGrant,
    PublishOffer,
    ReleaseLease,
    RequestBody,
    TransferDone,
    TransferResult,
)

__all__ = ["NO_LEASE", "CacheService"]
NOWHERE: Final = bytes(HASH_BYTES)
"""A namespace without content: no compatibility tuple has this hash."""
UNKNOWN_LEASE: Final = "the lease is unknown or has expired"
"""What the store says of one, too: a lease of somebody else looks like none."""


class CacheService:
    """Serves a store to peers; see the module's rules. Raises nothing for anything a peer can send.

    Args:
        store: shared with the rest of the node, on the same thread.
        lanes: makes lane ids that are unique in this process.
        has_aes: whether this CPU has AES instructions.
        part_bytes_max: larger parts are not accepted.
        fetch_idle_s: a transfer on which nothing happens for so long is given up; a publish sooner, of who broke promises.
        lanes_max, lanes_per_node_max: transfers at one time, in all and for one peer.
        lease_ms_max: longer leases are cut to this.
        accepts: which fingerprints may be published here; by default all.
        hides: (node id, fingerprint) → whether that namespace does not exist for that node.
    """

    def __init__(
        self,
        store: BlockStore,
        *,
        lanes: Callable[[], LaneId],
        has_aes: bool,
        part_bytes_max: int = limits.PART_BYTES_MAX,
        fetch_idle_s: float = 30.0,
        lanes_max: int = 16,
        lanes_per_node_max: int = 8,
        lease_ms_max: int = 120_000,
        accepts: Callable[[bytes], bool] = lambda fingerprint: True,
        hides: Callable[[str, bytes], bool] = lambda node_id, fingerprint: False,
    ) -> None:
        self._store = store
        self._new_lane = lanes
        self._has_aes = has_aes
        self._idle_s = fetch_idle_s
        self._lease_ms_max = lease_ms_max
        self._accepts = accepts
        self._hides = hides
        self._promises = Promises(store.bound_bytes, fetch_idle_s)
        self._transfers = Transfers(store, lanes_max=lanes_max, lanes_per_node_max=lanes_per_node_max)
        self._publishing = Publishing(store, self._transfers, self._promises, lanes=lanes, part_bytes_max=part_bytes_max)

    # --- interface -------------------------------------------------------------------------------------------------

    @staticmethod
    def handles(body: RequestBody) -> bool:
        """Whether requests of this kind are this machine's business."""
        return isinstance(body, Lookup | Fetch | ReleaseLease | PublishOffer)

    def owns_request(self, key: RequestKey) -> bool:
        """Whether updates and a cancel for this request belong here."""
        return self._transfers.lane_of(key) is not None

    def owns_lane(self, lane: LaneId) -> bool:
        """Whether events of this lane belong here."""
        return self._transfers.find(lane) is not None

    @property
    def lane_count(self) -> int:
        """Lanes bound and not yet finished."""
        return len(self._transfers)

    def deadline(self) -> float | None:
        """When to send a Tick, seconds on the clock of ``now``."""
        times = [time for time in (self._store.next_expiry(),) if time is not None]
        if self._store.any_yielded:  # while another machine had the word
            times.append(0.0)
        for _, transfer in self._transfers.under_way():
            times.append(transfer.idle_at)
            if isinstance(transfer, Outgoing) and transfer.lease_id is not None:
                times.append(transfer.renew_at)
        return min(times, default=None)

    def on(self, event: HostEvent, now: float) -> list[Effect]:
        """Handle one event; events that concern no request or lane of this machine are ignored."""
        effects = self._pass_time(now)
        match event:
            case RequestArrived():
                effects += self._on_request(event, now)
            case UpdateArrived(key=key, body=body):
                effects += self._on_update(key, body, now)
            case RequestCancelled(key=key, reason=reason):
                lane = self._transfers.lane_of(key)
                if lane is not None:
                    self._transfers.end(lane)
                    effects += [Count("cache_cancelled"), CloseLane(lane, False, clip(reason))]
            case LaneOpened() | PartsReceived() | CreditEarned() | LaneFinished():
                effects += self._on_lane(event, now)
            case _:
                pass
        return effects

    # --- requests --------------------------------------------------------------------------------------------------

    def _on_request(self, event: RequestArrived, now: float) -> list[Effect]:
        key, body = event.key, event.body
        if self._transfers.lane_of(key) is not None:
            return [Count("cache_repeated_requests")]  # the server shell's numbering forbids it; never answer twice
        match body:
            case Lookup():
                return self._lookup(event, body, now)
            case ReleaseLease(lease_id=lease_id):
                released = LeaseId(lease_id)
                if self._lease_of(event, released, now) is not None and not self._transfers.releasing(released):
                    self._store.release(released)
                return [SendReply(key, Done())]
            case Fetch():
                return self._fetch(event, body, now)
            case PublishOffer():
                return self._publish(event, body, now)
            case _:
                return []

    def _lookup(self, event: RequestArrived, body: Lookup, now: float) -> list[Effect]:
        key = event.key
        # What is hidden is looked for where nothing is, so that it takes the way, and the time, of a miss.
        hidden = self._hides(event.node_id, body.fingerprint)
        body = replace(body, fingerprint=NOWHERE if hidden else body.fingerprint)
        try:
            answer = answer_lookup(self._store, body, now, lease_ms_max=self._lease_ms_max, owner=event.account)
        except RemoteProtocolError as error:  # the peer's bytes, not our fault
            return refuse(key, error.code, error.message)
        counts: list[Effect] = [Count("cache_lookups")]
        if answer.hit:
            counts.append(Count("cache_lookup_hits"))
        if answer.refused:
            counts.append(Count("cache_leases_refused"))
        return [*counts, SendReply(key, answer.reply)]

    def _fetch(self, event: RequestArrived, body: Fetch, now: float) -> list[Effect]:
        key, lease_id = event.key, LeaseId(body.lease_id)
        if (refusal := self._transfers.refusal(event.account)) is not None:
            return refuse(key, FailureCode.RESOURCE_EXHAUSTED, refusal)
        suite = self._suite(body.suites)
        if suite is None or len(set(body.parts)) != len(body.parts):
            return refuse(key, FailureCode.INVALID_ARGUMENT, "no usable cipher suite, or a part named twice")
        if body.credit_bytes < limits.CHUNK_BYTES_MIN:
            text = f"a credit of {body.credit_bytes} bytes lets no chunk through; the least is {limits.CHUNK_BYTES_MIN}"
            return refuse(key, FailureCode.INVALID_ARGUMENT, text)
        if self._lease_of(event, lease_id, now) is None:
            return refuse(key, FailureCode.NOT_FOUND, UNKNOWN_LEASE)
        try:
            parts = self._store.leased_parts(lease_id, body.parts, now)
            info = self._store.renew(lease_id, now, limits.LEASE_MS_DEFAULT)
        except LeaseError as error:  # the asker came too late or asks for what it has not leased
            return refuse(key, error.code, error.message)
        lane = self._new_lane()
        transfer = Outgoing(
            key=key,
            account=event.account,
            phase=TransferPhase.OPENING,
            idle_at=now + self._idle_s,
            parts=parts,
            lease_id=lease_id,
            lease_generation=info.generation,
            renew_at=renew_at(now),
        )
        self._transfers.begin(lane, transfer)
        chunk_bytes = min(body.chunk_bytes_max, limits.CHUNK_BYTES_DEFAULT)
        credit_bytes = min(body.credit_bytes, limits.TRANSFER_BYTES_MAX)
        bind = BindSender(lane, suite, chunk_bytes, credit_bytes, body.link_codec, body.value_bytes)
        # What is there can be sealed while the asker connects.
        return [Count("cache_fetches"), bind, FeedSender(lane, parts, final=True)]

    def _lease_of(self, event: RequestArrived, lease_id: LeaseId, now: float) -> LeaseInfo | None:
        """A lease that whoever asks was given and may still use, or None."""
        try:
            info = self._store.lease_info(lease_id, now)
        except LeaseError:
            return None
        if info.owner != event.account or self._transfers.is_given_back(lease_id):
            return None
        return None if self._hides(event.node_id, info.fingerprint) else info

    def _publish(self, event: RequestArrived, body: PublishOffer, now: float) -> list[Effect]:
        key = event.key
        if not self._accepts(body.fingerprint) or self._hides(event.node_id, body.fingerprint):
            return refuse(key, FailureCode.PERMISSION_DENIED, "this node does not store that namespace")
        return self._publishing.answer(event, body, self._suite(body.suites), now)

    def _suite(self, offered: Sequence[CipherSuite]) -> CipherSuite | None:
        usable = [suite for suite in offered if self._has_aes or suite != CipherSuite.AES_256_GCM]
        return choose_suite(usable, has_aes=self._has_aes) if usable else None

    # --- updates and lane events -----------------------------------------------------------------------------------

    def _on_update(self, key: RequestKey, body: Credit | TransferDone, now: float) -> list[Effect]:
        lane = self._transfers.lane_of(key)
        transfer = self._transfers.find(lane) if lane is not None else None
        if lane is None or not isinstance(transfer, Outgoing):
            return []  # late, or an update that makes no sense for a publish
        match body:
            case Credit(credit_bytes=credit_bytes):
                return [AddCredit(lane, credit_bytes)] if transfer.phase is TransferPhase.RUNNING else []
            case TransferDone(complete=True) if transfer.phase is TransferPhase.OPENING:
                self._transfers.end(lane)
                failure = SendFailure(key, FailureCode.INVALID_ARGUMENT, "done before anything was sent")
                return [Count("cache_refusals"), CloseLane(lane, False, failure.message), failure]
            case TransferDone(complete=complete):
                self._transfers.end(lane)
                reason = "done" if complete else "the asker gave up"
                return [CloseLane(lane, complete, reason), *self._fetch_reply(transfer, complete=complete)]
            case _:
                assert_never(body)

    def _on_lane(self, event: LaneOpened | PartsReceived | CreditEarned | LaneFinished, now: float) -> list[Effect]:
        lane = event.lane
        transfer = self._transfers.find(lane)
        if transfer is None:
            return []
        if isinstance(event, LaneFinished):
            ended = transfer.phase is TransferPhase.CLOSING
            opened = transfer.phase is TransferPhase.RUNNING
            if not ended:
                self._transfers.end(lane)
            self._transfers.forget(lane)
            if isinstance(transfer, Incoming) and opened and not ended:
                self._promises.broken(transfer, now)
            return [] if ended else self._finish(transfer, event, opened=opened)
        if transfer.phase is TransferPhase.CLOSING:
            return []
        if isinstance(transfer, Incoming):
            transfer.idle_at = now + self._promises.patience(transfer.account, now)
        match event, transfer:
            case LaneOpened(grant=grant), Outgoing(phase=TransferPhase.OPENING):
                transfer.phase = TransferPhase.RUNNING
                transfer.idle_at = now + self._idle_s + transfer.total_bytes / limits.SLOWEST_LINK_BYTES_PER_S
                return [SendProgress(transfer.key, grant)]
            case LaneOpened(grant=grant), Incoming(phase=TransferPhase.OPENING):
                transfer.phase = TransferPhase.RUNNING
                body = PublishGrant(wanted=transfer.wanted, grant=grant, credit_bytes=limits.CREDIT_BYTES_DEFAULT)
                return [SendProgress(transfer.key, body)]
            case CreditEarned(credit_bytes=credit_bytes), Incoming(phase=TransferPhase.RUNNING):
                return [SendProgress(transfer.key, Credit(credit_bytes=credit_bytes))]
            case PartsReceived(parts=parts), Incoming(phase=TransferPhase.RUNNING):
                return self._publishing.store_parts(lane, transfer, parts, now)
            case _:
                return []

    def _finish(self, transfer: Transfer, event: LaneFinished, *, opened: bool) -> list[Effect]:
        """The lane ended by itself and the request is still open."""
        match transfer:
            case Outgoing() if event.ok and opened:
                return self._fetch_reply(transfer, complete=True)
            case Incoming() if opened:
                transfer.refused += len(transfer.outstanding)
                transfer.reason = clip(event.reason)
                return [Count("cache_broken_transfers"), self._publishing.reply(transfer)]
            case Outgoing() | Incoming():
                reason = clip(event.reason) or "the transfer ended early"
                # The asker is told, too; but what keeps a lane from opening, as a lack of ports, is to be mended here.
                notes = [] if opened else [Note("warning", clip(f"a transfer could not be opened: {reason}"))]
                failure = SendFailure(transfer.key, FailureCode.UNAVAILABLE, reason)
                return [Count("cache_broken_transfers"), *notes, failure]
            case _:
                assert_never(transfer)

    def _fetch_reply(self, transfer: Outgoing, *, complete: bool) -> list[Effect]:
        """``sent`` is what the asker has confirmed: all or nothing."""
        parts, sent_bytes = (len(transfer.parts), transfer.total_bytes) if complete else (0, 0)
        count = Count("cache_fetched_bytes", sent_bytes) if complete else Count("cache_broken_transfers")
        return [count, SendReply(transfer.key, TransferResult(sent_parts=parts, sent_bytes=sent_bytes))]

    # --- time and clean-up -----------------------------------------------------------------------------------------

    def _pass_time(self, now: float) -> list[Effect]:
        """Renew the leases of running fetches, end what is idle or has lost its lease, then let leases expire."""
        effects: list[Effect] = []
        yielded = self._store.take_yielded()
        for lane, transfer in list(self._transfers.under_way()):
            if now >= transfer.idle_at:
                if isinstance(transfer, Incoming):
                    self._promises.broken(transfer, now)
                message = "nothing happened on the transfer for too long"
                effects.append(Count("cache_idle_transfers"))
                effects += self._break_off(lane, transfer, FailureCode.DEADLINE_EXCEEDED, message)
            elif isinstance(transfer, Outgoing) and transfer.lease_id in yielded:
                message = "the room was needed for something else"
                effects.append(Count("cache_broken_transfers"))
                effects += self._break_off(lane, transfer, FailureCode.NOT_FOUND, message)
            elif isinstance(transfer, Outgoing) and transfer.lease_id is not None and now >= transfer.renew_at:
                self._renew(transfer, now)
        self._store.expire(now)
        return effects

    def _break_off(self, lane: LaneId, transfer: Transfer, code: FailureCode, message: str) -> list[Effect]:
        self._transfers.end(lane)
        return [CloseLane(lane, False, message), SendFailure(transfer.key, code, message)]

    def _renew(self, transfer: Outgoing, now: float) -> None:
        assert transfer.lease_id is not None
        transfer.renew_at = renew_at(now)
        try:
            self._store.renew(
                transfer.lease_id, now, limits.LEASE_MS_DEFAULT, generation=transfer.lease_generation
            )  # fmt: skip
        except LeaseError:  # released by the asker, who no longer minds; the sender holds the parts
            transfer.lease_id = None
