"""What a store of many small parts costs, and how much a single call may do: members choose what they publish."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kakeya_zmq.blocks import ROOT_HASH, Part
from kakeya_zmq.store import BlockStore
from tests.chains import FINGERPRINT, CountingBytes, make_chain, make_parts
from wire.errors import CapacityError, InvalidInput
from wire.messages import Cut, PartRef

SMALL = 12
"""Stands in for PARTS_MAX_LEAST."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kakeya_zmq.store_room.PARTS_MAX_LEAST", SMALL)


def make_store(max_bytes: int = 1000, quota_bytes: int | None = None) -> BlockStore:
    return BlockStore(max_bytes, random_bytes=CountingBytes(), quota_bytes=lambda fingerprint: quota_bytes)


def tiny(count: int, seed: int = 0) -> list[Part]:
    """Parts of one byte, of as many prompts."""
    return [make_parts(make_chain(16, seed=seed + number), length_bytes=1)[0] for number in range(count)]


def put(store: BlockStore, parts: Sequence[Part], publisher: str = "") -> None:
    for part in parts:
        store.put(part, fingerprint=FINGERPRINT, now=0.0, publisher=publisher)


def refs_of(parts: Sequence[Part]) -> list[PartRef]:
    return [part.meta.ref for part in parts]


# --- how many ---------------------------------------------------------------------------------------------------------


def test_there_are_places_for_so_many_parts_and_the_oldest_goes() -> None:
    store = make_store()
    parts = tiny(SMALL + 3)
    put(store, parts)
    assert store.stats().entry_count == SMALL
    assert [store.has(ref, fingerprint=FINGERPRINT) for ref in refs_of(parts)] == [False] * 3 + [True] * SMALL


def test_of_a_quota_there_are_so_many_too() -> None:
    store = make_store(1 << 20, quota_bytes=900)
    put(store, tiny(SMALL + 3))
    assert store.stats().block_count == SMALL
    assert store.stats().bytes_used == SMALL


def test_a_large_store_has_more_places() -> None:
    store = make_store(4096 * (SMALL + 2))
    put(store, tiny(SMALL + 5))
    assert store.stats().entry_count == SMALL + 2


def test_small_parts_that_are_leased_yield_as_large_ones_do() -> None:
    store = make_store()
    parts = tiny(SMALL)
    put(store, parts)
    share = store.lease(refs_of(parts[:3]), 0.0, 1000, fingerprint=FINGERPRINT, owner="modest").lease_id
    greedy = store.lease(refs_of(parts), 0.0, 1000, fingerprint=FINGERPRINT, owner="greedy").lease_id
    with pytest.raises(CapacityError):
        put(store, tiny(1, seed=100), "greedy")
    put(store, tiny(1, seed=100), "other")
    assert store.take_yielded() == {greedy}
    assert store.lease_info(share, 0.0).owner == "modest"


def test_the_parts_in_all_leases_of_a_node_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kakeya_zmq.store_leases.LEASED_PARTS_PER_OWNER_MAX", 5)
    store = make_store()
    parts = tiny(4)
    put(store, parts)
    first = store.lease(refs_of(parts), 0.0, 1000, fingerprint=FINGERPRINT, owner="greedy").lease_id
    for owner in ("other", ""):
        store.lease(refs_of(parts), 0.0, 1000, fingerprint=FINGERPRINT, owner=owner)
    with pytest.raises(CapacityError):
        store.lease(refs_of(parts[:2]), 0.0, 1000, fingerprint=FINGERPRINT, owner="greedy")
    store.release(first)
    store.lease(refs_of(parts), 0.0, 1000, fingerprint=FINGERPRINT, owner="greedy")


# --- how much at once -------------------------------------------------------------------------------------------------


def test_room_among_many_small_parts_is_made_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kakeya_zmq.store_room.EVICTIONS_AT_ONCE", 4)
    (large,) = make_parts(make_chain(16, seed=500), length_bytes=SMALL)
    for store in (make_store(SMALL), make_store(1 << 20, quota_bytes=SMALL)):
        put(store, tiny(SMALL))
        for left in (SMALL - 4, SMALL - 8):
            with pytest.raises(CapacityError, match="still being made"):
                put(store, [large])
            assert store.stats().bytes_used == left, "what has gone has gone"
        put(store, [large])
        assert store.stats().bytes_used == SMALL


