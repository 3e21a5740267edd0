"""The view of the fleet: nodes that appear, turn stale, restart and vanish; jobs; requests; charts; bounds."""

from __future__ import annotations

import pytest

from dashboard.fleet_view import HERE, BusState, FleetView, NodeStatus, ViewLimits
from dashboard.jobs import LOST
from dashboard.ledger import CounterLedger, LedgerRow, ended
from tests.dashboard.kit import message, snapshot, tell, worker_snapshot
from wire.bus import BusMessage, Topic
from wire.events import (
    EvictionEvent,
    JobEvent,
    LogEvent,
    PeerView,
    RequestEvent,
    SecurityEvent,
    TransferEvent,
)
from wire.ids import NodeId


def job(state: str = "running", done: int = 0, **changes: object) -> JobEvent:
    return JobEvent(job_id="j1", state=state, tokens_total=100, tokens_done=done, **changes)  # type: ignore[arg-type]


def request(number: int, **changes: object) -> RequestEvent:
    fields: dict[str, object] = {"request_id": f"r{number}", "operation": "append", "outcome": "ready", "source": "hot"}
    return RequestEvent(**{**fields, **changes})  # type: ignore[arg-type]


# --- nodes -----------------------------------------------------------------------------------------------------------


def test_a_node_is_online_then_stale_then_gone_by_the_readers_clock() -> None:
    view = FleetView()
    assert view.bus_state(0.0) is BusState.WAITING
    tell(view, snapshot(interval_ms=1000, ttl_ms=10_000), 100.0)
    (node,) = view.nodes(100.0)
    assert (node.node_id, node.status, node.roles) == ("primary", NodeStatus.ONLINE, ("primary",))
    assert view.nodes(103.0)[0].status is NodeStatus.ONLINE
    assert view.nodes(103.1)[0].status is NodeStatus.STALE
    assert view.bus_state(103.1) is BusState.SILENT
    view.on_tick(110.0)
    assert len(view.nodes(110.0)) == 1
    view.on_tick(110.1)
    assert view.nodes(110.1) == []


def test_any_event_shows_that_a_node_lives() -> None:
    view = FleetView()
    tell(view, snapshot(interval_ms=1000), 0.0)
    tell(view, LogEvent(level="info", text="still here"), 3.5)
    assert view.nodes(4.0)[0].status is NodeStatus.ONLINE
    assert view.bus_state(4.0) is BusState.LIVE


def test_an_ended_incarnation_cannot_speak_any_more() -> None:
    view = FleetView()
    tell(view, snapshot(software="old"), 0.0, incarnation=1)
    tell(view, snapshot(software="new"), 1.0, incarnation=2)
    tell(view, snapshot(software="old"), 2.0, incarnation=1)
    (node,) = view.nodes(2.0)
    assert node.snapshot is not None
    assert (node.snapshot.software, node.restarts, view.counters["old"]) == ("new", 1, 1)


def test_changes_of_status_move_the_revision_of_nodes() -> None:
    view = FleetView()
    tell(view, snapshot(interval_ms=1000), 0.0)
    view.on_tick(1.0)
    before = view.revisions["nodes"]
    view.on_tick(2.0)
    assert view.revisions["nodes"] == before
    view.on_tick(4.0)
    assert view.revisions["nodes"] == before + 1


def test_peers_tell_where_other_buses_are_and_who_is_not_heard() -> None:
    view = FleetView()
    peers = (
        PeerView(node_id="worker", roles=("worker",), bus_address="192.0.2.8:5000"),
        PeerView(node_id="cache", roles=("cache",), bus_address=""),
    )
    tell(view, snapshot(peers=peers), 0.0)
    assert view.bus_addresses() == {"192.0.2.8:5000"}
    assert [(peer.node_id, peer.told_by) for peer in view.unheard()] == [("cache", "primary"), ("worker", "primary")]
    tell(view, worker_snapshot(), 0.1, "worker")
    assert [peer.node_id for peer in view.unheard()] == ["cache"]


def test_malformed_payloads_are_counted_and_dropped() -> None:
    view = FleetView()
    view.on(BusMessage(NodeId("n"), Topic.NODE, 1, 1, b"\xc1", bytes(32)), 0.0)
    view.on(BusMessage(NodeId("n"), Topic.CARD, 1, 1, b"", bytes(32)), 0.0)
    assert view.counters["malformed"] == 2
    assert view.nodes(0.0) == []


def test_when_there_are_too_many_nodes_a_silent_one_makes_room_and_a_live_one_never() -> None:
    view = FleetView(ViewLimits(nodes=2))
    tell(view, snapshot(interval_ms=1000), 0.0, "a")
    tell(view, snapshot(interval_ms=1000), 0.0, "b")
    tell(view, snapshot(), 0.5, "c")
    assert view.counters["nodes_refused"] == 1
    tell(view, snapshot(), 5.0, "b")
    tell(view, snapshot(), 5.0, "c")
    assert [node.node_id for node in view.nodes(5.0)] == ["b", "c"]


# --- sums ------------------------------------------------------------------------------------------------------------


