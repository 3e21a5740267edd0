"""The block store: what is kept, what goes first, what is never taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kakeya_zmq.blocks import ROOT_HASH, Chain, Part
from kakeya_zmq.store import (
    LEASES_MAX,
    LEASES_PER_OWNER_MAX,
    NAMESPACES_MAX,
    NAMESPACES_PER_PUBLISHER_MAX,
    BlockStore,
    LeaseError,
    PutOutcome,
)
from tests.chains import FINGERPRINT, CountingBytes, make_chain, make_parts
from wire import limits
from wire.errors import CapacityError, FailureCode, InvalidInput
from wire.ids import LeaseId
from wire.messages import Cut, PartKind, PartRef, Requirement


def make_store(max_bytes: int = 1000) -> BlockStore:
    return BlockStore(max_bytes, random_bytes=CountingBytes())


def put_all(store: BlockStore, parts: Sequence[Part], *, fingerprint: bytes = FINGERPRINT) -> None:
    for part in parts:
        store.put(part, fingerprint=fingerprint, now=0.0)


def refs_of(parts: Sequence[Part]) -> tuple[PartRef, ...]:
    return tuple(part.meta.ref for part in parts)


def held_of(store: BlockStore, parts: Sequence[Part], fingerprint: bytes = FINGERPRINT) -> list[bool]:
    held = [store.has(part.meta.ref, fingerprint=fingerprint) for part in parts]
    assert held == list(map(store.presence(fingerprint), refs_of(parts)))
    return held


def test_what_was_put_comes_back_unchanged() -> None:
    store = make_store()
    parts = make_parts(make_chain(40), kinds=(PartKind.FULL, PartKind.WINDOW))
    put_all(store, parts)
    assert [store.get(part.meta.ref, fingerprint=FINGERPRINT) for part in parts] == list(parts)
    stats = store.stats()
    assert (stats.bytes_used, stats.entry_count, stats.block_count) == (60, 6, 3)
    assert store.usage_by_fingerprint() == {FINGERPRINT: 60}
    assert store.get(PartRef(block_hash=bytes(32), kind=PartKind.FULL), fingerprint=FINGERPRINT) is None
    assert store.length_bytes(parts[0].meta.ref, fingerprint=FINGERPRINT) == 10


def test_the_first_of_two_contents_wins_and_the_second_is_counted() -> None:
    store = make_store()
    (part, *_) = make_parts(make_chain(16))
    assert store.put(part, fingerprint=FINGERPRINT, now=0.0) is PutOutcome.STORED
    assert store.put(part, fingerprint=FINGERPRINT, now=0.0) is PutOutcome.ALREADY_HELD
    assert store.stats().collisions_same_hash == 0
    other = Part(msgspec.structs.replace(part.meta, digest=bytes(32)), memoryview(b"0123456789"))
    assert store.put(other, fingerprint=FINGERPRINT, now=0.0) is PutOutcome.ALREADY_HELD
    assert store.stats().collisions_same_hash == 1
    assert store.get(part.meta.ref, fingerprint=FINGERPRINT) == part


def test_a_view_into_a_larger_buffer_is_copied_and_a_whole_buffer_is_not() -> None:
    store = make_store()
    whole, sliced = make_parts(make_chain(32))
    arena = np.zeros(1000, np.uint8)
    own = np.frombuffer(bytes(10), np.uint8).copy()
    put_all(store, [replace(whole, payload=memoryview(own)), replace(sliced, payload=memoryview(arena)[5:15])])
    own[0], arena[5] = 1, 1
    first, second = store.get(whole.meta.ref, fingerprint=FINGERPRINT), store.get(sliced.meta.ref, fingerprint=FINGERPRINT)
    assert first is not None
    assert second is not None
    assert first.payload[0] == 1
    assert first.payload.readonly
    assert second.payload[0] == 0


@pytest.mark.parametrize(
    "change",
    [
        {"length_bytes": 11},
        {"block_hash": ROOT_HASH},
        {"parent_hash": ROOT_HASH},
        {"start": 0},
        {"start": 17},
    ],
)
def test_descriptions_that_cannot_be_true_are_refused(change: dict[str, object]) -> None:
    store = make_store()
    first, second = make_parts(make_chain(32))
    put_all(store, [first])
    wrong = Part(msgspec.structs.replace(second.meta, **change), second.payload)
    with pytest.raises(InvalidInput):
        store.put(wrong, fingerprint=FINGERPRINT, now=0.0)
    put_all(store, [second])
    assert store.stats().entry_count == 2


def test_a_block_has_one_place_in_its_namespace() -> None:
    store = make_store()
    chain = make_chain(32)
    full, window = make_parts(chain)[1], make_parts(chain, kinds=(PartKind.WINDOW,))[1]
    put_all(store, [full])
    moved = Part(msgspec.structs.replace(window.meta, token_count=8), window.payload)
    with pytest.raises(InvalidInput):
        store.put(moved, fingerprint=FINGERPRINT, now=0.0)
    own_parent = msgspec.structs.replace(full.meta, block_hash=b"x" * 32, parent_hash=b"x" * 32, start=16)
    store.put(Part(own_parent, full.payload), fingerprint=FINGERPRINT, now=0.0)  # unknown parent: can't be told apart
    store.clear()
    assert store.stats().bytes_used == 0


def test_the_deepest_blocks_of_the_oldest_chain_go_first() -> None:
    store = make_store(60)
    old, new = make_parts(make_chain(48, seed=1)), make_parts(make_chain(48, seed=2))
    put_all(store, [*old, *new])
    put_all(store, make_parts(make_chain(16, seed=3)))
    assert held_of(store, old) == [True, True, False]
    assert all(held_of(store, new))
    store.touch(refs_of(old), 0.0, fingerprint=FINGERPRINT)
    put_all(store, make_parts(make_chain(16, seed=4)))
    assert held_of(store, old) == [True, True, False]
    assert held_of(store, new) == [True, True, False]
    assert store.stats().evictions == 2
    assert store.stats().bytes_evicted == 20


def test_a_shared_beginning_outlives_its_branches() -> None:
    store = make_store(60)
    one = make_parts(make_chain(48, seed=1, shared_tokens=16))
    two = make_parts(make_chain(48, seed=2, shared_tokens=16))
    put_all(store, [*one, *two])
    assert store.stats().entry_count == 5
    put_all(store, make_parts(make_chain(48, seed=3)))
    assert held_of(store, one) == [True, False, False]
    assert all(held_of(store, two))


def test_a_parent_is_as_recent_as_the_child_it_lost() -> None:
    store = make_store(30)
    chain, other = make_parts(make_chain(32, seed=1)), make_parts(make_chain(16, seed=2))
    put_all(store, [*chain, *other])
    lease = store.lease(refs_of(other), 0.0, 1000, fingerprint=FINGERPRINT)
    store.touch([chain[1].meta.ref], 0.0, fingerprint=FINGERPRINT)
    third, fourth = make_parts(make_chain(16, seed=3)), make_parts(make_chain(16, seed=4))
    put_all(store, third)
    assert held_of(store, [*chain, *other]) == [True, False, True]
    store.release(lease.lease_id)
    put_all(store, fourth)
    assert held_of(store, [*chain, *other]) == [True, False, False]


def test_interior_windows_go_before_the_leaf_of_their_chain_but_sinks_stay() -> None:
    store = make_store(80)
    kinds = (PartKind.FULL, PartKind.WINDOW)
    parts = make_parts(make_chain(64), kinds=kinds)
    put_all(store, parts)
    store.touch(refs_of(parts), 0.0, fingerprint=FINGERPRINT)
    put_all(store, make_parts(make_chain(32, seed=1)))
    windows = [part for part in parts if part.meta.kind is PartKind.WINDOW]
    assert held_of(store, windows) == [True, False, False, True]
    assert all(held_of(store, [part for part in parts if part.meta.kind is PartKind.FULL]))


def test_a_chain_never_evicts_its_own_beginning() -> None:
    store = make_store(30)
    parts = make_parts(make_chain(64))
    put_all(store, parts[:3])
    with pytest.raises(CapacityError):
        store.put(parts[3], fingerprint=FINGERPRINT, now=0.0)
    assert held_of(store, parts) == [True, True, True, False]
    assert store.stats().put_failures == 1


def test_another_part_of_a_block_does_not_push_the_block_out() -> None:
    store = make_store(10)
    full, window = make_parts(make_chain(16), kinds=(PartKind.FULL, PartKind.WINDOW))
    put_all(store, [full])
    with pytest.raises(CapacityError):
        store.put(window, fingerprint=FINGERPRINT, now=0.0)
    assert store.has(full.meta.ref, fingerprint=FINGERPRINT)
    put_all(store, make_parts(make_chain(16, seed=5)))
    assert not store.has(full.meta.ref, fingerprint=FINGERPRINT), "a failed put leaves no lock behind"


def test_parts_under_leased_descendants_can_still_go() -> None:
    store = make_store(30)
    parts = make_parts(make_chain(48))
    put_all(store, parts)
    store.lease([parts[2].meta.ref], 0.0, 1000, fingerprint=FINGERPRINT)
    put_all(store, make_parts(make_chain(32, seed=1)))
    assert held_of(store, parts) == [False, False, True]
    store.expire(1.0)
    store.touch([parts[2].meta.ref], 1.0, fingerprint=FINGERPRINT)
    put_all(store, parts[:2])
    assert held_of(store, parts) == [True, True, True], "the orphan found its parent again"


def test_a_part_larger_than_the_store_is_refused() -> None:
    store = make_store(9)
    with pytest.raises(CapacityError):
        put_all(store, make_parts(make_chain(16)))
    assert store.stats().put_failures == 1
    assert store.usage_by_fingerprint() == {}


# --- leases -------------------------------------------------------------------------------------------------------


def test_leased_parts_stay_until_the_lease_ends() -> None:
    store = make_store(20)
    parts = make_parts(make_chain(32))
    put_all(store, parts)
    info = store.lease([*refs_of(parts), parts[0].meta.ref], 10.0, 2000, fingerprint=FINGERPRINT)
    assert info.refs == refs_of(parts)
    assert info.expires_at == store.next_expiry() == 12.0
    other = make_parts(make_chain(16, seed=1))[0]
    with pytest.raises(CapacityError):
        store.put(other, fingerprint=FINGERPRINT, now=11.9)
    assert store.leased_parts(info.lease_id, refs_of(parts), 11.9) == parts
    assert (store.stats().bytes_served, store.stats().tokens_served) == (20, 32)
    store.put(other, fingerprint=FINGERPRINT, now=12.0)
    assert store.stats().leases == 0
    with pytest.raises(LeaseError) as caught:
        store.leased_parts(info.lease_id, refs_of(parts), 12.0)
    assert caught.value.code is FailureCode.NOT_FOUND


def test_release_is_idempotent_and_two_leases_hold_independently() -> None:
    store = make_store(10)
    (part,) = make_parts(make_chain(16))
    put_all(store, [part])
    first = store.lease([part.meta.ref], 0.0, 1000, fingerprint=FINGERPRINT)
    second = store.lease([part.meta.ref], 0.0, 1000, fingerprint=FINGERPRINT)
    assert second.generation > first.generation
    assert store.release(first.lease_id)
    assert not store.release(first.lease_id)
    with pytest.raises(CapacityError):
        put_all(store, make_parts(make_chain(16, seed=1)))
    store.release(second.lease_id)
    put_all(store, make_parts(make_chain(16, seed=1)))


def test_renewal_moves_the_end_and_checks_the_generation() -> None:
    store = make_store()
    (part,) = make_parts(make_chain(16))
    put_all(store, [part])
    info = store.lease([part.meta.ref], 0.0, 1000, fingerprint=FINGERPRINT)
    assert store.renew(info.lease_id, 0.5, 1000, generation=info.generation).expires_at == 1.5
    assert store.renew(info.lease_id, 0.5, 0).expires_at == 1.5, "a renewal never shortens"
    with pytest.raises(LeaseError):
        store.renew(info.lease_id, 0.5, 1000, generation=info.generation + 1)
    assert store.next_expiry() == 1.5
    assert store.expire(1.4) == 0
    assert store.lease_info(info.lease_id, 1.4).refs == info.refs
    assert store.expire(1.5) == 1
    with pytest.raises(LeaseError):
        store.renew(info.lease_id, 1.5, 1000)
    assert store.next_expiry() is None


def test_a_lease_covers_only_its_own_parts() -> None:
    store = make_store()
    parts = make_parts(make_chain(32))
    put_all(store, parts)
    info = store.lease([parts[0].meta.ref], 0.0, 1000, fingerprint=FINGERPRINT)
    with pytest.raises(LeaseError) as caught:
        store.leased_parts(info.lease_id, refs_of(parts), 0.0)
    assert caught.value.code is FailureCode.FAILED_PRECONDITION
    with pytest.raises(LeaseError):
        store.leased_parts(LeaseId(bytes(16)), refs_of(parts), 0.0)
    with pytest.raises(LeaseError):
        store.lease([PartRef(block_hash=bytes(32), kind=PartKind.FULL)], 0.0, 1000, fingerprint=FINGERPRINT)


def test_leases_are_bounded_and_their_bookkeeping_does_not_grow() -> None:
    store = make_store()
    (part,) = make_parts(make_chain(16))
    put_all(store, [part])
    ids = [store.lease([part.meta.ref], 0.0, 1000, fingerprint=FINGERPRINT).lease_id for _ in range(LEASES_MAX)]
    with pytest.raises(CapacityError):
        store.lease([part.meta.ref], 0.5, 1000, fingerprint=FINGERPRINT)
    for lease_id in ids:
        store.release(lease_id)
    assert store.next_expiry() is None
    assert store.stats().bytes_locked == 0


def test_one_node_has_a_share_of_the_leases() -> None:
    store = make_store()
    (part,) = make_parts(make_chain(16))
    put_all(store, [part])

    def lease(owner: str, lease_ms: int = 1000) -> LeaseId:
        return store.lease([part.meta.ref], 0.0, lease_ms, fingerprint=FINGERPRINT, owner=owner).lease_id

    ids = [lease("greedy") for _ in range(LEASES_PER_OWNER_MAX)]
    with pytest.raises(CapacityError):
        lease("greedy")
    store.release(lease("other"))
    assert lease("") is not None
    store.release(ids.pop())
    ids.append(lease("greedy", 500))
    assert store.renew(ids[-1], 0.0, 2000).owner == "greedy"
    store.expire(1.0)
    assert store.stats().leases == 1
    assert lease("greedy") is not None
    store.clear()
    assert store._leases._owners == {}


def full_of_leases(owner: str = "greedy") -> tuple[BlockStore, list[Part], LeaseId]:
    """A store of 100 bytes, all of them leased to one node."""
    store = make_store(100)
    parts = make_parts(make_chain(160))
    put_all(store, parts)
    return store, parts, store.lease(refs_of(parts), 0.0, 1000, fingerprint=FINGERPRINT, owner=owner).lease_id


def put_new(store: BlockStore, publisher: str, seed: int = 1) -> None:
    (part,) = make_parts(make_chain(16, seed=seed))
    store.put(part, fingerprint=FINGERPRINT, now=0.0, publisher=publisher)


def test_leases_beyond_a_share_yield_to_others_who_need_the_room() -> None:
    for publisher in ("other", ""):
        store, _, lease_id = full_of_leases()
        assert store.take_yielded() == frozenset()
        put_new(store, publisher)
        assert store.any_yielded
        assert store.take_yielded() == {lease_id}
        assert not store.any_yielded
        assert store.stats().leases == store.stats().bytes_locked == 0
        with pytest.raises(LeaseError):
            store.lease_info(lease_id, 0.0)


def test_leases_do_not_yield_to_their_own_node_and_those_of_this_node_to_nobody() -> None:
    for owner, publisher in (("greedy", "greedy"), ("", "other")):
        store, parts, _ = full_of_leases(owner)
        with pytest.raises(CapacityError):
            put_new(store, publisher)
        assert all(held_of(store, parts))


def test_leases_within_a_share_and_of_what_is_not_needed_stay() -> None:
    store, parts, greedy_id = full_of_leases()
    modest_id = store.lease(refs_of(parts[:2]), 0.0, 1000, fingerprint=FINGERPRINT, owner="modest").lease_id
    newer_id = store.lease(refs_of(parts[2:5]), 0.0, 1000, fingerprint=FINGERPRINT, owner="greedy").lease_id
    put_new(store, "other")
    assert store.take_yielded() == {greedy_id}, "the oldest one was enough"
    for seed in range(2, 20):
        put_new(store, "other", seed)
    assert store.take_yielded() == frozenset(), "what nobody leases goes first"
    assert held_of(store, parts[:5]) == [True] * 5
    store.reserve(b"r", 80, 0.0, node="other")
    assert store.take_yielded() == {newer_id}
    with pytest.raises(CapacityError):
        store.reserve(b"s", 1, 0.0)
    assert store.lease_info(modest_id, 0.0).owner == "modest"


def test_room_can_be_had_for_an_offer_before_anything_is_evicted() -> None:
    store, parts, lease_id = full_of_leases()
    store.let_yield(100, 0.0, node="greedy")
    assert store.room_bytes(FINGERPRINT) == 0
    store.let_yield(10, 0.0, node="other")
    assert store.room_bytes(FINGERPRINT) == 100
    assert store.take_yielded() == {lease_id}
    assert all(held_of(store, parts))


def test_a_smaller_size_ends_leases_beyond_a_share() -> None:
    store, parts, _ = full_of_leases()
    store.lease(refs_of(parts[:1]), 0.0, 1000, fingerprint=FINGERPRINT, owner="modest")
    assert store.resize(40, 0.0)
    assert (store.stats().bytes_used, store.stats().leases) == (40, 1)
    assert store.has(parts[0].meta.ref, fingerprint=FINGERPRINT)


def test_of_a_quota_a_node_holds_a_share_fast_too() -> None:
    store = BlockStore(1000, random_bytes=CountingBytes(), quota_bytes={FINGERPRINT: 40}.get)
    parts = make_parts(make_chain(64))
    elsewhere = make_parts(make_chain(16, seed=9))
    put_all(store, parts)
    put_all(store, elsewhere, fingerprint=b"o" * 32)
    there = store.lease(refs_of(elsewhere), 0.0, 1000, fingerprint=b"o" * 32, owner="greedy").lease_id
    here = store.lease(refs_of(parts), 0.0, 1000, fingerprint=FINGERPRINT, owner="greedy").lease_id
    with pytest.raises(CapacityError):
        put_new(store, "greedy")
    put_new(store, "other")
    assert store.take_yielded() == {here}
    assert store.lease_info(there, 0.0).owner == "greedy"


# --- reservations, size, pins, quotas -------------------------------------------------------------------------------


def test_reserved_room_is_for_its_owner_only() -> None:
    store = make_store(30)
    parts = make_parts(make_chain(48))
    put_all(store, make_parts(make_chain(48, seed=1)))
    store.reserve(b"r", 20, 0.0)
    assert store.stats().bytes_used == 10
    put_all(store, parts[:1])
    assert store.stats().bytes_used == 10
    store.put(parts[1], fingerprint=FINGERPRINT, now=0.0, reservation_id=b"r")
    assert (store.stats().bytes_used, store.stats().bytes_reserved) == (20, 10)
    with pytest.raises(CapacityError):
        store.put(parts[2], fingerprint=FINGERPRINT, now=0.0)
    store.put(parts[2], fingerprint=FINGERPRINT, now=0.0, reservation_id=b"r")
    assert (store.stats().bytes_used, store.stats().bytes_reserved) == (30, 0)
    store.release_reservation(b"r")
    store.release_reservation(b"r")
    assert store.stats().bytes_reserved == 0


def test_reservations_have_bounds_and_own_ids() -> None:
    store = make_store(30)
    store.reserve(b"r", 20, 0.0)
    for reservation_id, size in ((b"r", 1), (b"s", 0)):
        with pytest.raises(InvalidInput):
            store.reserve(reservation_id, size, 0.0)
    with pytest.raises(CapacityError):
        store.reserve(b"s", 11, 0.0)
    assert store.room_bytes(FINGERPRINT) == 10


def test_resize_evicts_but_not_what_is_held_fast() -> None:
    store = make_store(100)
    parts = make_parts(make_chain(64))
    put_all(store, parts)
    info = store.lease(refs_of(parts[:2]), 0.0, 1000, fingerprint=FINGERPRINT)
    store.reserve(b"r", 5, 0.0)
    assert not store.resize(10, 0.0)
    assert store.max_bytes == 25
    assert held_of(store, parts) == [True, True, False, False]
    store.release(info.lease_id)
    store.release_reservation(b"r")
    assert store.resize(10, 0.0)
    assert held_of(store, parts) == [True, False, False, False]
    assert store.resize(1000, 0.0)
    with pytest.raises(InvalidInput):
        store.resize(0, 0.0)
    with pytest.raises(InvalidInput):
        make_store(0)


def test_pins_hold_until_unpinned() -> None:
    store = make_store(10)
    (part,) = make_parts(make_chain(16))
    assert not store.pin(part.meta.ref, fingerprint=FINGERPRINT)
    put_all(store, [part])
    assert store.pin(part.meta.ref, fingerprint=FINGERPRINT)
    assert store.pin(part.meta.ref, fingerprint=FINGERPRINT)
    with pytest.raises(CapacityError):
        put_all(store, make_parts(make_chain(16, seed=1)))
    store.unpin(part.meta.ref, fingerprint=FINGERPRINT)
    store.unpin(part.meta.ref, fingerprint=FINGERPRINT)
    put_all(store, make_parts(make_chain(16, seed=1)))
    assert not store.has(part.meta.ref, fingerprint=FINGERPRINT)


def test_a_quota_evicts_within_its_namespace_only() -> None:
    store = BlockStore(100, random_bytes=CountingBytes(), quota_bytes={FINGERPRINT: 20}.get)
    other = make_parts(make_chain(16, seed=9))
    put_all(store, other, fingerprint=b"o" * 32)
    old, new = make_parts(make_chain(32, seed=1)), make_parts(make_chain(16, seed=2))
    put_all(store, [*old, *new])
    assert held_of(store, [*old, *new]) == [True, False, True]
    assert held_of(store, other, b"o" * 32) == [True]
    assert store.room_bytes(FINGERPRINT) == 20
    store.lease(refs_of([old[0], *new]), 0.0, 1000, fingerprint=FINGERPRINT)
    with pytest.raises(CapacityError):
        put_all(store, make_parts(make_chain(16, seed=3)))


def test_what_is_larger_than_the_quota_evicts_nothing() -> None:
    store = BlockStore(100, random_bytes=CountingBytes(), quota_bytes={FINGERPRINT: 20}.get)
    parts = make_parts(make_chain(32))
    put_all(store, parts)
    with pytest.raises(CapacityError):
        put_all(store, make_parts(make_chain(16, seed=3), length_bytes=21))
    assert held_of(store, parts) == [True, True]


def test_namespaces_are_bounded_and_empty_ones_are_forgotten() -> None:
    store = make_store(10 * NAMESPACES_MAX)
    for number in range(NAMESPACES_MAX):
        put_all(store, make_parts(make_chain(16, seed=number)), fingerprint=number.to_bytes(32, "big"))
    extra = make_parts(make_chain(16, seed=5000))
    with pytest.raises(CapacityError):
        put_all(store, extra, fingerprint=b"x" * 32)
    assert store.room_bytes(b"x" * 32) == 0
    store.invalidate(make_parts(make_chain(16, seed=0))[0].meta.ref, fingerprint=bytes(32))
    put_all(store, extra, fingerprint=b"x" * 32)


def test_one_node_brings_in_a_share_of_the_namespaces() -> None:
    store = make_store(10 * NAMESPACES_MAX)
    (part,) = make_parts(make_chain(16))

    def put(number: int, publisher: str) -> PutOutcome:
        return store.put(part, fingerprint=number.to_bytes(32, "big"), now=0.0, publisher=publisher)

    for number in range(NAMESPACES_PER_PUBLISHER_MAX):
        put(number, "greedy")
    next_one = NAMESPACES_PER_PUBLISHER_MAX
    with pytest.raises(CapacityError):
        put(next_one, "greedy")
    assert store.room_bytes(next_one.to_bytes(32, "big"), publisher="greedy") == 0
    assert store.room_bytes(next_one.to_bytes(32, "big"), publisher="other") > 0
    assert put(0, "greedy") is PutOutcome.ALREADY_HELD
    assert put(next_one, "other") is PutOutcome.STORED
    store.invalidate(part.meta.ref, fingerprint=bytes(32))
    assert put(next_one + 1, "greedy") is PutOutcome.STORED


# --- namespaces ------------------------------------------------------------------------------------------------------

OTHER = b"o" * 32


def test_equal_hashes_in_two_namespaces_are_two_blocks() -> None:
    store = make_store()
    parts = make_parts(make_chain(40), kinds=(PartKind.FULL, PartKind.WINDOW))
    garbage = [
        Part(msgspec.structs.replace(part.meta, digest=bytes(32), token_count=part.meta.token_count - 1), part.payload)
        for part in parts[:2]
    ]
    put_all(store, garbage, fingerprint=OTHER)
    assert not any(held_of(store, parts))
    assert not any(store.contradicts(part.meta, fingerprint=FINGERPRINT) for part in parts)
    put_all(store, parts)
    assert [store.get(ref, fingerprint=FINGERPRINT) for ref in refs_of(parts)] == list(parts)
    assert [store.get(ref, fingerprint=OTHER) for ref in refs_of(garbage)] == garbage
    assert store.usage_by_fingerprint() == {OTHER: 20, FINGERPRINT: 60}
    assert store.stats().block_count == 4
    with pytest.raises(LeaseError):
        store.lease(refs_of(parts[2:]), 0.0, 1000, fingerprint=OTHER)
    assert not store.pin(parts[2].meta.ref, fingerprint=OTHER)
    assert not store.invalidate(parts[2].meta.ref, fingerprint=OTHER)
    lease = store.lease(refs_of(garbage), 0.0, 1000, fingerprint=OTHER)
    assert (lease.fingerprint, store.stats().bytes_locked) == (OTHER, 20)
    assert store.leased_parts(lease.lease_id, refs_of(garbage), 0.0) == tuple(garbage)
    store.invalidate(parts[0].meta.ref, fingerprint=FINGERPRINT)
    assert held_of(store, garbage, OTHER) == [True, True]


def test_what_is_used_elsewhere_is_not_refreshed_here() -> None:
    store = make_store(20)
    (part,), (other,) = make_parts(make_chain(16)), make_parts(make_chain(16, seed=1))
    put_all(store, [part], fingerprint=OTHER)
    put_all(store, [other], fingerprint=OTHER)
    store.touch([part.meta.ref], 0.0, fingerprint=FINGERPRINT)
    put_all(store, [part])
    assert held_of(store, [part, other], OTHER) == [False, True], "what goes first is compared over all namespaces"


# --- tails, events, invalidation ---------------------------------------------------------------------------------


def put_tails(store: BlockStore, count: int) -> list[Part]:
    """``count`` chains that share two full blocks and differ in their tail; the shared blocks are put first."""
    tails: list[Part] = []
    for seed in range(count):
        parts = make_parts(make_chain(40, seed=seed, shared_tokens=32))
        put_all(store, parts)
        tails.append(parts[-1])
    return tails


def test_tails_are_found_under_their_parent_newest_first() -> None:
    store = make_store()
    tails = put_tails(store, 3)
    found = store.tails(tails[0].meta.parent_hash, fingerprint=FINGERPRINT, block_tokens=16)
    assert [tail.block_hash for tail in found] == [tail.meta.block_hash for tail in reversed(tails)]
    assert {(tail.token_count, tail.kinds) for tail in found} == {(8, 1)}
    assert store.tails(ROOT_HASH, fingerprint=FINGERPRINT, block_tokens=16) == ()
    assert store.tails(ROOT_HASH, fingerprint=bytes(32), block_tokens=16) == ()


def test_one_tail_too_many_drops_the_oldest_that_is_not_leased() -> None:
    store = make_store()
    tails = put_tails(store, limits.TAILS_PER_PARENT_MAX)
    store.lease([tails[0].meta.ref], 0.0, 1000, fingerprint=FINGERPRINT)
    tails += put_tails(store, limits.TAILS_PER_PARENT_MAX + 1)[-1:]
    assert held_of(store, tails) == [True, False] + [True] * (limits.TAILS_PER_PARENT_MAX - 1)
    found = store.tails(tails[0].meta.parent_hash, fingerprint=FINGERPRINT, block_tokens=16)
    assert len(found) == limits.TAILS_PER_PARENT_MAX


def test_short_first_blocks_are_tails_before_and_after_a_full_block_is_seen() -> None:
    store = make_store()
    short = [make_parts(make_chain(tokens, seed=tokens))[0] for tokens in (5, 9, 7)]
    put_all(store, short)

    def found() -> list[int]:
        return [tail.token_count for tail in store.tails(ROOT_HASH, fingerprint=FINGERPRINT, block_tokens=16)]

    assert found() == [7, 9, 5]
    put_all(store, make_parts(make_chain(16, seed=77)))
    assert sorted(found()) == [5, 7, 9]
    store.invalidate(short[1].meta.ref, fingerprint=FINGERPRINT)
    assert sorted(found()) == [5, 7]


def test_epoch_and_events_follow_every_change() -> None:
    store = make_store(20)
    parts = make_parts(make_chain(32))
    assert store.epoch == 1
    put_all(store, [*parts, parts[0]])
    assert store.epoch == 3
    put_all(store, make_parts(make_chain(16, seed=1)))
    assert store.epoch == 5
    events = store.events_since(0)
    assert events is not None
    assert [(event.sequence, event.change) for event in events] == [
        (1, "stored"),
        (2, "stored"),
        (3, "evicted"),
        (4, "stored"),
    ]
    assert events[2].ref == parts[1].meta.ref
    assert store.events_since(4) == ()
    assert store.events_since(3) == events[3:]


def test_a_reader_that_fell_too_far_behind_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kakeya_zmq.store.EVENTS_MAX", 2)
    store = make_store()
    put_all(store, make_parts(make_chain(48)))
    assert store.events_since(0) is None
    assert len(store.events_since(1) or ()) == 2


def test_invalidation_takes_a_part_out_of_leases_and_pins() -> None:
    store = make_store(20)
    parts = make_parts(make_chain(32))
    put_all(store, parts)
    info = store.lease(refs_of(parts), 0.0, 1000, fingerprint=FINGERPRINT)
    store.pin(parts[1].meta.ref, fingerprint=FINGERPRINT)
    assert store.invalidate(parts[1].meta.ref, fingerprint=FINGERPRINT)
    assert not store.invalidate(parts[1].meta.ref, fingerprint=FINGERPRINT)
    put_all(store, parts[1:])
    with pytest.raises(LeaseError):
        store.leased_parts(info.lease_id, refs_of(parts), 0.0)
    store.release(info.lease_id)
    assert store.stats().bytes_locked == 0
    put_all(store, make_parts(make_chain(16, seed=1)))
    assert held_of(store, parts) == [True, False]


def test_a_lease_outlives_the_blocks_that_were_invalidated_in_it() -> None:
    store = make_store()
    parts = make_parts(make_chain(32))
    put_all(store, parts)
    info = store.lease(refs_of(parts), 0.0, 1000, fingerprint=FINGERPRINT)
    for part in parts:
        store.invalidate(part.meta.ref, fingerprint=FINGERPRINT)
    assert store.stats().block_count == 0
    assert store.release(info.lease_id)


def test_clear_leaves_only_reservations() -> None:
    store = make_store()
    parts = make_parts(make_chain(40))
    put_all(store, parts)
    store.lease(refs_of(parts), 0.0, 1000, fingerprint=FINGERPRINT)
    store.pin(parts[0].meta.ref, fingerprint=FINGERPRINT)
    store.reserve(b"r", 100, 0.0)
    store.clear()
    stats = store.stats()
    assert (stats.bytes_used, stats.entry_count, stats.leases, stats.bytes_locked, stats.bytes_reserved) == (0, 0, 0, 0, 100)
    put_all(store, parts)
    assert all(held_of(store, parts))


def test_a_survey_tells_presence_and_mean_sizes() -> None:
    store = make_store()
    chain: Chain = make_chain(48)
    put_all(store, [make_parts(chain, length_bytes=10)[0], make_parts(chain, length_bytes=20)[2]])
    put_all(store, make_parts(chain, length_bytes=7, kinds=(PartKind.STATE,))[1:2])
    survey = store.survey([block.block_hash for block in chain.blocks], fingerprint=FINGERPRINT)
    assert survey.present == ((True, False, True), (False, False, False), (False, True, False))
    assert survey.mean_bytes == (15, 0, 7)
    store.note_lookup(hit=True)
    store.note_lookup(hit=False)
    assert (store.stats().lookup_hits, store.stats().lookup_misses) == (1, 1)


# --- cuts --------------------------------------------------------------------------------------------------------------


def cut_of(tail: Part, block: Part, kinds: int = 1) -> Cut:
    return Cut(
        parent_hash=tail.meta.parent_hash,
        block_hash=tail.meta.block_hash,
        token_count=tail.meta.token_count,
        within=block.meta.block_hash,
        within_tokens=block.meta.token_count,
        kinds=kinds,
    )


def grown() -> tuple[BlockStore, list[Part], Part, Part]:
    """A store that holds two blocks, the tail after the first one that the second one contains, and a longer such tail."""
    store = BlockStore(1000, random_bytes=CountingBytes())
    blocks = list(make_parts(make_chain(32, seed=3)))
    short, longer = make_parts(make_chain(20, seed=3))[1], make_parts(make_chain(27, seed=3))[1]
    for part in (*blocks, short, longer):
        store.put(part, fingerprint=FINGERPRINT, now=0.0)
    return store, blocks, short, longer


def test_a_cut_drops_the_tail_and_is_found_in_its_place() -> None:
    store, blocks, short, longer = grown()
    used = store.stats().bytes_used
    cut = cut_of(short, blocks[1])
    assert store.cut(cut, fingerprint=FINGERPRINT)
    assert not store.has(short.meta.ref, fingerprint=FINGERPRINT)
    assert store.stats().bytes_used == used - short.meta.length_bytes
    assert store.cuts(blocks[0].meta.block_hash, fingerprint=FINGERPRINT) == (cut,)
    assert store.cuts_within(blocks[1].meta.block_hash, fingerprint=FINGERPRINT) == (cut,)
    assert store.put(short, fingerprint=FINGERPRINT, now=0.0) is PutOutcome.ALREADY_HELD, "not stored a second time"
    requirement = Requirement(block_tokens=16, full=True)
    found = store.find([blocks[0].meta.block_hash], fingerprint=FINGERPRINT, requirement=requirement)
    assert found.cuts == (cut,)
    assert blocks[1].meta.ref in {held.ref for held in found.parts}, "a lease covers what is promised"
    both = store.find([part.meta.block_hash for part in blocks], fingerprint=FINGERPRINT, requirement=requirement)
    assert both.cuts == (), "who asks for the block has no use for its beginning"
    assert [tail.block_hash for tail in both.tails] == [longer.meta.block_hash]


def test_a_tail_that_contains_cuts_hands_them_on_and_they_go_with_their_block() -> None:
    store, blocks, short, longer = grown()
    assert store.cut(cut_of(short, longer), fingerprint=FINGERPRINT)
    assert store.cut(cut_of(longer, blocks[1]), fingerprint=FINGERPRINT)
    names = {cut.block_hash: cut.within for cut in store.cuts(blocks[0].meta.block_hash, fingerprint=FINGERPRINT)}
    assert names == {short.meta.block_hash: blocks[1].meta.block_hash, longer.meta.block_hash: blocks[1].meta.block_hash}
    store.invalidate(blocks[1].meta.ref, fingerprint=FINGERPRINT)
    assert store.cuts(blocks[0].meta.block_hash, fingerprint=FINGERPRINT) == ()
    assert store.put(short, fingerprint=FINGERPRINT, now=0.0) is PutOutcome.STORED
    store.clear()
    assert store.cuts(blocks[0].meta.block_hash, fingerprint=FINGERPRINT) == ()


def test_a_tail_that_is_needed_as_it_is_is_not_cut() -> None:
    store, blocks, short, longer = grown()
    good = cut_of(short, blocks[1])
    lease = store.lease([short.meta.ref], 0.0, 1000, fingerprint=FINGERPRINT)
    assert not store.cut(good, fingerprint=FINGERPRINT), "somebody may be fetching it"
    store.release(lease.lease_id)
    for name, value in (
        ("within", bytes(31) + b"x"),
        ("parent_hash", bytes(32)),
        ("within_tokens", 15),
        ("token_count", 16),
    ):
        assert not store.cut(msgspec.structs.replace(good, **{name: value}), fingerprint=FINGERPRINT), name
    assert not store.cut(good, fingerprint=bytes(32))
    state = make_parts(make_chain(20, seed=3), kinds=(PartKind.STATE,))[1]
    store.put(state, fingerprint=FINGERPRINT, now=0.0)
    assert not store.cut(good, fingerprint=FINGERPRINT), "state cannot be had from a later position"
    window = make_parts(make_chain(27, seed=3), kinds=(PartKind.WINDOW,))[1]
    store.put(window, fingerprint=FINGERPRINT, now=0.0)
    assert not store.cut(cut_of(longer, blocks[1]), fingerprint=FINGERPRINT), "the block lacks the tail's window rows"
    assert store.has(short.meta.ref, fingerprint=FINGERPRINT)
    assert store.has(longer.meta.ref, fingerprint=FINGERPRINT)
