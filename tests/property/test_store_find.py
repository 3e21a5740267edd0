"""What a store finds of a prompt, against a plain reading of the rules; the product's way makes no value for each block."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kakeya_zmq.blocks import ROOT_HASH, Chain, Part
from kakeya_zmq.store import BlockStore
from tests.chains import FINGERPRINT, CountingBytes, make_chain, make_parts
from wire import limits
from wire.messages import PartKind, PartRef, Requirement

BLOCK = 16
CHAINS = [make_chain(tokens, seed=tokens, shared_tokens=48) for tokens in (50, 60, 80, 87, 100, 112)] + [
    make_chain(7, seed=1)
]
PARTS = tuple({p.meta.ref: p for c in CHAINS for p in make_parts(c, kinds=tuple(PartKind))}.values())


@given(
    held=st.lists(st.sampled_from(PARTS), max_size=60),
    asked=st.sampled_from(CHAINS),
    repeated=st.booleans(),
    full=st.booleans(),
)
def test_what_is_found_is_all_that_is_held_of_the_prompt(held: list[Part], asked: Chain, repeated: bool, full: bool) -> None:
    store = BlockStore(1 << 20, random_bytes=CountingBytes())
    # One full block first: before it the store cannot tell tails from full blocks.
    store.put(make_parts(make_chain(BLOCK, seed=77))[0], fingerprint=FINGERPRINT, now=0.0)
    for part in held:
        store.put(part, fingerprint=FINGERPRINT, now=0.0)
    hashes = [block.block_hash for block in asked.blocks]
    hashes += hashes[:1] if repeated else []
    requirement = Requirement(block_tokens=BLOCK, full=full, window_tokens=32)
    found = store.find(hashes, fingerprint=FINGERPRINT, requirement=requirement)
    assert found.survey == store.survey(hashes, fingerprint=FINGERPRINT)

    def has(block_hash: bytes, kind: PartKind) -> bool:
        return store.has(PartRef(block_hash=block_hash, kind=kind), fingerprint=FINGERPRINT)

    expected = {(h, kind) for h in hashes for kind in PartKind if has(h, kind)}
    tails = {
        part.meta.block_hash: part.meta.parent_hash
        for part in held
        if part.meta.token_count < BLOCK and part.meta.parent_hash in {ROOT_HASH, *hashes}
    }
    assert {tail.block_hash for tail in found.tails} == set(tails)
    assert len(tails) <= limits.TAILS_PER_PARENT_MAX
    expected |= {(h, kind) for h in tails for kind in PartKind if has(h, kind)}
    assert {(part.block.block_hash, part.kind) for part in found.parts} == expected
    if found.parts:
        info = store.lease_finding(found, 0.0, 1000)
        assert {(ref.block_hash, ref.kind) for ref in info.refs} == expected
        assert store.stats().bytes_locked == 10 * len(expected), "each part is locked once, however often it was asked for"
        store.release(info.lease_id)
    assert store.stats().bytes_locked == 0


def test_a_lookup_for_another_namespace_finds_no_tails() -> None:
    store = BlockStore(1 << 20, random_bytes=CountingBytes())
    for part in make_parts(CHAINS[0]):
        store.put(part, fingerprint=FINGERPRINT, now=0.0)
    requirement = Requirement(block_tokens=BLOCK, full=True)
    assert store.find([], fingerprint=bytes(32), requirement=requirement).tails == ()


def test_events_tell_sizes_and_why_a_part_went() -> None:
    store = BlockStore(20, random_bytes=CountingBytes())
    parts = make_parts(make_chain(32))
    for part in parts:
        store.put(part, fingerprint=FINGERPRINT, now=0.0)
    start = store.event_sequence
    store.put(make_parts(make_chain(BLOCK, seed=5))[0], fingerprint=FINGERPRINT, now=0.0)
    store.invalidate(parts[0].meta.ref, fingerprint=FINGERPRINT)
    events = store.events_since(start)
    assert events is not None
    assert [(event.change, event.size_bytes) for event in events] == [("evicted", 10), ("stored", 10), ("invalidated", 10)]
    assert (store.evictions().parts, store.evictions().size_bytes) == (1, 10), "what was dropped on demand is no eviction"
    assert store.events_since(store.event_sequence) == ()