def told(view: FleetView, reused: int, now: float, incarnation: int = 1, node_id: str = "primary") -> None:
    sections = {"prefill": {"tokens_reused": reused, "last_fallback_reason": "x", "remote_job_tokens_total": 9}}
    tell(view, snapshot(sections=sections), now, node_id, incarnation)


def test_sums_do_not_go_backwards_when_nodes_restart_or_vanish_or_come_back() -> None:
    view = FleetView()
    told(view, 100, 0.0)
    told(view, 40, 0.0, node_id="other")
    assert view.totals() == {"prefill.tokens_reused": 140}
    told(view, 5, 1.0, incarnation=2)
    assert view.totals()["prefill.tokens_reused"] == 145
    view.on_tick(100.0)
    assert view.nodes(100.0) == []
    assert view.totals()["prefill.tokens_reused"] == 145
    told(view, 8, 101.0, incarnation=2)
    assert view.totals()["prefill.tokens_reused"] == 148


def test_increases_are_charted_but_not_what_was_counted_before_we_listened() -> None:
    view = FleetView()
    told(view, 1_000_000, 0.0)
    told(view, 1_000_070, 1.0)
    told(view, 30, 2.0, incarnation=2)
    _, buckets = view.series(2.0)
    assert [bucket.figures.get("tokens_reused") for bucket in buckets] == [100]


# --- jobs ------------------------------------------------------------------------------------------------------------


def test_a_job_moves_forward_and_ends_once() -> None:
    view = FleetView()
    tell(view, job("queued"), 0.0, "worker")
    tell(view, job(done=50), 1.0, "worker")
    tell(view, job(done=40), 1.5, "worker")
    (entry,) = view.jobs.active()
    assert (entry.event.tokens_done, entry.first_heard_at, entry.changed_at) == (50, 0.0, 1.5)
    tell(view, job("completed", 100), 2.0, "worker")
    assert view.jobs.active() == []
    before = view.revisions["jobs"]
    tell(view, job("completed", 100), 3.0, "worker")
    tell(view, job("running", 10), 3.0, "worker")
    assert view.revisions["jobs"] == before
    assert [entry.event.state for entry in view.jobs.ended()] == ["completed"]


def test_jobs_of_a_node_that_restarts_or_vanishes_are_closed_with_a_reason() -> None:
    view = FleetView()
    tell(view, job(), 0.0, "worker")
    tell(view, job("running"), 0.0, "other")
    tell(view, worker_snapshot(ttl_ms=5000), 1.0, "worker", incarnation=2)
    assert [entry.event.reason for entry in view.jobs.ended()] == ["its node restarted"]
    view.on_tick(121.0)
    assert {entry.event.reason for entry in view.jobs.ended()} == {"its node restarted", "its node is gone"}
    assert {entry.event.state for entry in view.jobs.ended()} == {LOST}


def test_a_job_whose_last_message_was_lost_ends_when_its_worker_has_none() -> None:
    view = FleetView()
    tell(view, job(), 0.0, "worker")
    tell(view, worker_snapshot(), 1.0, "worker")
    assert len(view.jobs.active()) == 1  # it may have been said before the job began
    tell(view, worker_snapshot(), 12.0, "worker")
    assert view.jobs.active() == []
    tell(view, job("completed", 100), 13.0, "worker")
    assert [entry.event.state for entry in view.jobs.ended()] == ["completed"]


# --- requests and events ---------------------------------------------------------------------------------------------


def test_requests_told_again_are_taken_once_and_completed_by_a_later_telling() -> None:
    view = FleetView()
    tell(view, snapshot(), 0.0)
    tell(view, request(1), 10.0)
    tell(view, request(1), 11.0)
    tell(view, request(1, ttft_ms=250.0), 12.0)
    tell(view, request(1, ttft_ms=250.0), 13.0)
    tell(view, request(2, source="martian", ttft_ms=50.0), 14.0)
    assert [record.event.request_id for record in view.requests.newest()] == ["r2", "r1"]
    assert view.requests.newest()[1].event.ttft_ms == 250.0
    assert view.revisions["requests"] == 3
    _, (bucket,) = view.series(14.0)
    assert bucket.figures == {
        "requests": 2,
        "ttft_ms_sum.hot": 250.0,
        "ttft_count.hot": 1,
        "ttft_ms_sum.other": 50.0,
        "ttft_count.other": 1,
    }
    assert view.ttft()["hot"].count == 1


def test_requests_that_fell_out_of_the_ring_are_still_not_new() -> None:
    view = FleetView(ViewLimits(requests=2))
    tell(view, snapshot(), 0.0)
    for number in (1, 2, 3, 1, 2, 3):
        tell(view, request(number), 10.0)
    assert [record.event.request_id for record in view.requests.newest()] == ["r3", "r2"]
    assert sum(bucket.figures.get("requests", 0) for bucket in view.series(10.0)[1]) == 3


