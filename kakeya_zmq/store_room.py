"""The room of a store: what is used and reserved of its budget, and making room by evicting.

``bytes_used + bytes_reserved <= max_bytes``, always. What is held fast (:mod:`kakeya_zmq.store_leases`) is not evicted, and
reserved room is given to nobody else; what goes first is the tree's business (:mod:`kakeya_zmq.store_index`). Where that
leaves too little for one node, leases of others yield as far as they are beyond their share; its own ones do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kakeya_zmq.store_index import BlockTree, HeldBlock, HeldPart, Namespace
from kakeya_zmq.store_leases import LeaseTable
from kakeya_zmq.store_log import EventLog
from kakeya_zmq.store_values import LEASED_SHARE, Change, ReservationId
from wire.errors import CapacityError, InvalidInput
from wire.ids import LeaseId


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
        self.make_room(reserved_bytes, now, beneficiary=None, node=node)
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
        self._let_yield(max_bytes - self.bytes_reserved, max_bytes // LEASED_SHARE, node="")
        reached = max(max_bytes, self.bytes_reserved + self._leases.bytes_locked)
        if reached < self.max_bytes:
            excess = self.bytes_used + self.bytes_reserved - reached
            self._evict_down(excess, beneficiary=None, evictions_max=evictions_max)
        self.max_bytes = max(reached, self.bytes_used + self.bytes_reserved)
        return self.max_bytes == max_bytes

    # --- making room ---------------------------------------------------------------------------------------------

    def let_yield(self, needed_bytes: int, now: float, *, node: str) -> None:
        """End leases of others beyond their share as far as a node needs that for so many bytes; evicts nothing."""
        self._leases.expire(now)
        self._let_yield(self.max_bytes - self.bytes_reserved - needed_bytes, self.max_bytes // LEASED_SHARE, node=node)

    def _let_yield(self, locked_bytes_max: int, share_bytes: int, *, node: str) -> None:
        """End leases beyond their share until no more than so much is held fast, or none is left."""
        if self._leases.bytes_locked <= locked_bytes_max:
            return
        for lease_id in self._leases.beyond_share(share_bytes, spared=node):
            self._leases.yield_lease(lease_id)
            if self._leases.bytes_locked <= locked_bytes_max:
                return

    def make_quota_room(self, namespace: Namespace, length_bytes: int, now: float, *, node: str) -> None:
        """Evict until a namespace with a quota can take so many bytes of a node.

        Raises:
            CapacityError: what of it is held fast leaves less than that.
        """
        quota = self._quota_bytes(namespace.fingerprint)
        if quota is None or namespace.bytes_used + length_bytes <= quota:
            return
        if length_bytes > quota:  # nothing is evicted in vain
            raise CapacityError(f"the namespace's quota leaves {quota} bytes")
        self._leases.expire(now)
        beyond_share: list[LeaseId] | None = None
        while namespace.bytes_used + length_bytes > quota:
            if victims := self._tree.victim((namespace,)):
                self.evict(victims)
                continue
            if beyond_share is None:
                share_bytes = quota // LEASED_SHARE
                beyond_share = self._leases.beyond_share(share_bytes, spared=node, fingerprint=namespace.fingerprint)
                beyond_share.reverse()
            if not beyond_share:
                raise CapacityError(f"the namespace's quota of {quota} bytes is used up by what can't be evicted")
            self._leases.yield_lease(beyond_share.pop())

    def make_room(self, needed_bytes: int, now: float, *, beneficiary: HeldBlock | None, node: str) -> None:
        """Evict until so many bytes are free for a node; the beneficiary's own prefix is spared.

        Raises:
            CapacityError: what is held fast or reserved leaves less than that.
        """
        missing = self.bytes_used + self.bytes_reserved + needed_bytes - self.max_bytes
        if missing <= 0:
            return
        self._leases.expire(now)
        self._let_yield(self.bytes_used - missing, self.max_bytes // LEASED_SHARE, node=node)
        if missing > self.bytes_used - self._leases.bytes_locked:
            raise CapacityError(
                f"no room for {needed_bytes} bytes: of {self.max_bytes} bytes {self._leases.bytes_locked} are held fast "
                f"and {self.bytes_reserved} reserved"
            )
        if not self._evict_down(missing, beneficiary=beneficiary):
            raise CapacityError(f"no room for {needed_bytes} bytes without evicting the prefix they belong to")

    def _evict_down(self, excess_bytes: int, *, beneficiary: HeldBlock | None, evictions_max: int | None = None) -> bool:
        target = self.bytes_used - excess_bytes
        last = None if evictions_max is None else self.evictions + evictions_max
        while self.bytes_used > target:
            if last is not None and self.evictions >= last:
                return False
            victims = self._tree.victim(self._tree.namespaces.values())
            if not victims:
                return self._evict_interior(target, beneficiary)
            self.evict(victims)
        return True

    def _evict_interior(self, target: int, beneficiary: HeldBlock | None) -> bool:
        """No leaf may go: take unlocked parts out from under locked descendants, oldest first. Rare, so a plain scan."""
        spared = {beneficiary, *self._tree.ancestors(beneficiary)} if beneficiary is not None else set()
        candidates = [
            held for b in self._tree.all_blocks() if b not in spared for held in b.parts() if not held.locks
        ]  # fmt: skip
        candidates.sort(key=lambda held: (held.stamp, -held.block.start))
        for held in candidates:
            if self.bytes_used <= target:
                break
            self.evict((held,))
        return self.bytes_used <= target

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

    def record(self, change: Change, held: HeldPart) -> None:
        """Something changed: the epoch grows, readers of the log learn it."""
        self.epoch += 1
        self._log.add(change, held)
