"""Costs, decisions and ranking of the planner."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya_zmq.planner import (
    EXPLORE_EVERY,
    MeasuredRates,
    PassedOver,
    Rate,
    compute_ms,
    import_ms,
    rank_replicas,
    sample_weight,
    worker_ms,
)
from wire.ids import NodeId

NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8, unique=True)


def test_first_sample_replaces_the_default_and_later_ones_move_it_by_a_quarter() -> None:
    rate = Rate(default=20.0)
    assert rate.value == 20.0
    rate.observe(100, 1000.0)
    assert rate.value == 100.0
    rate.observe(200, 1000.0)
    assert rate.value == 125.0


@pytest.mark.parametrize(
    ("amount", "elapsed_ms"), [(0, 10.0), (-1, 10.0), (10, 0.0), (10, -1.0), (10, math.inf), (10, math.nan)]
)
def test_samples_without_extent_are_ignored(amount: float, elapsed_ms: float) -> None:
    rate = Rate(default=20.0)
    rate.observe(amount, elapsed_ms)
    assert rate.measured is None


@pytest.mark.parametrize(("before", "after"), [(160.0, 2.0), (2.0, 160.0)])
def test_a_link_that_is_another_one_now_is_known_after_a_few_transfers_and_one_odd_sample_is_forgotten(
    before: float, after: float
) -> None:
    rates, node = MeasuredRates(), NodeId("a")

    def transfer(megabytes_per_second: float) -> float:
        rates.observe_link(node, 10_000_000, 10_000.0 / megabytes_per_second)
        known = rates.plain_link(node)
        assert known is not None
        return known

    for _ in range(20):
        transfer(before)
    for _ in range(4):
        known = transfer(after)
    assert known == pytest.approx(after, rel=0.5)
    for _ in range(20):
        transfer(before)
    transfer(after)
    for _ in range(4):
        known = transfer(before)
    assert known == pytest.approx(before, rel=0.5)


def test_costs_follow_the_documented_formulas() -> None:
    assert compute_ms(40, 20.0) == 2000.0
    assert compute_ms(40, 20.0, penalty_ms=5000.0) == 7000.0
    assert compute_ms(0, 20.0, penalty_ms=5000.0) == 0.0
    assert import_ms(1_000_000, 2.0, 100.0) == 12.0
    assert import_ms(0, 2.0, 100.0) == 0.0
    assert import_ms(1_250_000, 0.0, None) == 2.0 + 10.0, "defaults: 2 ms and 1000 Mb/s"
    assert worker_ms(100, 300, 100.0, 50.0) == 4050.0, "the queue is counted once"


def test_unmeasured_worker_has_its_declared_rate_then_the_default() -> None:
    rates = MeasuredRates()
    node = NodeId("w")
    assert rates.worker_tokens_per_second(node, 0.0) == 20.0
    assert rates.worker_tokens_per_second(node, 77.0) == 77.0
    rates.observe_worker(node, 300, 1000.0)
    assert rates.worker_tokens_per_second(node, 77.0) == 300.0
    rates.forget(node)
    assert rates.worker_tokens_per_second(node, 77.0) == 77.0


def test_a_worker_sends_while_it_computes() -> None:
    # 1,024 tokens in four segments of 1 s each; 2 s of transfer: all but a quarter of it is hidden.
    assert worker_ms(1024, 0, 256.0, 2000.0) == 4000.0 + 500.0
    # The link is the slower one: it waits for the first segment only.
    assert worker_ms(1024, 0, 256.0, 20_000.0) == 20_000.0 + 1000.0
    assert worker_ms(1024, 512, 256.0, 2000.0) == 2000.0 + 4500.0, "and the queue comes first"


def test_a_short_sample_tells_less_than_a_segment() -> None:
    rate = Rate(default=20.0)
    rate.observe(1000, 1000.0)
    rate.observe(2000, 1000.0, weight=sample_weight(64))
    assert rate.value == pytest.approx(1000 + 1000 * 0.25 / 3.25)
    rates = MeasuredRates()
    rates.observe_local(15, 1.0)
    assert rates.local.measured is None, "so few tokens measure what a step costs"


def test_a_first_short_sample_is_soon_outweighed() -> None:
    rate = Rate(default=20.0)
    rate.observe(100, 1000.0, weight=sample_weight(64))
    assert rate.value == 100.0
    rate.observe(500, 1000.0)
    assert rate.value == pytest.approx(100 + 400 / 1.75)


def test_a_trial_at_start_under_load_is_corrected_by_two_segments() -> None:
    rate = Rate(default=20.0)
    rate.assume(100.0)
    assert rate.value == 100.0
    for _ in range(2):
        rate.observe(256, 256.0)
    assert rate.value > 750.0
    assert not Rate(default=20.0, measured=None).evidence
    for nonsense in (0.0, -1.0, math.inf, math.nan):
        fresh = Rate(default=20.0)
        fresh.assume(nonsense)
        assert fresh.value == 20.0


def test_an_option_that_was_long_refused_is_due_again_the_longer_the_more_it_may_cost() -> None:
    passed = PassedOver()
    for _ in range(EXPLORE_EVERY):
        assert not passed.is_due("worker w", 10.0, 10.0)
        passed.note("here", ["worker w"])
    assert passed.is_due("worker w", 20.0, 10.0)
    assert not passed.is_due("worker w", 21.0, 10.0)
    for _ in range(EXPLORE_EVERY):
        passed.note("here", ["worker w"])
    assert passed.is_due("worker w", 40.0, 10.0)
    passed.note("worker w", ["here"])
    assert not passed.is_due("worker w", 1.0, 10.0)
    passed.note("here", ["worker w"])
    passed.forget(NodeId("w"))
    assert passed.counts == {}


def test_what_was_measured_anyway_need_not_be_looked_at_again() -> None:
    rates = MeasuredRates()
    for _ in range(EXPLORE_EVERY):
        rates.passed_over.note("import from a", ["compute here", "worker w"])
    rates.observe_local(20, 10.0)
    assert rates.passed_over.is_due("compute here", 1.0, 1.0), "a few tokens tell little"
    rates.observe_local(256, 100.0)
    rates.observe_worker(NodeId("w"), 256, 100.0)
    assert not rates.passed_over.is_due("compute here", 1.0, 1.0)
    assert not rates.passed_over.is_due("worker w", 1.0, 1.0)


def test_names_without_end_do_not_grow_what_is_remembered() -> None:
    passed = PassedOver()
    for number in range(5000):
        passed.note("here", [f"worker {number}"])
    assert len(passed.counts) <= 1024


@given(names=NAMES, key=st.binary(min_size=1, max_size=32))
def test_rendezvous_is_a_permutation_that_ignores_the_order_of_nodes(names: list[str], key: bytes) -> None:
    nodes = [NodeId(name) for name in names]
    ranked = rank_replicas(key, nodes)
    assert sorted(ranked) == sorted(nodes)
    assert ranked == rank_replicas(key, reversed(nodes))


@given(names=NAMES, key=st.binary(min_size=1, max_size=32))
def test_a_node_that_leaves_moves_only_its_own_keys(names: list[str], key: bytes) -> None:
    nodes = [NodeId(name) for name in names]
    ranked = rank_replicas(key, nodes)
    for gone in nodes:
        assert rank_replicas(key, [node for node in nodes if node != gone]) == tuple(n for n in ranked if n != gone)


def test_rendezvous_spreads_keys_over_all_nodes() -> None:
    nodes = [NodeId(name) for name in "abcd"]
    first = [rank_replicas(bytes([number]), nodes)[0] for number in range(200)]
    assert min(first.count(node) for node in nodes) > 20
