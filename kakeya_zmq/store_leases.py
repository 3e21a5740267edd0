"""What is held fast in a store: leases that end by release or by time, and pins.

A lease keeps parts, not references: a part that was invalidated and stored again under the same name is not in it. Expiry
times wait in a heap that is put right only when its first entry is looked at.

Leases cost their owner nothing and can be had again and again, so they must not keep a store from others: what a node has
leased beyond its share *yields* when somebody else needs room that nothing else can give.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kakeya_zmq.store_blocks import HeldPart
from kakeya_zmq.store_values import (
    LEASED_PARTS_PER_OWNER_MAX,
    LEASES_MAX,
    LEASES_PER_OWNER_MAX,
    LeaseError,
    LeaseInfo,
)
from wire.errors import CapacityError, FailureCode
from wire.ids import LeaseId


@dataclass(slots=True)
class Lease:
    info: LeaseInfo
    parts: set[HeldPart]
    """What it holds: the parts of its info less what was invalidated."""
    size_bytes: int
    """Of their payloads when it was given; what several leases hold counts in each."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one other node may hold fast whoever needs the room."""

    size_bytes: int
    parts: int

    def part_of(self, lease: Lease) -> float:
        """How much of the share a lease takes, 1.0 being all of it."""
        return max(lease.size_bytes / max(1, self.size_bytes), len(lease.info.parts) / max(1, self.parts))


