"""best_boundary against its definition: the largest block end whose needed_parts are all there."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya_zmq.blocks import needed_parts
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
