"""Many nodes, many events, a reader that stops reading. CPU and delays are printed by tests.dashboard.load, not judged."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from dashboard.hub import LiveFleet
from tests.dashboard.kit import message, snapshot
from tests.dashboard.load import SimulatedFleet, dashboard_process, run
from tests.dashboard.web_kit import call
from tests.fleet_rig import wait_until
from wire.events import JobEvent, LogEvent, PeerView, RequestEvent, SecurityEvent, TransferEvent
from wire.keys import FleetKey

MB = 1_000_000


def test_memory_of_the_view_is_flat_over_half_an_hour_of_many_events() -> None:
    now = 0.0
    fleet = LiveFleet(clock=lambda: now, wall_clock=lambda: now)
    peers = tuple(PeerView(node_id=f"node-{number}") for number in range(50))

    def five_minutes(turn: int) -> None:
        nonlocal now
        for step in range(300):
            now += 1.0
            for number in range(8):
                unique = f"{turn}-{step}-{number}"
                name = f"node-{(step * 8 + number) % 200}"
                events = (
                    snapshot(peers=peers, sections={"prefill": {"tokens_reused": turn * 300 + step}}),
                    JobEvent(job_id=unique, state="running"),
                    RequestEvent(request_id=unique, operation="append", outcome="ready", reasons=("x" * 200,)),
                    TransferEvent(direction="in", payload_bytes=9),
                    SecurityEvent(kind=unique),
                    LogEvent(level="info", text=f"{unique} {'x' * 200}"),
                )
                fleet.apply([(message(event, name, incarnation=1 + turn), now) for event in events])
            fleet.tick()

    process = psutil.Process()
    for turn in range(2):
        five_minutes(turn)
    before = process.memory_info().rss
    for turn in range(2, 6):
        five_minutes(turn)
    assert process.memory_info().rss - before < 12 * MB
    assert fleet.read(lambda view, _: view.counters["messages"]) == 6 * 300 * 8 * 6


def test_a_reader_that_stops_reading_costs_the_publisher_nothing_and_catches_up(tmp_path: Path) -> None:
    key = FleetKey(FleetKey.generate())
    fleet = SimulatedFleet(3, 100, key)
    try:
        with dashboard_process(tmp_path, key, fleet.addresses[0]) as (process, web):
            wait_until(lambda: call(web, "GET", "/healthz").json["online_nodes"] == 3, "all nodes are seen")
            process.send_signal(signal.SIGSTOP)
            publisher = psutil.Process()
            before = publisher.memory_info().rss
            for number in range(30_000):
                fleet.mark(f"lost-{number}")
            assert publisher.memory_info().rss - before < 32 * MB
            process.send_signal(signal.SIGCONT)

            wait_until(lambda: call(web, "GET", "/v1/network/bus").json["missed"] > 0, "the loss is noticed")

            def is_up_to_date() -> bool:
                nodes = call(web, "GET", "/v1/network/nodes").json
                return {node["status"] for node in nodes} == {"online"} and len(nodes) == 3

            wait_until(is_up_to_date, "the view is right again")
    finally:
        fleet.close()


def test_a_fleet_on_many_buses_is_seen_whole_through_one_address() -> None:
    figures = run(nodes=30, events=100.0, seconds=2.0, samples=2)
    print(figures)
    assert figures["nodes_seen"] == 30
    assert figures["malformed"] == figures["dropped"] == 0


@pytest.mark.slow
def test_two_hundred_nodes_and_five_hundred_events_a_second() -> None:
    figures = run(nodes=200, events=500.0, seconds=90.0)
    print(figures)
    assert figures["nodes_seen"] == 200
    assert figures["malformed"] == 0
    assert figures["memory_mb_at_the_end"] - figures["memory_mb_half_way"] < 8