def test_room_for_a_job_is_made_in_steps_too_and_in_larger_ones_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kakeya_zmq.store_room.EVICTIONS_AT_ONCE", 4)
    store = make_store(SMALL)
    put(store, tiny(SMALL))
    with pytest.raises(CapacityError, match="still being made"):
        store.reserve(b"job", SMALL, 0.0)
    monkeypatch.setattr("kakeya_zmq.store_room.BYTES_PER_EVICTION", 2)
    store.reserve(b"job", SMALL, 0.0)
    assert store.stats().bytes_used == 0


def test_where_only_interiors_may_go_a_bounded_number_of_blocks_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kakeya_zmq.store_room.SCANNED_BLOCKS_MAX", 2)
    store = make_store(60)
    chain = make_parts(make_chain(96))
    put(store, chain)
    store.lease(refs_of(chain[-1:]), 0.0, 1000, fingerprint=FINGERPRINT)
    new = make_parts(make_chain(48, seed=1))
    put(store, new[:2])
    assert [store.has(ref, fingerprint=FINGERPRINT) for ref in refs_of(chain)] == [False] * 2 + [True] * 4


def test_emptying_a_large_store_tells_readers_to_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kakeya_zmq.store_room.EVENTS_MAX", 2)
    store = make_store()
    parts = tiny(3)
    put(store, parts)
    store.lease(refs_of(parts), 0.0, 1000, fingerprint=FINGERPRINT, owner="other")
    before, epoch = store.event_sequence, store.epoch
    assert store.clear() == 3
    assert (store.event_sequence, store.epoch) == (before + 3, epoch + 3)
    assert store.events_since(before) is None
    assert store.events_since(store.event_sequence) == ()
    stats = store.stats()
    assert (stats.bytes_used, stats.entry_count, stats.bytes_locked, stats.leases) == (0, 0, 0, 0)
    put(store, parts)
    assert store.stats().entry_count == 3


# --- tails and cuts ---------------------------------------------------------------------------------------------------


def test_blocks_that_grow_and_grow_are_not_believed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kakeya_zmq.store_blocks.SCANS_PER_BLOCK", 1)
    monkeypatch.setattr("kakeya_zmq.store_room.PARTS_MAX_LEAST", 1000)
    store = make_store(1 << 20)
    put(store, tiny(20))
    refused = 0
    for tokens in range(17, 37):
        (part,) = make_parts(make_chain(tokens, block_tokens=tokens, seed=tokens))
        try:
            put(store, [part])
        except InvalidInput:
            refused += 1
    assert 10 < refused < 20, "each would have all blocks looked at"
    put(store, make_parts(make_chain(16, seed=999)))


def test_cuts_under_one_parent_are_bounded_and_found_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of a tail is what a look at every cut under its parent says, whatever was forgotten since."""
    monkeypatch.setattr("kakeya_zmq.store_index.CUT_BLOCKS_PER_PARENT_MAX", 3)
    monkeypatch.setattr("kakeya_zmq.store_room.PARTS_MAX_LEAST", 1000)
    store, chance = make_store(1 << 20), random.Random(1)
    blocks = [make_parts(make_chain(16, seed=seed))[0] for seed in range(8)]
    tails = [make_parts(make_chain(tokens, seed=100 + tokens))[0] for tokens in range(1, 15)]
    put(store, blocks)
    known = 0
    for _ in range(400):
        block, tail = chance.choice(blocks), chance.choice(tails)
        if chance.random() < 0.1:
            store.invalidate(block.meta.ref, fingerprint=FINGERPRINT)
        elif chance.random() < 0.3:
            put(store, [block])
        else:
            meta = tail.meta
            cut = Cut(
                parent_hash=ROOT_HASH,
                block_hash=meta.block_hash,
                token_count=meta.token_count,
                within=block.meta.block_hash,
                within_tokens=16,
                kinds=1,
            )
            store.cut(cut, fingerprint=FINGERPRINT)
        cuts = store.cuts(ROOT_HASH, fingerprint=FINGERPRINT)
        assert len({cut.within for cut in cuts}) <= 3
        named = {(cut.block_hash, cut.token_count) for cut in cuts}
        found = [store.is_cut(each.meta, fingerprint=FINGERPRINT) for each in tails]
        assert found == [(each.meta.block_hash, each.meta.token_count) in named for each in tails]
        known += sum(found)
    assert known > 100
    for block in blocks:
        store.invalidate(block.meta.ref, fingerprint=FINGERPRINT)
    assert store._tree.namespaces == {}
