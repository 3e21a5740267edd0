"""The block store: bounded memory for KV parts, with leases, reservations, pins, quotas and an event log.

Rules

* ``bytes_used + bytes_reserved <= max_bytes``, always; ``bytes_used`` is the sum of the held payloads.
* A part is immutable. Equal reference with other bytes is normal (another backend, another segment grid): the first one
  wins, the put succeeds, it is counted.
* What is leased or pinned is not evicted; reserved room is not used for anything else. A put or a reservation that can't
  have its room without breaking this raises CapacityError. What to evict: :mod:`kakeya_zmq.store_index`; a chain never
  evicts its own beginning to store its end.
* Time comes in as ``now`` (seconds, monotonic). A lease has expired when ``now >= expires_at``.
* Used on one thread. Payloads may be views of foreign buffers; a view into a larger buffer is copied once, or a small
  part would keep a whole transfer's memory alive after everything else of it was evicted.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, TypeAlias

from kakeya_zmq.blocks import Part, byte_view
from kakeya_zmq.store_index import BlockTree, HeldBlock, HeldPart, Namespace
from wire import limits
from wire.errors import CapacityError, FailureCode, InvalidInput, KakeyaError
from wire.ids import LeaseId
from wire.limits import HASH_BYTES
from wire.messages import PartMeta, PartRef, Tail

LEASES_MAX: Final = 4096
"""Leases at one time; a lookup beyond them gets its answer without a lease."""
NAMESPACES_MAX: Final = 256
"""Fingerprints at one time: eviction compares the oldest part of each."""
EVENTS_MAX: Final = 4096
"""Events remembered for gossip; a reader that fell further behind must resynchronise."""

ReservationId: TypeAlias = bytes


class LeaseError(KakeyaError):
    """A lease is unknown, has expired, or does not cover what was asked."""

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class PutOutcome(Enum):
    STORED = "stored"
    ALREADY_HELD = "already held"


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """``refs``: what is held fast, without repetitions. ``generation`` tells two leases apart in logs and checks."""

    lease_id: LeaseId
    refs: tuple[PartRef, ...]
    generation: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class StoreEvent:
    sequence: int
    change: Literal["stored", "evicted"]
    ref: PartRef


@dataclass(frozen=True, slots=True)
class Survey:
    """Which of some blocks' parts are held. Index of the outer tuples: PartKind."""

    present: tuple[tuple[bool, ...], tuple[bool, ...], tuple[bool, ...]]
    mean_bytes: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class StoreStats:
    bytes_used: int
    max_bytes: int
    bytes_reserved: int
    bytes_locked: int
    """Held fast by leases and pins."""
    entry_count: int
    """Parts."""
    block_count: int
    cache_epoch: int
    lookup_hits: int
    lookup_misses: int
    tokens_served: int
    bytes_served: int
    evictions: int
    """Parts."""
    bytes_evicted: int
    put_failures: int
    collisions_same_hash: int
    leases: int


@dataclass(slots=True)
class _Lease:
    info: LeaseInfo
    parts: dict[PartRef, HeldPart]
    """What it holds; info.refs less what was invalidated."""


