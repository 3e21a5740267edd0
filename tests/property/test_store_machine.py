"""Random histories of the store against a plain model of what must hold after every step.

Two namespaces put the same blocks, in different order: what holds in one is not allowed to depend on the other.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kakeya_zmq.blocks import ROOT_HASH, Part
from kakeya_zmq.store import LEASED_SHARE, BlockStore, LeaseError, PutOutcome
from kakeya_zmq.store_blocks import HeldBlock
from kakeya_zmq.store_index import BlockTree
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
NAMESPACES = (FINGERPRINT, b"o" * 32)
Held = tuple[bytes, PartRef]
"""A part in a namespace."""
namespaces = st.sampled_from(NAMESPACES)
nodes = st.sampled_from(["", "a", "b"])
"""This one, and two others."""
some_parts = st.lists(st.integers(0, len(PARTS) - 1), min_size=1, max_size=5)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.store = BlockStore(200, random_bytes=CountingBytes())
        self.leases: dict[LeaseId, tuple[float, bytes, set[PartRef]]] = {}
        self.owners: dict[LeaseId, tuple[str, int]] = {}
        """Whose each open lease is, and its size when it was given."""
        self.pins: set[Held] = set()
        self.reservations: dict[bytes, int] = {}
        self.names = 0

    def has(self, namespace: bytes, ref: PartRef) -> bool:
        return self.store.has(ref, fingerprint=namespace)

    def leased(self, *, live: bool) -> set[Held]:
        return {
            (namespace, ref)
            for expires_at, namespace, refs in self.leases.values()
            for ref in refs
            if not live or self.now < expires_at
        }

    def locked(self) -> set[Held]:
        return self.pins | self.leased(live=True)

    def forget(self, lease_id: LeaseId) -> None:
        del self.leases[lease_id], self.owners[lease_id]

    def learn_what_yielded(self, node: str, max_bytes: int) -> None:
        """Only leases of others than who needed room, and of those, the oldest ones beyond their share."""
        yielded = self.store.take_yielded()
        for lease_id in [each for each in self.owners if each in yielded]:
            owner = self.owners[lease_id][0]
            assert owner not in ("", node)
            total = sum(size for other, size in self.owners.values() if other == owner)
            assert total > max_bytes // LEASED_SHARE
            self.forget(lease_id)

    @rule(index=st.integers(0, len(PARTS) - 1), namespace=namespaces, use_reservation=st.booleans(), node=nodes)
    def put(self, index: int, namespace: bytes, use_reservation: bool, node: str) -> None:
        part, before = PARTS[index], self.store.stats()
        was_held = self.has(namespace, part.meta.ref)
        name = next(iter(self.reservations), None) if use_reservation else None
        try:
            outcome = self.store.put(part, fingerprint=namespace, now=self.now, reservation_id=name, publisher=node)
        except CapacityError:
            assert not self.has(namespace, part.meta.ref)
            assert self.store.stats().put_failures == before.put_failures + 1
            return
        finally:
            self.learn_what_yielded(node, before.max_bytes)
        assert outcome is (PutOutcome.ALREADY_HELD if was_held else PutOutcome.STORED)
        assert self.store.get(part.meta.ref, fingerprint=namespace) == part
        if outcome is PutOutcome.STORED and name is not None:
            self.reservations[name] -= min(self.reservations[name], part.meta.length_bytes)

    @rule(indices=some_parts, namespace=namespaces, lease_ms=st.integers(0, 5000), owner=nodes)
    def lease(self, indices: list[int], namespace: bytes, lease_ms: int, owner: str) -> None:
        refs = [PARTS[index].meta.ref for index in indices]
        held = {ref for ref in refs if self.has(namespace, ref)}
        try:
            info = self.store.lease(refs, self.now, lease_ms, fingerprint=namespace, owner=owner)
        except LeaseError:
            assert not held
            return
        assert set(info.refs) == held
        assert info.fingerprint == namespace
        self.leases[info.lease_id] = (info.expires_at, namespace, held)
        self.owners[info.lease_id] = (owner, self.size_of({(namespace, ref) for ref in held}))

    @rule(data=st.data(), lease_ms=st.integers(0, 5000))
    def renew_or_read(self, data: st.DataObject, lease_ms: int) -> None:
        if not self.leases:
            return
        lease_id = data.draw(st.sampled_from(list(self.leases)))
        expires_at, namespace, refs = self.leases[lease_id]
        try:
            info = self.store.renew(lease_id, self.now, lease_ms)
        except LeaseError:
            assert self.now >= expires_at
            return
        assert self.now < expires_at
        self.leases[lease_id] = (info.expires_at, namespace, refs)
        if refs:
            ordered = sorted(refs, key=repr)
            assert [p.meta.ref for p in self.store.leased_parts(lease_id, ordered, self.now)] == ordered

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            lease_id = data.draw(st.sampled_from(list(self.leases)))
            self.forget(lease_id)
            self.store.release(lease_id)
            assert not self.store.release(lease_id)

    @rule(index=st.integers(0, len(PARTS) - 1), namespace=namespaces, pin=st.booleans())
    def pin_or_unpin(self, index: int, namespace: bytes, pin: bool) -> None:
        ref = PARTS[index].meta.ref
        if not pin:
            self.store.unpin(ref, fingerprint=namespace)
            self.pins.discard((namespace, ref))
        elif self.store.pin(ref, fingerprint=namespace):
            self.pins.add((namespace, ref))

    @rule(size=st.integers(1, 120), node=nodes)
    def reserve(self, size: int, node: str) -> None:
        self.names += 1
        name = bytes([self.names % 256, self.names // 256])
        room = self.store.room_bytes(FINGERPRINT)
        self.store.expire(self.now)
        try:
            self.store.reserve(name, size, self.now, node=node)
        except CapacityError:
            assert room < size
            return
        finally:
            self.learn_what_yielded(node, self.store.max_bytes)
        self.reservations[name] = size

    @rule()
    def release_reservation(self) -> None:
        if self.reservations:
            name, _ = self.reservations.popitem()
            self.store.release_reservation(name)

    @rule(size=st.integers(20, 300))
    def resize(self, size: int) -> None:
        reached = self.store.resize(size, self.now)
        self.learn_what_yielded("", size)
        assert reached == (self.store.max_bytes == size)
        if not reached:
            stats = self.store.stats()
            assert stats.max_bytes == stats.bytes_locked + stats.bytes_reserved

    @rule(indices=some_parts, namespace=namespaces)
    def touch(self, indices: list[int], namespace: bytes) -> None:
        self.store.touch([PARTS[index].meta.ref for index in indices], self.now, fingerprint=namespace)

    @rule(index=st.integers(0, len(PARTS) - 1), namespace=namespaces)
    def invalidate(self, index: int, namespace: bytes) -> None:
        ref = PARTS[index].meta.ref
        was_held = self.has(namespace, ref)
        elsewhere = [self.has(other, ref) for other in NAMESPACES if other != namespace]
        assert self.store.invalidate(ref, fingerprint=namespace) == was_held
        assert not self.has(namespace, ref)
        assert elsewhere == [self.has(other, ref) for other in NAMESPACES if other != namespace]
        self.pins.discard((namespace, ref))
        for _, leased_in, refs in self.leases.values():
            if leased_in == namespace:
                refs.discard(ref)

    @rule(seconds=st.floats(0.0, 3.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.store.expire(self.now)
        expiry = self.store.next_expiry()
        assert expiry is None or expiry > self.now

    @invariant()
    def what_is_held_fast_is_there(self) -> None:
        for held in self.locked():
            assert self.has(*held)

    @invariant()
    def the_figures_add_up(self) -> None:
        stats = self.store.stats()
        held = [(namespace, part) for namespace in NAMESPACES for part in PARTS if self.has(namespace, part.meta.ref)]
        usage = {namespace: 0 for namespace, _ in held}
        for namespace, part in held:
            usage[namespace] += part.meta.length_bytes
        assert self.store.usage_by_fingerprint() == usage
        assert stats.bytes_used == sum(usage.values())
        assert stats.entry_count == len(held)
        assert stats.block_count == len({(namespace, part.meta.block_hash) for namespace, part in held})
        assert stats.bytes_reserved == sum(self.reservations.values())
        assert stats.bytes_used + stats.bytes_reserved <= stats.max_bytes
        live = self.locked()
        stale = self.leased(live=False) | live
        assert self.size_of(live) <= stats.bytes_locked <= self.size_of(stale)

    def size_of(self, parts: set[Held]) -> int:
        return sum(self.store.length_bytes(ref, fingerprint=namespace) for namespace, ref in parts)

    @invariant()
    def tails_are_those_that_are_held(self) -> None:
        parents = {part.meta.parent_hash for part in PARTS}
        for namespace in NAMESPACES:
            for parent in parents:
                self._check_tails(namespace, parent)

    def _check_tails(self, namespace: bytes, parent: bytes) -> None:
        found = self.store.tails(parent, fingerprint=namespace, block_tokens=16)
        under = [part for part in PARTS if part.meta.parent_hash == parent and part.meta.token_count < 16]
        expected = {part.meta.block_hash for part in under if self.has(namespace, part.meta.ref)}
        assert {tail.block_hash for tail in found} <= expected
        assert len(found) == min(len(expected), limits.TAILS_PER_PARENT_MAX)
        for tail in found:
            refs = [PartRef(block_hash=tail.block_hash, kind=kind) for kind in PartKind]
            assert tail.kinds == sum(1 << ref.kind for ref in refs if self.has(namespace, ref))

    @invariant()
    def the_tree_is_consistent(self) -> None:
        _check_tree(self.store._tree)

    def teardown(self) -> None:
        for lease_id in list(self.leases):
            self.store.release(lease_id)
        for namespace, ref in self.pins:
            self.store.unpin(ref, fingerprint=namespace)
        assert self.store.stats().bytes_locked == 0
        self.store.clear()
        assert self.store.stats().bytes_used == 0
        assert self.store.usage_by_fingerprint() == {}


def _check_tree(tree: BlockTree) -> None:
    for block in tree.all_blocks():
        assert block.kinds
        parent = block.namespace.blocks.get(block.parent_hash)
        assert all(child.namespace is block.namespace for child in block.iterate_children())
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
            assert parent_hash == ROOT_HASH or parent_hash not in namespace.blocks
        queued: list[HeldBlock] = namespace.leaves
        assert len(set(queued)) == len(queued)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
