"""Whatever arrives, in whatever order: sums never go backwards, nothing raises, memory is bounded."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dashboard.fleet_view import FleetView, NodeStatus, ViewLimits
from dashboard.jobs import JobBoard
from dashboard.ledger import CounterLedger, countable
from dashboard.series import FIGURES_MAX, TimeSeries
from tests.dashboard.kit import message, snapshot
from wire.bus import BusMessage, Topic
from wire.events import EvictionEvent, JobEvent, LogEvent, RequestEvent, SecurityEvent, TransferEvent
from wire.ids import NodeId
from wire.text import is_line

NODES = st.sampled_from(["a", "b", "c", "d"])
OBSERVATIONS = st.lists(
    st.tuples(
        NODES, st.integers(1, 3), st.dictionaries(st.sampled_from(["x", "y"]), st.integers(0, 1000), min_size=1, max_size=2)
    ),
    max_size=40,
)


@given(OBSERVATIONS)
def test_the_ledger_is_the_sum_of_the_highest_value_of_each_incarnation_that_was_in_order(
    observations: list[tuple[str, int, dict[str, int]]],
) -> None:
    ledger = CounterLedger()
    highest: dict[tuple[str, int, str], int] = defaultdict(int)
    newest: dict[str, int] = {}
    before: dict[str, int] = {}
    for node_id, incarnation, figures in observations:
        if incarnation >= newest.get(node_id, 0):
            newest[node_id] = incarnation
            for name, value in figures.items():
                highest[node_id, incarnation, name] = max(highest[node_id, incarnation, name], value)
        grown = ledger.observe(node_id, incarnation, figures)
        totals = ledger.totals()
        assert all(totals.get(name, 0) >= value for name, value in before.items())
        assert all(totals[name] - before.get(name, 0) == value for name, value in grown.items())
        before = totals
    expected: dict[str, int] = defaultdict(int)
    for (_, _, name), value in highest.items():
        expected[name] += value
    assert {name: value for name, value in expected.items() if value} == ledger.totals()
    for node_id in newest:
        of_node = ledger.of_node(node_id)
        assert all(
            of_node.get(name, 0) == sum(value for (n, _, k), value in highest.items() if (n, k) == (node_id, name))
            for name in ("x", "y")
        )


@given(OBSERVATIONS, OBSERVATIONS)
def test_a_restored_ledger_goes_on_where_the_first_one_stopped(
    first: list[tuple[str, int, dict[str, int]]], second: list[tuple[str, int, dict[str, int]]]
) -> None:
    unbroken, before = CounterLedger(), CounterLedger()
    for observation in first:
        unbroken.observe(*observation)
        before.observe(*observation)
    after = CounterLedger()
    after.restore(before.rows())
    assert after.totals() == before.totals()
    for observation in second:
        unbroken.observe(*observation)
        after.observe(*observation)
    assert after.totals() == unbroken.totals()


@given(
    st.dictionaries(
        st.sampled_from(["prefill", "cache", "refusals", "node"]),
        st.dictionaries(
            st.text(max_size=9),
            st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
            max_size=6,
        ),
    )
)
def test_only_whole_numbers_that_are_not_negative_are_counters(sections: dict[str, dict[str, Any]]) -> None:
    assert all(type(value) is int and value >= 0 for value in countable(sections).values())


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 200)), max_size=80))
def test_a_series_holds_no_more_than_its_length_and_width(adds: list[tuple[float, int]]) -> None:
    series = TimeSeries(step_s=5.0, length=7)
    now = 0.0
    for later, name in adds:
        now = max(now, later)
        series.add(f"n{name}", 1, now)
    buckets = series.buckets(now)
    assert len(buckets) <= 7
    assert all(len(bucket.figures) <= FIGURES_MAX for bucket in buckets)
    assert [bucket.start for bucket in buckets] == sorted({bucket.start for bucket in buckets})
    assert all(now - 7 * 5.0 < bucket.start <= now for bucket in buckets)


JOBS = st.builds(
    JobEvent,
    job_id=st.sampled_from([f"j{n}" for n in range(12)]),
    state=st.sampled_from(["queued", "running", "completed", "failed", "cancelled", "martian"]),
    tokens_done=st.integers(0, 100),
)


@given(st.lists(st.tuples(NODES, st.integers(1, 2), JOBS, st.floats(0, 400)), max_size=60))
def test_a_job_is_either_active_or_ended_and_neither_list_outgrows_its_bound(
    events: list[tuple[str, int, JobEvent, float]],
) -> None:
    board = JobBoard(active_max=5, ended_max=4)
    now = 0.0
    progress: dict[tuple[str, int, str], int] = {}
    for node_id, incarnation, event, later in events:
        now += later
        board.on(node_id, incarnation, event, now)
        board.on_tick(now)
        active, ended = board.active(), board.ended()
        assert len(active) <= 5
        assert len(ended) <= 4
        assert not {entry.key for entry in active} & {entry.key for entry in ended}
        for entry in active:
            assert entry.event.tokens_done >= progress.get(entry.key, 0)
        progress = {entry.key: entry.event.tokens_done for entry in active}


LIMITS = ViewLimits(nodes=3, requests=4, transfers=4, evictions=4, security=4, logs=4, fine_buckets=4, coarse_buckets=2)
EVENTS = st.one_of(
    JOBS,
    st.builds(snapshot, interval_ms=st.integers(0, 10_000), ttl_ms=st.integers(0, 100_000)),
    st.builds(
        RequestEvent,
        request_id=st.sampled_from("abcdefgh"),
        operation=st.just("append"),
        outcome=st.just("ready"),
        source=st.sampled_from(["hot", "worker", "", "?"]),
        ttft_ms=st.floats(0, 1e6),
    ),
    st.builds(TransferEvent, direction=st.sampled_from(["in", "out"]), payload_bytes=st.integers(0, 2**53)),
    st.builds(EvictionEvent, parts=st.integers(0, 9), size_bytes=st.integers(0, 2**53)),
    st.builds(SecurityEvent, kind=st.text(min_size=1, max_size=3).filter(is_line), count=st.integers(0, 9)),
    st.builds(LogEvent, level=st.just("info"), text=st.text(max_size=9)),
)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list("abcde")), st.integers(1, 3), EVENTS, st.floats(0, 30)), max_size=40))
def test_any_stream_of_events_leaves_a_bounded_and_consistent_view(
    stream: list[tuple[str, int, Any, float]],
) -> None:
    view = FleetView(LIMITS)
    now = 0.0
    totals: dict[str, int] = {}
    for node_id, incarnation, event, later in stream:
        now += later
        view.on(message(event, node_id, incarnation), now)
        view.on_tick(now)
        nodes = view.nodes(now)
        assert len(nodes) <= 3
        assert all(node.silent_s == 0 for node in nodes if node.node_id == node_id and node.incarnation == incarnation)
        assert all(node.status is NodeStatus.STALE for node in nodes if node.silent_s > 30)
        for ring in (view.requests, view.transfers, view.evictions, view.security, view.logs):
            assert len(ring.newest()) <= 4
        assert len(view.series(now)[1]) <= 4
        assert all(view.totals()[name] >= value for name, value in totals.items())
        totals = view.totals()
    assert view.counters["messages"] == len(stream)
    assert view.counters["malformed"] == 0


@given(st.sampled_from(list(Topic)), st.binary(max_size=64))
def test_any_payload_is_taken_or_counted_as_malformed(topic: Topic, payload: bytes) -> None:
    view = FleetView()
    view.on(BusMessage(NodeId("n"), topic, 1, 1, payload, bytes(32)), 0.0)
    assert view.counters["malformed"] in (0, 1)
