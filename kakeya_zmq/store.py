"""The block store: bounded memory for KV parts, with leases, reservations, pins, quotas and an event log.

Rules

* ``bytes_used + bytes_reserved <= max_bytes``, always; ``bytes_used`` is the sum of the held payloads.
* A part belongs to the namespace (fingerprint) it was put in and is found there only: a block's hash in another namespace is
  another block. Room, recency and what goes first are of the whole store.
* A part is immutable. Equal reference with other bytes is normal (another backend, another segment grid): the first one
  wins, the put succeeds, it is counted.
* A tail that turns out to be the beginning of a longer block is dropped for a *cut*: a note on that block, gone with it.
* What is leased or pinned is not evicted; reserved room is not used for anything else. A put or a reservation that can't
  have its room without breaking this raises CapacityError. What to evict: :mod:`kakeya_zmq.store_index`; a chain never
  evicts its own beginning to store its end.
* A store has places for so many parts, too, and nothing that a single call does takes longer the more there are of them.
* Leases of one other node hold fast a quarter of the store (of a quota, in its namespace). What it has leased beyond that
  ends when somebody else needs the room and nothing else gives it: :mod:`kakeya_zmq.store_leases`.
* Time comes in as ``now`` (seconds, monotonic). A lease has expired when ``now >= expires_at``.
* Used on one thread. Payloads may be views of foreign buffers; a view into a larger buffer is copied once, or a small
  part would keep a whole transfer's memory alive after everything else of it was evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from kakeya_zmq.blocks import Part, byte_view
from kakeya_zmq.store_blocks import HeldBlock, HeldPart
from kakeya_zmq.store_index import TAILS_LOOKED_AT_MAX, BlockTree
from kakeya_zmq.store_leases import LeaseTable
from kakeya_zmq.store_log import EventLog
from kakeya_zmq.store_lookup import ROWS
from kakeya_zmq.store_reading import StoreReading
from kakeya_zmq.store_room import StoreRoom
from kakeya_zmq.store_values import (
    EVENTS_MAX,
    LEASED_SHARE,
    LEASES_MAX,
    LEASES_PER_OWNER_MAX,
    NAMESPACES_MAX,
    NAMESPACES_PER_PUBLISHER_MAX,
    Evictions,
    Finding,
    LeaseError,
    LeaseInfo,
    PutOutcome,
    ReservationId,
    StoreEvent,
    StoreStats,
    Survey,
)
from wire import limits
from wire.errors import CapacityError, FailureCode, InvalidInput
from wire.ids import LeaseId
from wire.limits import HASH_BYTES
from wire.messages import Cut, PartMeta, PartRef

__all__ = [
    "EVENTS_MAX",
    "LEASED_SHARE",
    "LEASES_MAX",
    "LEASES_PER_OWNER_MAX",
    "NAMESPACES_MAX",
    "NAMESPACES_PER_PUBLISHER_MAX",
    "BlockStore",
    "Evictions",
    "Finding",
    "LeaseError",
    "LeaseInfo",
    "PutOutcome",
    "ReservationId",
    "StoreEvent",
    "StoreStats",
    "Survey",
]


class BlockStore(StoreReading):
    """See the module's rules.

    Args:
        max_bytes: bound on payload bytes, > 0.
        random_bytes: makes lease ids.
        quota_bytes: bound for one fingerprint, or None for no bound of its own.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        random_bytes: Callable[[int], bytes],
        quota_bytes: Callable[[bytes], int | None] = lambda fingerprint: None,
    ) -> None:
        super().__init__(BlockTree())
        self._quota_bytes = quota_bytes
        self._leases = LeaseTable(random_bytes)
        self._log = EventLog(EVENTS_MAX)
        self._room = StoreRoom(max_bytes, self._tree, self._leases, self._log, quota_bytes)
        self._use = 0
        self._lookup_hits = self._lookup_misses = self._tokens_served = self._bytes_served = 0
        self._put_failures = self._collisions = 0

    # --- what is there -------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Grows with every insert, eviction and invalidation."""
        return self._room.epoch

    @property
    def max_bytes(self) -> int:
        return self._room.max_bytes

    def room_bytes(self, fingerprint: bytes, *, publisher: str = "", promised: Mapping[bytes, int] | None = None) -> int:
        """Bytes that new parts of this namespace, from this publisher, could get if everything that may go did go.

        Args:
            promised: bytes by namespace that others count on already. Those of other namespaces take nothing of the quota.
        """
        if self._namespace_refusal(fingerprint, publisher):
            return 0
        promised = promised or {}
        room = self._room.max_bytes - self._room.bytes_reserved - self._leases.bytes_locked - sum(promised.values())
        quota = self._quota_bytes(fingerprint)
        return max(0, room if quota is None else min(room, quota - promised.get(fingerprint, 0)))

    def bound_bytes(self, fingerprint: bytes | None) -> int:
        """How many bytes a namespace may have at most: the size of the store, or its quota. Of None: of the store."""
        quota = self._quota_bytes(fingerprint) if fingerprint is not None else None
        return self._room.max_bytes if quota is None else min(quota, self._room.max_bytes)

    def events_since(self, sequence: int) -> tuple[StoreEvent, ...] | None:
        """Events with a larger sequence number, oldest first; None when some of them are already forgotten."""
        return self._log.since(sequence)

    @property
    def event_sequence(self) -> int:
        """Number of the last event: where a new reader of :meth:`events_since` begins."""
        return self._log.sequence

    def evictions(self) -> Evictions:
        """What was evicted so far; costs nothing, for readers that look often."""
        return Evictions(self._room.evictions, self._room.bytes_evicted)

    def stats(self) -> StoreStats:
        return StoreStats(
            bytes_used=self._room.bytes_used,
            max_bytes=self._room.max_bytes,
            bytes_reserved=self._room.bytes_reserved,
            bytes_locked=self._leases.bytes_locked,
            entry_count=self._room.entry_count,
            block_count=self._tree.block_count,
            cache_epoch=self._room.epoch,
            lookup_hits=self._lookup_hits,
            lookup_misses=self._lookup_misses,
            tokens_served=self._tokens_served,
            bytes_served=self._bytes_served,
            evictions=self._room.evictions,
            bytes_evicted=self._room.bytes_evicted,
            put_failures=self._put_failures,
            collisions_same_hash=self._collisions,
            leases=len(self._leases),
        )

    # --- putting -------------------------------------------------------------------------------------------------

    def put(
        self,
        part: Part,
        *,
        fingerprint: bytes,
        now: float,
        reservation_id: ReservationId | None = None,
        publisher: str = "",
    ) -> PutOutcome:
        """Store a part unless its namespace already has it (which refreshes it).

        Args:
            part: its digest has been checked by the caller; its payload may be shared, it must never change.
            fingerprint: 32 bytes, the namespace.
            reservation_id: takes the room out of this reservation as far as it reaches; unknown ids count as empty.
            publisher: the node it comes from; empty for this node itself.

        Raises:
            CapacityError: no room without evicting what is leased, pinned, reserved, or the part's own prefix; or the
                namespace is new, and its publisher or the store has too many.
            InvalidInput: the description contradicts the payload or a held part of the same block.
        """
        meta = part.meta
        if part.payload.nbytes != meta.length_bytes or not meta.length_bytes:
            raise InvalidInput("the part's description does not fit its payload")
        if self.contradicts(meta, fingerprint=fingerprint):
            raise InvalidInput("the part contradicts what is held")
        block = self._tree.block(fingerprint, meta.block_hash)
        held = None if block is None else block.part(meta.kind)
        if held is not None:
            self._collisions += held.proof[:HASH_BYTES] != meta.digest
            self._refresh(held, self._next_use())
            return PutOutcome.ALREADY_HELD
        if block is None and self.is_cut(meta, fingerprint=fingerprint):
            return PutOutcome.ALREADY_HELD
        try:
            block = block or self._add_block(meta, fingerprint, publisher)
            self._insert(part, block, now, reservation_id, publisher)
        except CapacityError:
            self._put_failures += 1
            raise
        self._limit_tails(block)
        return PutOutcome.STORED

    def cut(self, cut: Cut, *, fingerprint: bytes) -> bool:
        """Take a tail for the beginning of a longer block: note it there, and drop what is stored of the tail itself.

        Returns:
            False when nothing was changed: the block is not held, does not fit, or lacks a kind that the tail has; or the
            tail is held fast, has state that cannot be cut, or other blocks hang on it.
        """
        block, tail = self._tree.block(fingerprint, cut.within), self._tree.block(fingerprint, cut.block_hash)
        if block is None or block.parent_hash != cut.parent_hash:
            return False
        if not cut.token_count < block.token_count == cut.within_tokens or not block.kinds & ROWS:
            return False
        earlier: list[tuple[bytes, int]] = []
        if tail is not None:
            same_place = tail.parent_hash == block.parent_hash
            fast = tail.locked or tail.state is not None or tail.children is not None
            if not same_place or tail.token_count != cut.token_count or fast or tail.kinds & ~block.kinds:
                return False
            earlier = list(tail.cuts or ())
            block.stamp = max(block.stamp, tail.stamp)
            for held in tail.parts():
                self._room.drop(held, "invalidated")
        for tail_hash, token_count in (*earlier, (cut.block_hash, cut.token_count)):
            self._tree.add_cut(block, tail_hash, token_count, limits.TAILS_PER_PARENT_MAX)
        return True

    def _namespace_refusal(self, fingerprint: bytes, publisher: str) -> str:
        """Why a namespace cannot be begun, or an empty text; one that is there may go on."""
        namespaces = self._tree.namespaces
        if fingerprint in namespaces:
            return ""
        if len(namespaces) >= NAMESPACES_MAX:
            return f"the store already holds {NAMESPACES_MAX} namespaces"
        if publisher and sum(n.publisher == publisher for n in namespaces.values()) >= NAMESPACES_PER_PUBLISHER_MAX:
            return f"the store already holds {NAMESPACES_PER_PUBLISHER_MAX} namespaces of this node"
        return ""

    def _add_block(self, meta: PartMeta, fingerprint: bytes, publisher: str) -> HeldBlock:
        """Link a block; before room is made for it, so that its parent is no leaf and is not what gets evicted."""
        if refusal := self._namespace_refusal(fingerprint, publisher):
            raise CapacityError(refusal)
        return self._tree.add(fingerprint, meta, publisher)

    def _insert(
        self, part: Part, block: HeldBlock, now: float, reservation_id: ReservationId | None, publisher: str
    ) -> None:
        meta = part.meta
        reserved = self._room.reserved_for(reservation_id, meta.length_bytes)
        own_parts = block.parts()
        for own in own_parts:  # the other parts of the same block must not go to make room for this one
            self._leases.lock(own)
        try:
            self._room.make_quota_room(block.namespace, meta.length_bytes, now, node=publisher)
            self._room.make_room(meta.length_bytes - reserved, now, beneficiary=block, node=publisher)
        except CapacityError:
            if not block.kinds:
                self._tree.remove(block)
            raise
        finally:
            for own in own_parts:
                self._leases.unlock(own)
        if reservation_id is not None and reserved:
            self._room.use_reservation(reservation_id, reserved)
        stamp = self._next_use()
        held = HeldPart(block, meta, _own_payload(part.payload), stamp)
        block.set_part(held.kind, held)
        block.stamp = stamp
        block.namespace.bytes_used += meta.length_bytes
        self._room.bytes_used += meta.length_bytes
        self._room.entry_count += 1
        block.namespace.requeue(block)
        self._room.record("stored", held)

    def _limit_tails(self, newest: HeldBlock) -> None:
        """Drop the oldest tails under the parent of a block just stored, as far as they are not held fast."""
        tails = newest.namespace.tails.get(newest.parent_hash, {})
        excess = len(tails) - limits.TAILS_PER_PARENT_MAX
        if excess <= 0 or newest.token_count >= newest.namespace.full_tokens:
            return
        oldest = list(islice(tails, TAILS_LOOKED_AT_MAX))
        may_go = [block for block in oldest if not block.locked and block is not newest and block.children is None]
        for block in may_go[:excess]:
            self._room.evict(block.parts())

    # --- recency, pins, leases -----------------------------------------------------------------------------------

    def touch(self, refs: Iterable[PartRef], now: float, *, fingerprint: bytes) -> None:
        """Refresh the recency of parts that are used together; those not held are skipped."""
        stamp = self._next_use()
        for held in self._found(refs, fingerprint):
            self._refresh(held, stamp)

    def note_lookup(self, *, hit: bool) -> None:
        """Count a lookup."""
        self._lookup_hits += hit
        self._lookup_misses += not hit

    def pin(self, ref: PartRef, *, fingerprint: bytes) -> bool:
        """Keep a part until it is unpinned; False when it is not held. Pinning twice is pinning once."""
        held = self._find(ref, fingerprint)
        if held is None:
            return False
        self._leases.pin(held)
        return True

    def unpin(self, ref: PartRef, *, fingerprint: bytes) -> None:
        """Idempotent."""
        held = self._find(ref, fingerprint)
        if held is not None:
            self._leases.unpin(held)

    def lease(self, refs: Iterable[PartRef], now: float, lease_ms: int, *, fingerprint: bytes, owner: str = "") -> LeaseInfo:
        """Refresh parts and keep them until the lease is released or expires; those not held are left out.

        Args:
            owner: the node it is given to; empty for this node itself.

        Raises:
            CapacityError: there are LEASES_MAX leases, or LEASES_PER_OWNER_MAX of another node.
            LeaseError: none of the parts is held (NOT_FOUND).
        """
        return self._leases.grant(self._found(refs, fingerprint), now, lease_ms, self._next_use(), owner)

    def lease_finding(self, finding: Finding, now: float, lease_ms: int, *, owner: str = "") -> LeaseInfo:
        """:meth:`lease` for what :meth:`find` found; nothing may have changed in between."""
        return self._leases.grant(finding.parts, now, lease_ms, self._next_use(), owner)

    def touch_finding(self, finding: Finding) -> None:
        """:meth:`touch` for what :meth:`find` found."""
        stamp = self._next_use()
        for held in finding.parts:
            self._refresh(held, stamp)

    def leased_parts(self, lease_id: LeaseId, refs: Sequence[PartRef], now: float) -> tuple[Part, ...]:
        """The parts, in the order of ``refs``; counted as served.

        Raises:
            LeaseError: NOT_FOUND when the lease is unknown or has expired, FAILED_PRECONDITION when it lacks a part.
        """
        lease = self._leases.live(lease_id, now)
        leased, fingerprint = lease.parts, lease.info.fingerprint
        parts: list[Part] = []
        tokens: dict[bytes, int] = {}
        for ref in refs:
            held = self._find(ref, fingerprint)
            if held is None or held not in leased:
                raise LeaseError(FailureCode.FAILED_PRECONDITION, "a part is not in the lease, or was invalidated")
            parts.append(held.as_part())
            tokens[ref.block_hash] = held.block.token_count
        self._bytes_served += sum(part.meta.length_bytes for part in parts)
        self._tokens_served += sum(tokens.values())
        return tuple(parts)

    def lease_info(self, lease_id: LeaseId, now: float) -> LeaseInfo:
        """Raises LeaseError (NOT_FOUND) when the lease is unknown or has expired."""
        return self._leases.live(lease_id, now).info

    def renew(self, lease_id: LeaseId, now: float, lease_ms: int, *, generation: int | None = None) -> LeaseInfo:
        """Let the lease end ``lease_ms`` from now, or when it would have ended, whichever is later.

        Raises:
            LeaseError: NOT_FOUND when it is unknown, has expired, or is of another generation.
        """
        return self._leases.renew(lease_id, now, lease_ms, generation)

    def release(self, lease_id: LeaseId) -> bool:
        """End a lease; False when there is none (any more)."""
        return self._leases.release(lease_id)

    def let_yield(self, needed_bytes: int, now: float, *, node: str) -> None:
        """End leases of others beyond their share as far as :meth:`room_bytes` needs that to be so much for a node.

        Evicts nothing; whether it was enough, room_bytes tells.
        """
        self._room.let_yield(needed_bytes, now, node=node)

    @property
    def any_yielded(self) -> bool:
        """Whether :meth:`take_yielded` has something to tell."""
        return self._leases.any_yielded

    def take_yielded(self) -> frozenset[LeaseId]:
        """Leases that ended since the last call because somebody else needed the room: what rests on them had better end."""
        return self._leases.take_yielded()

    def expire(self, now: float) -> int:
        """End every lease whose time has come; returns how many."""
        return self._leases.expire(now)

    def next_expiry(self) -> float | None:
        """When the next lease ends, seconds; None without leases."""
        return self._leases.next_expiry()

    # --- room ----------------------------------------------------------------------------------------------------

    def reserve(self, reservation_id: ReservationId, reserved_bytes: int, now: float, *, node: str = "") -> None:
        """Set room aside, evicting what may go, before the work that will fill it starts.

        Args:
            node: for whom the work is done; empty for this node itself. Its own leases do not yield to it.

        Raises:
            CapacityError: leases, pins and other reservations leave less than that.
            InvalidInput: the id is in use, or the size is not positive.
        """
        self._room.reserve(reservation_id, reserved_bytes, now, node=node)

    def release_reservation(self, reservation_id: ReservationId) -> None:
        """Give back what is left of a reservation; idempotent."""
        self._room.release_reservation(reservation_id)

    def resize(self, max_bytes: int, now: float, *, evictions_max: int | None = None) -> bool:
        """Change the bound, evicting down to it; False when leases, pins and reservations kept it larger.

        Args:
            evictions_max: parts evicted at the most in this call, so that it takes a bounded time: a large cut is made by
                asking again while it returns False.

        Raises:
            InvalidInput: the size is not positive.
        """
        return self._room.resize(max_bytes, now, evictions_max)

    def invalidate(self, ref: PartRef, *, fingerprint: bytes) -> bool:
        """Drop a bad part at once, also out of leases and pins; False when it is not held."""
        held = self._find(ref, fingerprint)
        if held is None:
            return False
        self._leases.forget(held)
        self._room.drop(held, "invalidated")
        return True

    def clear(self) -> int:
        """Drop every part, lease and pin; reservations stay, their work is under way. Returns the bytes that went."""
        dropped_bytes = self._room.bytes_used
        self._leases.clear()
        self._room.clear()
        return dropped_bytes

    # --- bookkeeping ---------------------------------------------------------------------------------------------

    def _next_use(self) -> int:
        self._use += 1
        return self._use

    def _refresh(self, held: HeldPart, stamp: int) -> None:
        held.stamp = stamp
        held.block.stamp = stamp


def _own_payload(payload: memoryview) -> bytes | memoryview:
    """What to keep of a payload: its bytes object, its view, or a copy if the view is a part of a larger buffer."""
    owner = payload.obj
    if isinstance(owner, bytes) and len(owner) == payload.nbytes:
        return owner  # a view object of its own would cost 184 bytes
    if memoryview(owner).nbytes == payload.nbytes:
        return byte_view(payload)
    return bytes(payload)