class BlockStore:
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
        if max_bytes <= 0:
            raise InvalidInput(f"the store needs a positive size, not {max_bytes}")
        self._max_bytes = max_bytes
        self._random_bytes = random_bytes
        self._quota_bytes = quota_bytes
        self._tree = BlockTree()
        self._leases: dict[LeaseId, _Lease] = {}
        self._expiries: list[tuple[float, LeaseId]] = []
        self._reservations: dict[ReservationId, int] = {}
        self._pins: set[PartRef] = set()
        self._events: deque[StoreEvent] = deque(maxlen=EVENTS_MAX)
        self._sequence = 0
        self._use = 0
        self._generation = 0
        self._bytes_used = self._bytes_reserved = self._bytes_locked = self._entry_count = 0
        self._epoch = 1
        self._lookup_hits = self._lookup_misses = self._tokens_served = self._bytes_served = 0
        self._evictions = self._bytes_evicted = self._put_failures = self._collisions = 0

    # --- what is there -------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Grows with every insert, eviction and invalidation."""
        return self._epoch

    @property
    def max_bytes(self) -> int:
        return self._max_bytes

    def has(self, ref: PartRef) -> bool:
        block = self._tree.blocks.get(ref.block_hash)
        return block is not None and block.part(ref.kind) is not None

    def get(self, ref: PartRef) -> Part | None:
        """The part, without refreshing it."""
        held = self._find(ref)
        return None if held is None else held.as_part()

    def length_bytes(self, ref: PartRef) -> int:
        """Payload size, 0 when it is not held."""
        held = self._find(ref)
        return 0 if held is None else held.length_bytes

    def contradicts(self, meta: PartMeta, *, fingerprint: bytes) -> bool:
        """Whether :meth:`put` would refuse this description: other namespace, other place in the chain."""
        return self._tree.contradicts(fingerprint, meta)

    def survey(self, block_hashes: Sequence[bytes]) -> Survey:
        """Presence of every kind for each hash, in the given order, and the mean size of what is there."""
        found = [self._tree.blocks.get(block_hash) for block_hash in block_hashes]
        full = [None if block is None else block.full for block in found]
        window = [None if block is None else block.window for block in found]
        state = [None if block is None else block.state for block in found]
        return Survey(
            present=(_presence(full), _presence(window), _presence(state)),
            mean_bytes=(_mean_bytes(full), _mean_bytes(window), _mean_bytes(state)),
        )

    def tails(self, parent_hash: bytes, *, fingerprint: bytes, block_tokens: int) -> tuple[Tail, ...]:
        """Tails held under a block (or under ROOT_HASH), newest first, at most TAILS_PER_PARENT_MAX."""
        blocks = self._tree.tails(fingerprint, parent_hash, block_tokens)[: limits.TAILS_PER_PARENT_MAX]
        return tuple(
            Tail(parent_hash=parent_hash, block_hash=b.block_hash, token_count=b.token_count, kinds=b.kinds) for b in blocks
        )

    def room_bytes(self, fingerprint: bytes) -> int:
        """Bytes that new parts of this namespace could get if everything that may go did go."""
        room = self._max_bytes - self._bytes_reserved - self._bytes_locked
        quota = self._quota_bytes(fingerprint)
        return max(0, room if quota is None else min(room, quota))

    def usage_by_fingerprint(self) -> dict[bytes, int]:
        return {fingerprint: namespace.bytes_used for fingerprint, namespace in self._tree.namespaces.items()}

    def events_since(self, sequence: int) -> tuple[StoreEvent, ...] | None:
        """Events with a larger sequence number, oldest first; None when some of them are already forgotten."""
        first = self._events[0].sequence if self._events else self._sequence + 1
        if sequence < first - 1:
            return None
        return tuple(event for event in self._events if event.sequence > sequence)

    def stats(self) -> StoreStats:
        return StoreStats(
            bytes_used=self._bytes_used,
            max_bytes=self._max_bytes,
            bytes_reserved=self._bytes_reserved,
            bytes_locked=self._bytes_locked,
            entry_count=self._entry_count,
            block_count=len(self._tree.blocks),
            cache_epoch=self._epoch,
            lookup_hits=self._lookup_hits,
            lookup_misses=self._lookup_misses,
            tokens_served=self._tokens_served,
            bytes_served=self._bytes_served,
            evictions=self._evictions,
            bytes_evicted=self._bytes_evicted,
            put_failures=self._put_failures,
            collisions_same_hash=self._collisions,
            leases=len(self._leases),
        )

    # --- putting -------------------------------------------------------------------------------------------------

    def put(self, part: Part, *, fingerprint: bytes, now: float, reservation_id: ReservationId | None = None) -> PutOutcome:
        """Store a part unless its reference is already held (which refreshes it).

        Args:
            part: its digest has been checked by the caller; its payload may be shared, it must never change.
            fingerprint: 32 bytes, the namespace.
            reservation_id: takes the room out of this reservation as far as it reaches; unknown ids count as empty.

        Raises:
            CapacityError: no room without evicting what is leased, pinned, reserved, or the part's own prefix.
            InvalidInput: the description contradicts the payload or a held part of the same block.
        """
        meta = part.meta
        if part.payload.nbytes != meta.length_bytes or not meta.length_bytes:
            raise InvalidInput("the part's description does not fit its payload")
        if self.contradicts(meta, fingerprint=fingerprint):
            raise InvalidInput("the part contradicts what is held")
        block = self._tree.blocks.get(meta.block_hash)
        held = None if block is None else block.part(meta.kind)
        if held is not None:
            self._collisions += held.proof[:HASH_BYTES] != meta.digest
            self._refresh(held, self._next_use())
            return PutOutcome.ALREADY_HELD
        try:
            block = self._insert(part, block, fingerprint, now, reservation_id)
        except CapacityError:
            self._put_failures += 1
            raise
        self._limit_tails(block)
        return PutOutcome.STORED

    def _insert(
        self, part: Part, block: HeldBlock | None, fingerprint: bytes, now: float, reservation_id: ReservationId | None
    ) -> HeldBlock:
        meta = part.meta
        reserved = min(self._reservations.get(reservation_id, 0) if reservation_id is not None else 0, meta.length_bytes)
        if block is None:
            if fingerprint not in self._tree.namespaces and len(self._tree.namespaces) >= NAMESPACES_MAX:
                raise CapacityError(f"the store already holds {NAMESPACES_MAX} namespaces")
            # linked before room is made, so that its parent is no leaf and is not what gets evicted
            block = self._tree.add(fingerprint, meta)
        own_parts = block.parts()
        for own in own_parts:  # the other parts of the same block must not go to make room for this one
            self._lock(own)
        try:
            self._make_quota_room(block.namespace, meta.length_bytes, now)
            self._make_room(meta.length_bytes - reserved, now, beneficiary=block)
        except CapacityError:
            if not block.kinds:
                self._tree.remove(block)
            raise
        finally:
            for own in own_parts:
                self._unlock(own)
        if reservation_id is not None and reserved:
            self._reservations[reservation_id] -= reserved
            self._bytes_reserved -= reserved
        stamp = self._next_use()
        held = HeldPart(block, meta, _own_payload(part.payload), stamp)
        block.set_part(held.kind, held)
        block.stamp = stamp
        block.namespace.bytes_used += meta.length_bytes
        self._bytes_used += meta.length_bytes
        self._entry_count += 1
        block.namespace.requeue(block)
        self._log("stored", held)
        return block

    def _limit_tails(self, newest: HeldBlock) -> None:
        """Drop the oldest tails under the parent of a block just stored, as far as they are not held fast."""
        tails = newest.namespace.tails.get(newest.parent_hash, ())
        excess = len(tails) - limits.TAILS_PER_PARENT_MAX
        if excess <= 0 or newest.token_count >= newest.namespace.full_tokens:
            return
        for block in [b for b in tails if not b.locked and b is not newest and b.children is None][:excess]:
            self._evict(block.parts())

    # --- recency, pins, leases -----------------------------------------------------------------------------------

    def touch(self, refs: Iterable[PartRef], now: float) -> None:
        """Refresh the recency of parts that are used together; those not held are skipped."""
        stamp = self._next_use()
        for ref in refs:
            held = self._find(ref)
            if held is not None:
                self._refresh(held, stamp)

    def note_lookup(self, *, hit: bool) -> None:
        """Count a lookup."""
        self._lookup_hits += hit
        self._lookup_misses += not hit

    def pin(self, ref: PartRef) -> bool:
        """Keep a part until it is unpinned; False when it is not held. Pinning twice is pinning once."""
        held = self._find(ref)
        if held is None:
            return False
        if ref not in self._pins:
            self._pins.add(ref)
            self._lock(held)
        return True

    def unpin(self, ref: PartRef) -> None:
        """Idempotent."""
        if ref in self._pins:
            self._pins.remove(ref)
            held = self._find(ref)
            assert held is not None, "a pinned part is held"
            self._unlock(held)

    def lease(self, refs: Iterable[PartRef], now: float, lease_ms: int) -> LeaseInfo:
        """Refresh parts and keep them until the lease is released or expires; those not held are left out.

        Raises:
            CapacityError: there are LEASES_MAX leases.
            LeaseError: none of the parts is held (NOT_FOUND).
        """
        self.expire(now)
        if len(self._leases) >= LEASES_MAX:
            raise CapacityError(f"the store already keeps {LEASES_MAX} leases")
        found = {ref: held for ref in refs if (held := self._find(ref)) is not None}
        if not found:
            raise LeaseError(FailureCode.NOT_FOUND, "none of the parts is held")
        stamp = self._next_use()
        for held in found.values():  # inlined: a long prompt has thousands of parts
            held.stamp = held.block.stamp = stamp
            if held.locks == 0:
                self._bytes_locked += len(held.payload)
            held.locks += 1
        self._generation += 1
        lease_id = LeaseId(self._random_bytes(16))
        info = LeaseInfo(lease_id, tuple(found), self._generation, now + lease_ms / 1000)
        self._leases[lease_id] = _Lease(info, found)
        heapq.heappush(self._expiries, (info.expires_at, lease_id))
        return info

    def leased_parts(self, lease_id: LeaseId, refs: Sequence[PartRef], now: float) -> tuple[Part, ...]:
        """The parts, in the order of ``refs``; counted as served.

        Raises:
            LeaseError: NOT_FOUND when the lease is unknown or has expired, FAILED_PRECONDITION when it lacks a part.
        """
        leased = self._live_lease(lease_id, now).parts
        parts: list[Part] = []
        tokens: dict[bytes, int] = {}
        for ref in refs:
            held = leased.get(ref)
            if held is None:
                raise LeaseError(FailureCode.FAILED_PRECONDITION, "a part is not in the lease, or was invalidated")
            parts.append(held.as_part())
            tokens[ref.block_hash] = held.block.token_count
        self._bytes_served += sum(part.meta.length_bytes for part in parts)
        self._tokens_served += sum(tokens.values())
        return tuple(parts)

    def lease_info(self, lease_id: LeaseId, now: float) -> LeaseInfo:
        """Raises LeaseError (NOT_FOUND) when the lease is unknown or has expired."""
        return self._live_lease(lease_id, now).info

    def renew(self, lease_id: LeaseId, now: float, lease_ms: int, *, generation: int | None = None) -> LeaseInfo:
        """Let the lease end ``lease_ms`` from now, or when it would have ended, whichever is later.

        Raises:
            LeaseError: NOT_FOUND when it is unknown, has expired, or is of another generation.
        """
        lease = self._live_lease(lease_id, now)
        info = lease.info
        if generation is not None and generation != info.generation:
            raise LeaseError(FailureCode.NOT_FOUND, "the lease is of another generation")
        expires_at = max(info.expires_at, now + lease_ms / 1000)
        lease.info = LeaseInfo(info.lease_id, info.refs, info.generation, expires_at)
        return lease.info

    def release(self, lease_id: LeaseId) -> bool:
        """End a lease; False when there is none (any more)."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        for held in lease.parts.values():
            self._unlock(held)
        if len(self._expiries) > 2 * len(self._leases) + 64:
            self._expiries = [(kept.info.expires_at, kept_id) for kept_id, kept in self._leases.items()]
            heapq.heapify(self._expiries)
        return True

    def expire(self, now: float) -> int:
        """End every lease whose time has come; returns how many."""
        ended = 0
        while (due := self.next_expiry()) is not None and due <= now:
            ended += self.release(heapq.heappop(self._expiries)[1])
        return ended

    def next_expiry(self) -> float | None:
        """When the next lease ends, seconds; None without leases."""
        while self._expiries:
            queued, lease_id = self._expiries[0]
            lease = self._leases.get(lease_id)
            if lease is not None and lease.info.expires_at == queued:
                return queued
            heapq.heappop(self._expiries)
            if lease is not None:  # renewed since it was queued
                heapq.heappush(self._expiries, (lease.info.expires_at, lease_id))
        return None

    # --- room ----------------------------------------------------------------------------------------------------

    def reserve(self, reservation_id: ReservationId, reserved_bytes: int, now: float) -> None:
        """Set room aside, evicting what may go, before the work that will fill it starts.

        Raises:
            CapacityError: leases, pins and other reservations leave less than that.
            InvalidInput: the id is in use, or the size is not positive.
        """
        if reservation_id in self._reservations or reserved_bytes <= 0:
            raise InvalidInput("a reservation needs a new id and a positive size")
        self._make_room(reserved_bytes, now, beneficiary=None)
        self._reservations[reservation_id] = reserved_bytes
        self._bytes_reserved += reserved_bytes

    def release_reservation(self, reservation_id: ReservationId) -> None:
        """Give back what is left of a reservation; idempotent."""
        self._bytes_reserved -= self._reservations.pop(reservation_id, 0)

    def resize(self, max_bytes: int, now: float) -> bool:
        """Change the bound, evicting down to it; False when leases, pins and reservations kept it larger.

        Raises:
            InvalidInput: the size is not positive.
        """
        if max_bytes <= 0:
            raise InvalidInput(f"the store needs a positive size, not {max_bytes}")
        self.expire(now)
        reached = max(max_bytes, self._bytes_reserved + self._bytes_locked)
        if reached < self._max_bytes:
            self._evict_down(self._bytes_used + self._bytes_reserved - reached, beneficiary=None)
        self._max_bytes = reached
        return reached == max_bytes

    def invalidate(self, ref: PartRef) -> bool:
        """Drop a bad part at once, also out of leases and pins; False when it is not held."""
        held = self._find(ref)
        if held is None:
            return False
        for lease in self._leases.values():
            lease.parts.pop(ref, None)
        self._pins.discard(ref)
        if held.locks:
            held.locks = 1
            self._unlock(held)
        self._drop(held)
        return True

    def clear(self) -> None:
        """Drop every part, lease and pin; reservations stay, their work is under way."""
        self._leases.clear()
        self._expiries.clear()
        self._pins.clear()
        for block in list(self._tree.blocks.values()):
            for held in block.parts():
                held.locks = 0
                self._drop(held)
        self._bytes_locked = 0

    def _make_quota_room(self, namespace: Namespace, length_bytes: int, now: float) -> None:
        quota = self._quota_bytes(namespace.fingerprint)
        if quota is None or namespace.bytes_used + length_bytes <= quota:
            return
        self.expire(now)
        while namespace.bytes_used + length_bytes > quota:
            victims = self._tree.victim((namespace,))
            if not victims:
                raise CapacityError(f"the namespace's quota of {quota} bytes is used up by what can't be evicted")
            self._evict(victims)

    def _make_room(self, needed_bytes: int, now: float, *, beneficiary: HeldBlock | None) -> None:
        missing = self._bytes_used + self._bytes_reserved + needed_bytes - self._max_bytes
        if missing <= 0:
            return
        self.expire(now)
        if missing > self._bytes_used - self._bytes_locked:
            raise CapacityError(
                f"no room for {needed_bytes} bytes: of {self._max_bytes} bytes {self._bytes_locked} are held fast "
                f"and {self._bytes_reserved} reserved"
            )
        if not self._evict_down(missing, beneficiary=beneficiary):
            raise CapacityError(f"no room for {needed_bytes} bytes without evicting the prefix they belong to")

    def _evict_down(self, excess_bytes: int, *, beneficiary: HeldBlock | None) -> bool:
        target = self._bytes_used - excess_bytes
        while self._bytes_used > target:
            victims = self._tree.victim(self._tree.namespaces.values())
            if not victims:
                return self._evict_interior(target, beneficiary)
            self._evict(victims)
        return True

    def _evict_interior(self, target: int, beneficiary: HeldBlock | None) -> bool:
        """No leaf may go: take unlocked parts out from under locked descendants, oldest first. Rare, so a plain scan."""
        spared = {beneficiary, *self._tree.ancestors(beneficiary)} if beneficiary is not None else set()
        candidates = [
            held for b in self._tree.blocks.values() if b not in spared for held in b.parts() if not held.locks
        ]  # fmt: skip
        candidates.sort(key=lambda held: (held.stamp, -held.block.start))
        for held in candidates:
            if self._bytes_used <= target:
                break
            self._evict((held,))
        return self._bytes_used <= target

    # --- bookkeeping ---------------------------------------------------------------------------------------------

    def _find(self, ref: PartRef) -> HeldPart | None:
        block = self._tree.blocks.get(ref.block_hash)
        return None if block is None else block.part(ref.kind)

    def _live_lease(self, lease_id: LeaseId, now: float) -> _Lease:
        lease = self._leases.get(lease_id)
        if lease is None or now >= lease.info.expires_at:
            raise LeaseError(FailureCode.NOT_FOUND, "the lease is unknown or has expired")
        return lease

    def _next_use(self) -> int:
        self._use += 1
        return self._use

    def _refresh(self, held: HeldPart, stamp: int) -> None:
        held.stamp = stamp
        held.block.stamp = stamp

    def _lock(self, held: HeldPart) -> None:
        if held.locks == 0:
            self._bytes_locked += held.length_bytes
        held.locks += 1

    def _unlock(self, held: HeldPart) -> None:
        held.locks -= 1
        if held.locks == 0:
            self._bytes_locked -= len(held.payload)
            held.block.namespace.requeue(held.block)

    def _evict(self, victims: Sequence[HeldPart]) -> None:
        for held in victims:
            assert not held.locks, "what is leased or pinned is not evicted"
            self._evictions += 1
            self._bytes_evicted += held.length_bytes
            self._drop(held)

    def _drop(self, held: HeldPart) -> None:
        block = held.block
        block.set_part(held.kind, None)
        block.namespace.bytes_used -= held.length_bytes
        self._bytes_used -= held.length_bytes
        self._entry_count -= 1
        if not block.kinds:
            self._tree.remove(block)
        self._log("evicted", held)

    def _log(self, change: Literal["stored", "evicted"], held: HeldPart) -> None:
        self._epoch += 1
        self._sequence += 1
        self._events.append(StoreEvent(self._sequence, change, held.ref))


def _presence(row: Sequence[HeldPart | None]) -> tuple[bool, ...]:
    return tuple([held is not None for held in row])


def _mean_bytes(row: Sequence[HeldPart | None]) -> int:
    lengths = [len(held.payload) for held in row if held is not None]
    return sum(lengths) // len(lengths) if lengths else 0


def _own_payload(payload: memoryview) -> bytes | memoryview:
    """What to keep of a payload: its bytes object, its view, or a copy if the view is a part of a larger buffer."""
    owner = payload.obj
    if isinstance(owner, bytes) and len(owner) == payload.nbytes:
        return owner  # a view object of its own would cost 184 bytes
    if memoryview(owner).nbytes == payload.nbytes:
        return byte_view(payload)
    return bytes(payload)