def test_the_past_that_a_node_tells_a_late_joiner_is_listed_but_not_charted() -> None:
    view = FleetView()
    tell(view, snapshot(), 100.0)
    for number in range(5):
        tell(view, request(number, ttft_ms=100.0, decode_tokens_per_second=9.0), 100.1)
    assert [record.replayed for record in view.requests.newest()] == [True] * 5
    assert view.ttft() == {}
    tell(view, request(9, ttft_ms=100.0, decode_tokens_per_second=9.0), 110.0)
    assert view.ttft()["hot"].count == 1
    _, buckets = view.series(110.0)
    assert buckets[-1].figures["decode_tps_sum"] == 9.0


def test_transfers_evictions_security_and_logs_are_kept_and_charted() -> None:
    view = FleetView()
    tell(view, TransferEvent(direction="in", purpose="fetch", payload_bytes=500), 0.0)
    tell(view, TransferEvent(direction="out", purpose="fetch", payload_bytes=700), 0.0)
    tell(view, EvictionEvent(parts=2, size_bytes=64), 0.0)
    tell(view, SecurityEvent(kind="card_refused", count=3), 0.0)
    tell(view, SecurityEvent(kind="node_appeared"), 0.0)
    tell(view, LogEvent(level="warning", text="hm"), 0.0)
    _, (bucket,) = view.series(0.0)
    assert bucket.figures == {"transfers": 2, "bytes_in": 500, "bytes_out": 700, "bytes_evicted": 64, "refusals": 3}
    assert view.security_counts == {"card_refused": 3, "node_appeared": 1}
    assert [record.event.text for record in view.logs.newest()] == ["hm"]
    assert [record.number for record in view.transfers.since(1)] == [2]


def test_states_are_charted_over_online_nodes_only() -> None:
    view = FleetView()
    tell(view, snapshot(interval_ms=1000), 0.0, "a")
    tell(view, snapshot(interval_ms=1000), 8.0, "b")
    view.on_tick(8.0)
    _, buckets = view.series(8.0)
    assert buckets[-1].figures["nodes_online"] == 1
    assert buckets[-1].figures["cache_bytes_used"] == 300
    assert buckets[-1].figures["cache_bytes_max"] == 1000


def test_old_buckets_fall_out_and_both_resolutions_are_kept() -> None:
    view = FleetView(ViewLimits(fine_buckets=3, coarse_buckets=2))
    for now in range(0, 60, 5):
        tell(view, EvictionEvent(parts=1, size_bytes=1), float(now))
    step, fine = view.series(59.0)
    assert (step, len(fine)) == (5.0, 3)
    step, coarse = view.series(59.0, coarse=True)
    assert (step, [bucket.figures["bytes_evicted"] for bucket in coarse]) == (300.0, [12])
    assert view.series(10_000.0)[1] == []


@pytest.mark.parametrize("kinds", [200])
def test_kinds_of_security_events_are_bounded(kinds: int) -> None:
    view = FleetView()
    for number in range(kinds):
        view.on(message(SecurityEvent(kind=f"kind {number}")), 0.0)
    assert len(view.security_counts) <= 65
    assert sum(view.security_counts.values()) == kinds


def test_what_is_refused_is_a_refusal_and_nothing_of_the_node() -> None:
    view = FleetView()
    view.refuse("alpha", "not signed with its key", 3, 1.0)
    assert view.nodes(1.0) == []
    assert view.last_message_at is None
    (record,) = view.security.newest()
    assert (record.node_id, record.event.subject, record.event.count) == (HERE, "alpha", 3)
    assert view.counters["refused"] == view.security_counts["telemetry_refused"] == 3
    _, buckets = view.series(1.0)
    assert buckets[-1].figures["refusals"] == 3


def test_a_name_that_another_key_stands_for_begins_anew_with_any_incarnation() -> None:
    """Whoever took a name first may have told the highest incarnation there is: forgotten, it keeps nobody out."""
    view = FleetView()
    highest = 2**64 - 1
    tell(view, snapshot(sections={"prefill": {"tokens_reused": 5}}), 0.0, "alpha", highest)
    tell(view, JobEvent(job_id="j", state="running", tokens_total=9), 0.0, "alpha", highest)
    view.forget("alpha", 1.0)
    assert view.nodes(1.0) == []
    assert [entry.event.state for entry in view.jobs.ended()] == ["lost"]
    tell(view, snapshot(sections={"prefill": {"tokens_reused": 3}}), 2.0, "alpha", 7)
    (node,) = view.nodes(2.0)
    assert (node.incarnation, node.restarts) == (7, 0)
    assert view.totals()["prefill.tokens_reused"] == 8  # sums never go backwards
    tell(view, snapshot(sections={"prefill": {"tokens_reused": 4}}), 3.0, "alpha", 7)
    assert view.totals()["prefill.tokens_reused"] == 9


def test_a_kept_row_of_a_name_nobody_knows_the_key_of_any_more_lets_any_incarnation_follow() -> None:
    ledger = CounterLedger()
    ledger.restore([ended(LedgerRow("alpha", 2**64 - 1, {"n": 1}, {"n": 4}))])
    assert ledger.totals() == {"n": 5}
    ledger.observe("alpha", 3, {"n": 2})
    assert ledger.totals() == {"n": 7}
    assert [row.incarnation for row in ledger.rows()] == [3]
