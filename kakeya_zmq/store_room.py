"""The room of a store: what is used and reserved of its budget, and making room by evicting.

``bytes_used + bytes_reserved <= max_bytes``, always, and there are no more parts than a store of that size has places for:
the smallest one costs memory, and time when it goes. Making room for one part takes a bounded time.

What is held fast (:mod:`kakeya_zmq.store_leases`) is not evicted, and reserved room is given to nobody else; what goes first
is the tree's business (:mod:`kakeya_zmq.store_index`). Where that leaves too little for one node, leases of others yield as
far as they are beyond their share; its own ones do not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kakeya_zmq.store_blocks import HeldBlock, HeldPart, Namespace
from kakeya_zmq.store_index import BlockTree
from kakeya_zmq.store_leases import LeaseTable, Share
from kakeya_zmq.store_log import EventLog
from kakeya_zmq.store_values import (
    BYTES_PER_EVICTION,
    BYTES_PER_PART,
    EVENTS_MAX,
    EVICTIONS_AT_ONCE,
    LEASED_SHARE,
    PARTS_MAX_LEAST,
    SCANNED_BLOCKS_MAX,
    Change,
    ReservationId,
)
from wire.errors import CapacityError, InvalidInput
from wire.ids import LeaseId

TOO_MANY_SMALL: Final = "room is still being made: too many small parts would have to go for it at once"


def parts_in(size_bytes: int) -> int:
    """How many parts so much of a store has places for."""
    return max(PARTS_MAX_LEAST, size_bytes // BYTES_PER_PART)


def share_of(size_bytes: int) -> Share:
    """What of it one other node may hold fast whoever needs the room."""
    return Share(size_bytes // LEASED_SHARE, parts_in(size_bytes) // LEASED_SHARE)


def evictions_for(needed_bytes: int) -> int:
    """How many parts may go at once for so many bytes."""
    return EVICTIONS_AT_ONCE + max(0, needed_bytes) // BYTES_PER_EVICTION


@dataclass(frozen=True, slots=True)
class _Target:
    """What may be left."""

    bytes_used: int
    parts: int


class StoreRoom:
    """See the module's text.

    Args:
        max_bytes: the budget, > 0.
        tree: the held blocks.
        leases: what of them is held fast.
        log: learns of every change.
        quota_bytes: bound for one fingerprint, or None for no bound of its own.
    """

    def __init__(
        self,
        max_bytes: int,
        tree: BlockTree,
        leases: LeaseTable,
        log: EventLog,
        quota_bytes: Callable[[bytes], int | None],
    ) -> None:
        if max_bytes <= 0:
            raise InvalidInput(f"the store needs a positive size, not {max_bytes}")
        self.max_bytes = max_bytes
        self.bytes_used = 0
        self.bytes_reserved = 0
        self.entry_count = 0
        self.epoch = 1
        self.evictions = 0
        self.bytes_evicted = 0
        self._tree = tree
        self._leases = leases
        self._log = log
        self._quota_bytes = quota_bytes
        self._reservations: dict[ReservationId, int] = {}

    # --- reservations and size -----------------------------------------------------------------------------------

    def reserve(self, reservation_id: ReservationId, reserved_bytes: int, now: float, *, node: str) -> None:
        """Set room aside for a node, evicting what may go.

        Raises:
            CapacityError: leases, pins and other reservations leave less than that.
            InvalidInput: the id is in use, or the size is not positive.
        """
        if reservation_id in self._reservations or reserved_bytes <= 0:
            raise InvalidInput("a reservation needs a new id and a positive size")
        self.make_room(reserved_bytes, now, beneficiary=None, node=node, new_parts=0)
        self._reservations[reservation_id] = reserved_bytes
        self.bytes_reserved += reserved_bytes

    def reserved_for(self, reservation_id: ReservationId | None, length_bytes: int) -> int:
        """How much of so many bytes a reservation covers."""
        return 0 if reservation_id is None else min(self._reservations.get(reservation_id, 0), length_bytes)

    def use_reservation(self, reservation_id: ReservationId, used_bytes: int) -> None:
        """So much of it has been filled."""
        self._reservations[reservation_id] -= used_bytes
        self.bytes_reserved -= used_bytes

    def release_reservation(self, reservation_id: ReservationId) -> None:
        """Give back what is left of a reservation; idempotent."""
        self.bytes_reserved -= self._reservations.pop(reservation_id, 0)

    def resize(self, max_bytes: int, now: float, evictions_max: int | None) -> bool:
        """Change the budget, evicting down to it; False when it is still larger than asked for.

        Raises:
            InvalidInput: the size is not positive.
        """
        if max_bytes <= 0:
            raise InvalidInput(f"the store needs a positive size, not {max_bytes}")
        self._leases.expire(now)
        self._let_yield(max_bytes - self.bytes_reserved, self.parts_max, node="")
        reached = max(max_bytes, self.bytes_reserved + self._leases.bytes_locked)
        if reached < self.max_bytes:
            excess = self.bytes_used + self.bytes_reserved - reached
            last = sys.maxsize if evictions_max is None else self.evictions + evictions_max
            self._evict_down(_Target(self.bytes_used - excess, self.entry_count), beneficiary=None, last=last)
        self.max_bytes = max(reached, self.bytes_used + self.bytes_reserved)
        return self.max_bytes == max_bytes

    # --- making room ---------------------------------------------------------------------------------------------

    @property
    def parts_max(self) -> int:
        """How many parts there may be, whatever their size."""
        return parts_in(self.max_bytes)

    def let_yield(self, needed_bytes: int, now: float, *, node: str) -> None:
        """End leases of others beyond their share as far as a node needs that for so many bytes; evicts nothing."""
        self._leases.expire(now)
        self._let_yield(self.max_bytes - self.bytes_reserved - needed_bytes, self.parts_max, node=node)

    def _let_yield(self, locked_bytes_max: int, locked_parts_max: int, *, node: str) -> None:
        """End leases beyond their share until no more than so much is held fast, or none is left."""
        leases = self._leases
        if leases.bytes_locked <= locked_bytes_max and leases.parts_locked <= locked_parts_max:
            return
        for lease_id in leases.beyond_share(share_of(self.max_bytes), spared=node):
            leases.yield_lease(lease_id)
            if leases.bytes_locked <= locked_bytes_max and leases.parts_locked <= locked_parts_max:
                return

    def make_quota_room(self, namespace: Namespace, length_bytes: int, now: float, *, node: str) -> None:
        """Evict until a namespace with a quota can take one more part, of so many bytes, of a node.

        Raises:
            CapacityError: what of it is held fast leaves less than that, or it would take too long.
        """
        quota = self._quota_bytes(namespace.fingerprint)
        if quota is None or _fits(namespace, length_bytes, quota):
            return
        if length_bytes > quota:  # nothing is evicted in vain
            raise CapacityError(f"the namespace's quota leaves {quota} bytes")
        self._leases.expire(now)
        last = self.evictions + evictions_for(length_bytes)
        beyond_share: list[LeaseId] | None = None
        while not _fits(namespace, length_bytes, quota):
            if self.evictions >= last:
                raise CapacityError(TOO_MANY_SMALL)
            if victims := self._tree.victim((namespace,)):
                self.evict(victims)
                continue
            if beyond_share is None:
                beyond_share = self._leases.beyond_share(
                    share_of(quota), spared=node, fingerprint=namespace.fingerprint
                )  # fmt: skip
                beyond_share.reverse()
            if not beyond_share:
                raise CapacityError(f"the namespace's quota of {quota} bytes is used up by what can't be evicted")
            self._leases.yield_lease(beyond_share.pop())

    def make_room(
        self, needed_bytes: int, now: float, *, beneficiary: HeldBlock | None, node: str, new_parts: int = 1
    ) -> None:
        """Evict until so many bytes, and places for parts, are free for a node; the beneficiary's own prefix is spared.

        Raises:
            CapacityError: what is held fast or reserved leaves less than that, or it would take too long: what was evicted
                until then has gone all the same, so that asking again gets further.
        """
        missing_bytes = self.bytes_used + self.bytes_reserved + needed_bytes - self.max_bytes
        missing_parts = self.entry_count + new_parts - self.parts_max
        if missing_bytes <= 0 and missing_parts <= 0:
            return
        self._leases.expire(now)
        target = _Target(self.bytes_used - missing_bytes, self.entry_count - missing_parts)
        self._let_yield(target.bytes_used, target.parts, node=node)
        if self._leases.bytes_locked > target.bytes_used or self._leases.parts_locked > target.parts:
            raise CapacityError(
                f"no room for {needed_bytes} bytes: of {self.max_bytes} bytes {self._leases.bytes_locked} are held fast "
                f"and {self.bytes_reserved} reserved"
            )
        last = self.evictions + evictions_for(needed_bytes)
        if not self._evict_down(target, beneficiary=beneficiary, last=last):
            if self.evictions >= last:
                raise CapacityError(TOO_MANY_SMALL)
            raise CapacityError(f"no room for {needed_bytes} bytes without evicting the prefix they belong to")

    def _reached(self, target: _Target) -> bool:
        return self.bytes_used <= target.bytes_used and self.entry_count <= target.parts

    def _evict_down(self, target: _Target, *, beneficiary: HeldBlock | None, last: int) -> bool:
        """Evict until no more is left than that; False when ``evictions`` reached ``last`` before, or nothing may go."""
        while not self._reached(target):
            if self.evictions >= last:
                return False
            victims = self._tree.victim(self._tree.namespaces.values())
            if not victims:
                return self._evict_interior(target, beneficiary, last)
            self.evict(victims)
        return True

    def _evict_interior(self, target: _Target, beneficiary: HeldBlock | None, last: int) -> bool:
        """No leaf may go: take unlocked parts out from under locked descendants, of the blocks that came first the oldest
        first. Rare, so a plain scan."""
        spared = {beneficiary, *self._tree.ancestors(beneficiary)} if beneficiary is not None else set()
        looked_at = islice(self._tree.all_blocks(), SCANNED_BLOCKS_MAX)
        candidates = [held for block in looked_at if block not in spared for held in block.parts() if not held.locks]
        candidates.sort(key=lambda held: (held.stamp, -held.block.start))
        for held in candidates:
            if self._reached(target) or self.evictions >= last:
                break
            self.evict((held,))
        return self._reached(target)

    def evict(self, victims: Sequence[HeldPart]) -> None:
        """Drop parts that may go, to make room."""
        for held in victims:
            assert not held.locks, "what is leased or pinned is not evicted"
            self.evictions += 1
            self.bytes_evicted += held.length_bytes
            self.drop(held, "evicted")

    def drop(self, held: HeldPart, change: Change) -> None:
        """Take a part out; it is not held fast (any more)."""
        block = held.block
        block.set_part(held.kind, None)
        block.namespace.bytes_used -= held.length_bytes
        self.bytes_used -= held.length_bytes
        self.entry_count -= 1
        if not block.kinds:
            self._tree.remove(block)
        self.record(change, held)

    def clear(self) -> None:
        """Drop everything; leases and pins have been cleared before. Takes far less time than dropping part by part."""
        if self.entry_count <= EVENTS_MAX:
            for block in self._tree.all_blocks():
                for held in block.parts():
                    self.record("invalidated", held)
        else:
            self.epoch += self.entry_count
            self._log.skip(self.entry_count)
        self._tree.clear()
        self.bytes_used = self.entry_count = 0

    def record(self, change: Change, held: HeldPart) -> None:
        """Something changed: the epoch grows, readers of the log learn it."""
        self.epoch += 1
        self._log.add(change, held)


def _fits(namespace: Namespace, length_bytes: int, quota: int) -> bool:
    """Whether a namespace, which has the block of the new part already, may have it."""
    return namespace.bytes_used + length_bytes <= quota and len(namespace.blocks) <= parts_in(quota)
