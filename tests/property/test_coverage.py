"""best_boundary against its definition: the largest block end whose needed_parts are all there."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya_zmq.blocks import checkpoint_parts, needed_parts
from kakeya_zmq.coverage import best_boundary, describe_gap, missing_parts, plan_sources
from tests.chains import make_chain
from wire.messages import PartKind, PartRef, Requirement

requirements = st.builds(
    Requirement,
    block_tokens=st.just(16),
    full=st.booleans(),
    window_tokens=st.integers(0, 80),
    sink_tokens=st.integers(0, 40),
    state=st.booleans(),
)


@given(tokens=st.integers(0, 170), requirement=requirements, every=st.integers(1, 6), after=st.integers(0, 10))
@settings(max_examples=200, deadline=None)
def test_checkpoint_parts_are_what_hits_on_the_way_need_beside_the_targets(
    tokens: int, requirement: Requirement, every: int, after: int
) -> None:
    chain = make_chain(tokens)
    base = min(16 * after, tokens)
    ends = [end for end in range(16 * every, tokens, 16 * every) if end > base]
    starts = {block.block_hash: block.start for block in chain.blocks}
    on_the_way = {
        ref
        for end in ends
        for ref in needed_parts(chain, end, requirement)
        if ref.kind is not PartKind.FULL and starts[ref.block_hash] >= base
    }
    parts = checkpoint_parts(chain, 16 * every, base, requirement)
    assert len(parts) == len(set(parts))
    # The sinks belong to every position, the last one's needs included.
    assert {ref for ref in on_the_way if starts[ref.block_hash] >= requirement.sink_tokens} <= set(parts) <= on_the_way
    assert checkpoint_parts(chain, 0, base, requirement) == ()


@given(tokens=st.integers(0, 170), requirement=requirements, data=st.data())
@settings(max_examples=300, deadline=None)
def test_it_is_the_largest_usable_block_end(tokens: int, requirement: Requirement, data: st.DataObject) -> None:
    chain = make_chain(tokens)
    every = [PartRef(block_hash=block.block_hash, kind=kind) for block in chain.blocks for kind in PartKind]
    missing = data.draw(st.sets(st.sampled_from(every), max_size=6)) if every else set()
    if data.draw(st.booleans()):
        missing = set(every) - missing
    held = set(every) - missing

    usable = [0, *(b.end for b in chain.blocks if held.issuperset(needed_parts(chain, b.end, requirement)))]
    best = best_boundary(chain, requirement, held.__contains__)
    assert best == max(usable)

    reason = describe_gap(chain, requirement, held.__contains__, best)
    assert (reason == "") == (best == chain.tokens)
    assert "\n" not in reason
    assert missing_parts(chain, best, requirement, held.__contains__) == ()

    halves = [("first", lambda ref: ref in held and ref.block_hash[0] % 2 == 0), ("all", held.__contains__)]
    plan = plan_sources(chain, requirement, halves, best)
    planned = [ref for refs in plan.values() for ref in refs]
    assert sorted(planned, key=repr) == sorted(needed_parts(chain, best, requirement), key=repr)