class LeaseTable:
    """Leases and pins of one store.

    Args:
        random_bytes: makes lease ids.
    """

    __slots__ = (
        "_expiries",
        "_generation",
        "_leases",
        "_owned_parts",
        "_owners",
        "_pins",
        "_random_bytes",
        "_yielded",
        "bytes_locked",
        "parts_locked",
    )

    def __init__(self, random_bytes: Callable[[int], bytes]) -> None:
        self._random_bytes = random_bytes
        self._leases: dict[LeaseId, Lease] = {}
        self._owners: Counter[str] = Counter()
        """Leases of each other node."""
        self._owned_parts: Counter[str] = Counter()
        """Parts in them."""
        self._expiries: list[tuple[float, LeaseId]] = []
        self._pins: set[HeldPart] = set()
        self._yielded: set[LeaseId] = set()
        self._generation = 0
        self.bytes_locked = 0
        """Payload bytes of parts that are leased or pinned, each counted once."""
        self.parts_locked = 0
        """How many these are."""

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, parts: Iterable[HeldPart], now: float, lease_ms: int, stamp: int, owner: str = "") -> LeaseInfo:
        """Lease parts of one namespace that are held, each once however often it is named, and mark them as used at
        ``stamp``.

        Args:
            owner: the node it is given to; empty for this node itself.

        Raises:
            CapacityError: there are LEASES_MAX leases, or of another node as many leases, or parts in them, as it may have.
            LeaseError: there are no parts (NOT_FOUND).
        """
        self.expire(now)
        if len(self._leases) >= LEASES_MAX:
            raise CapacityError(f"the store already keeps {LEASES_MAX} leases")
        if owner and self._owners[owner] >= LEASES_PER_OWNER_MAX:
            raise CapacityError(f"the store already keeps {LEASES_PER_OWNER_MAX} leases of this node")
        found = tuple(dict.fromkeys(parts))
        if not found:
            raise LeaseError(FailureCode.NOT_FOUND, "none of the parts is held")
        if owner and self._owned_parts[owner] + len(found) > LEASED_PARTS_PER_OWNER_MAX:
            raise CapacityError(f"the leases of this node already hold {self._owned_parts[owner]} parts")
        size_bytes = 0
        for held in found:  # inlined: a long prompt has thousands of parts
            held.stamp = held.block.stamp = stamp
            length_bytes = len(held.payload)
            size_bytes += length_bytes
            if held.locks == 0:
                self.bytes_locked += length_bytes
                self.parts_locked += 1
            held.locks += 1
        self._generation += 1
        lease_id = LeaseId(self._random_bytes(16))
        info = LeaseInfo(lease_id, found, self._generation, now + lease_ms / 1000, owner)
        self._leases[lease_id] = Lease(info, set(found), size_bytes)
        if owner:
            self._owners[owner] += 1
            self._owned_parts[owner] += len(found)
        heapq.heappush(self._expiries, (info.expires_at, lease_id))
        return info

    def live(self, lease_id: LeaseId, now: float) -> Lease:
        """Raises LeaseError (NOT_FOUND) when the lease is unknown or has expired."""
        lease = self._leases.get(lease_id)
        if lease is None or now >= lease.info.expires_at:
            raise LeaseError(FailureCode.NOT_FOUND, "the lease is unknown or has expired")
        return lease

    def renew(self, lease_id: LeaseId, now: float, lease_ms: int, generation: int | None) -> LeaseInfo:
        """Let a lease end ``lease_ms`` from now, or when it would have ended, whichever is later.

        Raises:
            LeaseError: NOT_FOUND when it is unknown, has expired, or is of another generation.
        """
        lease = self.live(lease_id, now)
        info = lease.info
        if generation is not None and generation != info.generation:
            raise LeaseError(FailureCode.NOT_FOUND, "the lease is of another generation")
        expires_at = max(info.expires_at, now + lease_ms / 1000)
        lease.info = replace(info, expires_at=expires_at)
        return lease.info

    def release(self, lease_id: LeaseId) -> bool:
        """End a lease; False when there is none (any more)."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        if owner := lease.info.owner:
            self._owners[owner] -= 1
            self._owned_parts[owner] -= len(lease.info.parts)
            if not self._owners[owner]:
                del self._owners[owner], self._owned_parts[owner]
        for held in lease.parts:
            self.unlock(held)
        if len(self._expiries) > 2 * len(self._leases) + 64:
            self._expiries = [(kept.info.expires_at, kept_id) for kept_id, kept in self._leases.items()]
            heapq.heapify(self._expiries)
        return True

    def beyond_share(self, share: Share, *, spared: str, fingerprint: bytes | None = None) -> list[LeaseId]:
        """Leases that may be ended for somebody who needs room, in that order: of whoever has leased most first, his oldest
        first, until what he keeps is within his share.

        Args:
            spared: the node that needs the room; empty for this node itself. Its leases stay, as do this node's own ones.
            fingerprint: only leases in this namespace, or in all.
        """
        by_owner: dict[str, dict[LeaseId, float]] = {}
        for lease_id, lease in self._leases.items():
            owner = lease.info.owner
            if owner and owner != spared and fingerprint in (None, lease.info.fingerprint):
                by_owner.setdefault(owner, {})[lease_id] = share.part_of(lease)
        chosen: list[LeaseId] = []
        totals = {owner: sum(leases.values()) for owner, leases in by_owner.items()}
        for owner in sorted(totals, key=totals.__getitem__, reverse=True):
            for lease_id, part in by_owner[owner].items():
                if totals[owner] <= 1.0 + 1e-9:
                    break
                totals[owner] -= part
                chosen.append(lease_id)
        return chosen

    def yield_lease(self, lease_id: LeaseId) -> None:
        """End a lease although its owner wants it; :meth:`take_yielded` tells of it."""
        self.release(lease_id)
        self._yielded.add(lease_id)

    @property
    def any_yielded(self) -> bool:
        return bool(self._yielded)

    def take_yielded(self) -> frozenset[LeaseId]:
        """Leases that have yielded since the last call."""
        yielded = frozenset(self._yielded)
        self._yielded.clear()
        return yielded

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

    def pin(self, held: HeldPart) -> None:
        """Hold a part until it is unpinned; pinning twice is pinning once."""
        if held not in self._pins:
            self._pins.add(held)
            self.lock(held)

    def unpin(self, held: HeldPart) -> None:
        """Idempotent."""
        if held in self._pins:
            self._pins.remove(held)
            self.unlock(held)

    def lock(self, held: HeldPart) -> None:
        if held.locks == 0:
            self.bytes_locked += len(held.payload)
            self.parts_locked += 1
        held.locks += 1

    def unlock(self, held: HeldPart) -> None:
        held.locks -= 1
        if held.locks == 0:
            self.bytes_locked -= len(held.payload)
            self.parts_locked -= 1
            held.block.namespace.requeue(held.block)

    def forget(self, held: HeldPart) -> None:
        """The part is dropped although it may be leased or pinned."""
        if not held.locks:
            return
        for lease in self._leases.values():
            lease.parts.discard(held)
        self._pins.discard(held)
        held.locks = 1
        self.unlock(held)

    def clear(self) -> None:
        """Every part is dropped: nothing is held fast any more."""
        for lease in self._leases.values():
            for held in lease.parts:
                held.locks = 0
        for held in self._pins:
            held.locks = 0
        self._leases.clear()
        self._owners.clear()
        self._owned_parts.clear()
        self._expiries.clear()
        self._pins.clear()
        self.bytes_locked = self.parts_locked = 0
