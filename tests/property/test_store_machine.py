"""Random histories of the store against a plain model of what must hold after every step."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kakeya_zmq.blocks import ROOT_HASH, Part
from kakeya_zmq.store import BlockStore, LeaseError, PutOutcome
from kakeya_zmq.store_index import BlockTree, HeldBlock
from tests.chains import FINGERPRINT, CountingBytes, make_chain, make_parts
from wire import limits
from wire.errors import CapacityError
from wire.ids import LeaseId
from wire.messages import PartKind, PartRef

_KINDS = (PartKind.FULL, PartKind.WINDOW)
PARTS: list[Part] = sorted(
    {
        part.meta.ref: part
        for seed in range(12)
        for part in make_parts(
            make_chain(16 * (1 + seed % 3) + seed % 5, seed=seed, shared_tokens=16 * (seed % 2)),
            length_bytes=5 + seed,
            kinds=_KINDS,
        )
    }.values(),
    key=lambda part: part.meta.start,
)
some_parts = st.lists(st.integers(0, len(PARTS) - 1), min_size=1, max_size=5)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.store = BlockStore(200, random_bytes=CountingBytes())
        self.leases: dict[LeaseId, tuple[float, set[PartRef]]] = {}
        self.pins: set[PartRef] = set()
        self.reservations: dict[bytes, int] = {}
        self.names = 0

    def locked(self) -> set[PartRef]:
        live = [refs for expires_at, refs in self.leases.values() if self.now < expires_at]
        return set().union(self.pins, *live)

    @rule(index=st.integers(0, len(PARTS) - 1), use_reservation=st.booleans())
    def put(self, index: int, use_reservation: bool) -> None:
        part, before = PARTS[index], self.store.stats()
        was_held = self.store.has(part.meta.ref)
        name = next(iter(self.reservations), None) if use_reservation else None
        try:
            outcome = self.store.put(part, fingerprint=FINGERPRINT, now=self.now, reservation_id=name)
        except CapacityError:
            assert not self.store.has(part.meta.ref)
            assert self.store.stats().put_failures == before.put_failures + 1
            return
        assert outcome is (PutOutcome.ALREADY_HELD if was_held else PutOutcome.STORED)
        assert self.store.get(part.meta.ref) == part
        if outcome is PutOutcome.STORED and name is not None:
            self.reservations[name] -= min(self.reservations[name], part.meta.length_bytes)

    @rule(indices=some_parts, lease_ms=st.integers(0, 5000))
    def lease(self, indices: list[int], lease_ms: int) -> None:
        refs = [PARTS[index].meta.ref for index in indices]
        held = {ref for ref in refs if self.store.has(ref)}
        try:
            info = self.store.lease(refs, self.now, lease_ms)
        except LeaseError:
            assert not held
            return
        assert set(info.refs) == held
        self.leases[info.lease_id] = (info.expires_at, held)

    @rule(data=st.data(), lease_ms=st.integers(0, 5000))
    def renew_or_read(self, data: st.DataObject, lease_ms: int) -> None:
        if not self.leases:
            return
        lease_id = data.draw(st.sampled_from(list(self.leases)))
        expires_at, refs = self.leases[lease_id]
        try:
            info = self.store.renew(lease_id, self.now, lease_ms)
        except LeaseError:
            assert self.now >= expires_at
            return
        assert self.now < expires_at
        self.leases[lease_id] = (info.expires_at, refs)
        if refs:
            ordered = sorted(refs, key=repr)
            assert [p.meta.ref for p in self.store.leased_parts(lease_id, ordered, self.now)] == ordered

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            lease_id = data.draw(st.sampled_from(list(self.leases)))
            del self.leases[lease_id]
            self.store.release(lease_id)
            assert not self.store.release(lease_id)

    @rule(index=st.integers(0, len(PARTS) - 1), pin=st.booleans())
    def pin_or_unpin(self, index: int, pin: bool) -> None:
        ref = PARTS[index].meta.ref
        if not pin:
            self.store.unpin(ref)
            self.pins.discard(ref)
        elif self.store.pin(ref):
            self.pins.add(ref)

    @rule(size=st.integers(1, 120))
    def reserve(self, size: int) -> None:
        self.names += 1
        name = bytes([self.names % 256, self.names // 256])
        room = self.store.room_bytes(FINGERPRINT)
        self.store.expire(self.now)
        try:
            self.store.reserve(name, size, self.now)
        except CapacityError:
            assert room < size
            return
        self.reservations[name] = size

    @rule()
    def release_reservation(self) -> None:
        if self.reservations:
            name, _ = self.reservations.popitem()
            self.store.release_reservation(name)

    @rule(size=st.integers(20, 300))
    def resize(self, size: int) -> None:
        reached = self.store.resize(size, self.now)
        assert reached == (self.store.max_bytes == size)
        if not reached:
            stats = self.store.stats()
            assert stats.max_bytes == stats.bytes_locked + stats.bytes_reserved

    @rule(indices=some_parts)
    def touch(self, indices: list[int]) -> None:
        self.store.touch([PARTS[index].meta.ref for index in indices], self.now)

    @rule(index=st.integers(0, len(PARTS) - 1))
    def invalidate(self, index: int) -> None:
        ref = PARTS[index].meta.ref
        was_held = self.store.has(ref)
        assert self.store.invalidate(ref) == was_held
        assert not self.store.has(ref)
        self.pins.discard(ref)
        for _, refs in self.leases.values():
            refs.discard(ref)

    @rule(seconds=st.floats(0.0, 3.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.store.expire(self.now)
        expiry = self.store.next_expiry()
        assert expiry is None or expiry > self.now

    @invariant()
    def what_is_held_fast_is_there(self) -> None:
        for ref in self.locked():
            assert self.store.has(ref)

    @invariant()
    def the_figures_add_up(self) -> None:
        stats = self.store.stats()
        held = [part for part in PARTS if self.store.has(part.meta.ref)]
        assert stats.bytes_used == sum(part.meta.length_bytes for part in held)
        assert stats.entry_count == len(held)
        assert stats.block_count == len({part.meta.block_hash for part in held})
        assert stats.bytes_used == sum(self.store.usage_by_fingerprint().values())
        assert stats.bytes_reserved == sum(self.reservations.values())
        assert stats.bytes_used + stats.bytes_reserved <= stats.max_bytes
        live = self.locked()
        stale = set().union(*(refs for _, refs in self.leases.values())) | live
        assert sum(self.store.length_bytes(ref) for ref in live) <= stats.bytes_locked
        assert stats.bytes_locked <= sum(self.store.length_bytes(ref) for ref in stale)

    @invariant()
    def tails_are_those_that_are_held(self) -> None:
        parents = {part.meta.parent_hash for part in PARTS}
        for parent in parents:
            found = self.store.tails(parent, fingerprint=FINGERPRINT, block_tokens=16)
            expected = {
                part.meta.block_hash
                for part in PARTS
                if part.meta.parent_hash == parent and part.meta.token_count < 16 and self.store.has(part.meta.ref)
            }
            assert {tail.block_hash for tail in found} <= expected
            assert len(found) == min(len(expected), limits.TAILS_PER_PARENT_MAX)
            for tail in found:
                assert tail.kinds == sum(
                    1 << kind for kind in PartKind if self.store.has(PartRef(block_hash=tail.block_hash, kind=kind))
                )

    @invariant()
    def the_tree_is_consistent(self) -> None:
        _check_tree(self.store._tree)

    def teardown(self) -> None:
        for lease_id in list(self.leases):
            self.store.release(lease_id)
        for ref in self.pins:
            self.store.unpin(ref)
        assert self.store.stats().bytes_locked == 0
        self.store.clear()
        assert self.store.stats().bytes_used == 0
        assert self.store.usage_by_fingerprint() == {}


def _check_tree(tree: BlockTree) -> None:
    for block in tree.blocks.values():
        assert block.kinds
        parent = tree.blocks.get(block.parent_hash)
        siblings = list(parent.iterate_children()) if parent else list(block.namespace.orphans[block.parent_hash])
        assert siblings.count(block) == 1
        if block.children is None and not block.locked:
            assert block in block.namespace.leaves, "every leaf that may go can be found"
        window = block.window
        if block.children is not None and window is not None and not window.locks and block.start > 0:
            assert window in block.namespace.windows
    for namespace in tree.namespaces.values():
        for parent_hash, orphans in namespace.orphans.items():
            assert orphans
            assert parent_hash == ROOT_HASH or parent_hash not in tree.blocks
        queued: list[HeldBlock] = namespace.leaves
        assert len(set(queued)) == len(queued)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
