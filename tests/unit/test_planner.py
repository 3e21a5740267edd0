"""Costs, decisions and ranking of the planner."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya_zmq.planner import (
    LinkShare,
    MeasuredRates,
    Rate,
    WorkerOffer,
    compute_ms,
    decide_import,
    import_ms,
    rank_replicas,
    rank_workers,
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


def test_import_must_save_the_minimum_ratio_unless_forced() -> None:
    rates = MeasuredRates()
    rates.observe_local(1000, 1000.0)  # 1 ms a token
    rates.observe_import(1_000_000_000, 1.0)  # as good as free
    share = LinkShare(size_bytes=89_000, round_trip_ms=1.0, megabytes_per_second=1.0)  # 90 ms
    just = decide_import([share], 100, rates, minimum_savings_ratio=0.0999)
    assert just.accepted
    assert not decide_import([share], 100, rates, minimum_savings_ratio=0.11).accepted
    assert decide_import([share], 100, rates, minimum_savings_ratio=0.11, penalty_ms=100.0).accepted
    assert decide_import([share], 100, rates, minimum_savings_ratio=0.11, forced=True).accepted
    assert "100 tokens" in just.describe()


def test_peers_deliver_side_by_side_so_the_slowest_counts() -> None:
    shares = [LinkShare(1_000_000, 1.0, 1.0), LinkShare(1_000, 1.0, 1000.0)]
    decision = decide_import(shares, 10, MeasuredRates(), minimum_savings_ratio=0.1)
    assert 1001.0 <= decision.import_ms < 1010.0
    assert decision.transfer_bytes == 1_001_000


def test_workers_are_ranked_by_cost_then_free_memory_then_name() -> None:
    offers = [
        WorkerOffer(NodeId("busy"), 100.0, queued_tokens=10_000),
        WorkerOffer(NodeId("b"), 100.0, 0),
        WorkerOffer(NodeId("a"), 100.0, 0),
        WorkerOffer(NodeId("roomy"), 100.0, 0, free_memory_bytes=1 << 30),
    ]
    ranked = rank_workers(
        offers, worker_tokens=1000, local_tokens=1000, transfer_bytes=0, rates=MeasuredRates(), minimum_savings_ratio=0.1
    )
    assert [decision.node_id for decision in ranked] == ["roomy", "a", "b", "busy"]
    assert [decision.accepted for decision in ranked] == [True, True, True, False]
    assert "busy" in ranked[-1].describe()
    assert "does not pay" in ranked[-1].describe()


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
