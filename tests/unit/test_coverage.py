"""Coverage: the cases a person would name; the comparison with the definition is in tests/property/test_coverage.py."""

from __future__ import annotations

from kakeya_zmq.blocks import needed_parts
from kakeya_zmq.coverage import best_boundary, describe_gap, in_any, missing_parts, plan_sources
from tests.chains import make_chain
from wire.messages import PartKind, PartRef, Requirement

CHAIN = make_chain(72)  # four blocks of 16 and a tail of 8
FULL = Requirement(block_tokens=16, full=True)
WINDOWED = Requirement(block_tokens=16, full=True, window_tokens=20)
STATEFUL = Requirement(block_tokens=16, full=True, state=True)


def _refs(kind: PartKind, *indices: int) -> set[PartRef]:
    return {PartRef(block_hash=CHAIN.blocks[index].block_hash, kind=kind) for index in indices}


def test_a_full_prefix_reaches_to_its_first_hole() -> None:
    held = _refs(PartKind.FULL, 0, 1, 3, 4)
    assert best_boundary(CHAIN, FULL, held.__contains__) == 32
    assert describe_gap(CHAIN, FULL, held.__contains__, 32) == "diverged or never stored at token 32"


def test_the_tail_counts() -> None:
    held = _refs(PartKind.FULL, 0, 1, 2, 3, 4)
    assert best_boundary(CHAIN, FULL, held.__contains__) == 72
    assert describe_gap(CHAIN, FULL, held.__contains__, 72) == ""


def test_evicted_interior_windows_do_not_hurt_a_longer_hit() -> None:
    held = _refs(PartKind.FULL, 0, 1, 2, 3) | _refs(PartKind.WINDOW, 2, 3)
    assert best_boundary(CHAIN, WINDOWED, held.__contains__) == 64


def test_a_missing_window_is_named_with_its_tokens() -> None:
    held = _refs(PartKind.FULL, 0, 1, 2, 3, 4) | _refs(PartKind.WINDOW, 0, 1, 3)
    assert best_boundary(CHAIN, WINDOWED, held.__contains__) == 32
    assert describe_gap(CHAIN, WINDOWED, held.__contains__, 32) == "window part evicted at block 2 (tokens 32..48)"


def test_a_lost_sink_loses_every_later_boundary() -> None:
    sinks = Requirement(block_tokens=16, full=True, window_tokens=16, sink_tokens=4)
    held = _refs(PartKind.FULL, 0, 1, 2, 3, 4) | _refs(PartKind.WINDOW, 1, 2, 3, 4)
    assert best_boundary(CHAIN, sinks, held.__contains__) == 0
    assert describe_gap(CHAIN, sinks, held.__contains__, 0) == "window part evicted at block 0 (tokens 0..16)"


def test_a_state_model_stops_at_its_last_checkpoint() -> None:
    held = _refs(PartKind.FULL, 0, 1, 2, 3, 4) | _refs(PartKind.STATE, 1)
    assert best_boundary(CHAIN, STATEFUL, held.__contains__) == 32
    assert describe_gap(CHAIN, STATEFUL, held.__contains__, 32) == "no state checkpoint after token 32"


def test_a_model_without_full_attention_has_its_own_gaps() -> None:
    only_window = Requirement(block_tokens=16, full=False, window_tokens=16)
    held = _refs(PartKind.WINDOW, 0, 1)
    assert best_boundary(CHAIN, only_window, held.__contains__) == 32
    assert describe_gap(CHAIN, only_window, held.__contains__, 32) == "diverged or never stored at token 32"


def test_each_source_is_asked_at_most_once_a_part() -> None:
    asked: list[PartRef] = []

    def has(ref: PartRef) -> bool:
        asked.append(ref)
        return True

    everything = Requirement(block_tokens=16, full=True, window_tokens=40, sink_tokens=4, state=True)
    assert best_boundary(CHAIN, everything, has) == 72
    assert len(asked) == len(set(asked)) == 3 * len(CHAIN.blocks)


def test_parts_come_from_the_first_source_that_has_them() -> None:
    near, far = _refs(PartKind.FULL, 0, 2), _refs(PartKind.FULL, 0, 1)
    sources = [("near", near.__contains__), ("far", far.__contains__)]
    plan = plan_sources(CHAIN, FULL, sources, 48)
    refs = needed_parts(CHAIN, 48, FULL)
    assert plan == {"near": (refs[0], refs[2]), "far": (refs[1],)}
    assert best_boundary(CHAIN, FULL, in_any(sources)) == 48
    assert missing_parts(CHAIN, 64, FULL, in_any(sources)) == tuple(_refs(PartKind.FULL, 3))
