"""A node that tells figures nobody can add up: it is refused, or bounded, and never takes the page away from the others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgpack
import pytest
import zmq
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dashboard.figures import bounded, total, whole
from dashboard.fleet_view import FleetView
from dashboard.http import Access, encode_json
from dashboard.hub import LiveFleet
from dashboard.ledger import CounterLedger, countable
from dashboard.metrics import _families
from dashboard.present import eyes, nodes, security, series
from dashboard.series import TimeSeries
from dashboard.state import ReportedTokens
from dashboard.summary import namespace, summary
from kakeya_zmq.io.addresses import Address
from tests.dashboard.kit import snapshot
from tests.dashboard.load import SimulatedFleet, dashboard_process
from tests.dashboard.web_kit import API_KEY, Web, call
from tests.fleet_rig import wait_until
from tests.vectors import independent as wire
from tests.vectors.independent import Identity
from wire.bus import BusMessage, Topic
from wire.events import FIGURE_MAX, EvictionEvent, NodeSnapshot, RequestEvent, SecurityEvent, TransferEvent
from wire.ids import NodeId
from wire.keys import FleetKey

NUMBERS = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.sampled_from([FIGURE_MAX, -FIGURE_MAX, float(FIGURE_MAX), 1e308, -1e308, math.inf, -math.inf, math.nan]),
)
SHOWN = (
    "bytes_used",
    "max_bytes",
    "entry_count",
    "cache_epoch",
    "lookup_hits",
    "tokens_served",
    "evictions",
    "put_failures",
)
COUNTED = ("tokens_reused", "tokens_computed", "tokens_generated", "local_hits", "remote_job_tokens_total")
SECTIONS = st.fixed_dictionaries(
    {
        "cache": st.dictionaries(st.sampled_from(SHOWN), NUMBERS),
        "prefill": st.dictionaries(st.sampled_from(COUNTED), NUMBERS),
        "refusals": st.dictionaries(st.text(min_size=1, max_size=3), NUMBERS, max_size=3),
        "node": st.dictionaries(st.sampled_from(["memory_bytes", "uptime_s"]), NUMBERS),
    }
)
HUGE = {"cache": dict.fromkeys(SHOWN, math.inf), "prefill": dict.fromkeys(COUNTED, math.nan), "refusals": {}, "node": {}}
LIES = (math.inf, -math.inf, math.nan, 1e308, 2**64 - 1, -(2**63), FIGURE_MAX + 1)


# --- the view and what is made of it -------------------------------------------------------------------------------------


def show_all(view: FleetView, now: float) -> bytes:
    """Everything that is made of figures, as it leaves the process."""
    who = eyes(view, now, admin=False)
    entries = view.nodes(now)
    for family in _families(view, now, {}):
        assert all(math.isfinite(sample.value) for sample in family.samples)
    answers: list[Any] = [
        nodes(entries, (), who),
        namespace(entries, who),
        summary(view, now, who, ReportedTokens(0, 0), registered=0, groups=0),
        security(view, float, who, 50),
    ]
    for coarse in (False, True):
        answers.append(series(*view.series(now, coarse=coarse), float))
    return encode_json(answers)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), SECTIONS), min_size=1, max_size=6))
@example([(1, HUGE), (1, HUGE), (2, HUGE)])
def test_whatever_figures_arrive_every_answer_can_be_made(stream: list[tuple[int, dict[str, dict[str, float]]]]) -> None:
    view = FleetView()
    for now, (incarnation, sections) in enumerate(stream):
        payload = msgpack.packb({"roles": ["cache"], "sections": sections})
        view.on(BusMessage(NodeId("liar"), Topic.NODE, incarnation, now + 1, payload, bytes(32)), float(now))
        view.on_tick(float(now))
        show_all(view, float(now))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), SECTIONS), min_size=1, max_size=6))
@example([(1, HUGE), (1, HUGE), (2, HUGE)])
def test_every_answer_can_be_made_even_of_figures_that_no_decoder_looked_at(
    stream: list[tuple[int, dict[str, dict[str, float]]]],
) -> None:
    view = FleetView()
    for now, (incarnation, sections) in enumerate(stream):
        told = NodeSnapshot(roles=("primary",), sections=sections)
        with mock.patch("dashboard.fleet_view.decode_event", return_value=told):
            view.on(BusMessage(NodeId("liar"), Topic.NODE, incarnation, now + 1, b"", bytes(32)), float(now))
        view.on_tick(float(now))
        show_all(view, float(now))


@given(st.lists(NUMBERS, max_size=9))
def test_a_sum_is_whole_and_within_the_bound(values: list[float]) -> None:
    assert isinstance(total(values), int)
    assert abs(total(values)) <= FIGURE_MAX
    for value in values:
        assert isinstance(whole(value), int)
        assert bounded(value) == value or not -FIGURE_MAX <= value <= FIGURE_MAX


@given(st.lists(NUMBERS, min_size=1, max_size=9))
def test_a_charted_figure_is_finite(values: list[float]) -> None:
    chart = TimeSeries(step_s=5.0, length=3)
    for value in values:
        chart.add("sum", value, 0.0)
        chart.put("state", value, 0.0)
    assert all(abs(figure) <= FIGURE_MAX for bucket in chart.buckets(0.0) for figure in bucket.figures.values())


def test_sums_over_restarts_stop_at_the_bound_and_stay_there() -> None:
    ledger = CounterLedger()
    for incarnation in range(1, 5):
        ledger.observe("liar", incarnation, {"x": FIGURE_MAX})
        assert ledger.totals() == ledger.of_node("liar") == {"x": FIGURE_MAX}
    assert countable({"refusals": {str(number): FIGURE_MAX for number in range(9)}}) == {"refusals": FIGURE_MAX}


# --- the page ------------------------------------------------------------------------------------------------------------


def read_everything(address: Address, paths: list[str]) -> dict[str, bytes]:
    """Every public answer; all of them can be had, with the key, too."""
    found = {}
    for path in paths:
        for key in (API_KEY, None):
            answer = call(address, "GET", path, key=key)
            assert answer.status == 200, (path, key, answer.body)
        found[path] = answer.body
    return found


def read_paths(web: Web) -> list[str]:
    found = [
        route.path
        for route in web.routes
        if route.method == "GET"
        and route.access is Access.READ
        and "<" not in route.path
        and not route.path.endswith("/events")
    ]
    return [*found, "/v1/network/series?resolution=coarse", "/v1/network/events?once=true"]


def tell_raw(fleet: LiveFleet, topic: Topic, payload: bytes, number: int) -> None:
    fleet.apply([(BusMessage(NodeId("liar"), topic, 1, number, payload, bytes(32)), fleet.clock())])


@pytest.mark.parametrize("lie", LIES)
def test_one_node_with_impossible_figures_leaves_the_page_to_the_others(web: Web, lie: float) -> None:
    web.tell(snapshot(), "primary")
    before = read_everything(web.server.address, read_paths(web))
    for number, name in enumerate(("bytes_used", "max_bytes", "lookup_hits", "tokens_served"), 1):
        lying = {"roles": ["primary"], "ttl_ms": 3_600_000, "sections": {"cache": {name: lie}, "prefill": {"misses": lie}}}
        tell_raw(web.fleet, Topic.NODE, msgpack.packb(lying), number)
    web.fleet.tick()
    after = read_everything(web.server.address, read_paths(web))
    assert after["/v1/network/nodes"] == before["/v1/network/nodes"]
    assert web.get("/v1/network/bus")["malformed"] == 4


def test_figures_at_the_bound_told_again_and_again_leave_the_page_to_the_others(web: Web) -> None:
    web.tell(snapshot(), "primary")
    figures = {"cache": dict.fromkeys(SHOWN, FIGURE_MAX), "prefill": dict.fromkeys(COUNTED, FIGURE_MAX)}
    for incarnation in range(1, 40):
        web.tell(snapshot(sections=figures, memory_bytes=FIGURE_MAX, uptime_s=1e12), "liar", incarnation)
        for turn in range(20):
            request = {"request_id": f"{incarnation}-{turn}", "operation": "append", "outcome": "ready"}
            for event in (
                TransferEvent(direction="in", payload_bytes=FIGURE_MAX, elapsed_ms=1e12),
                EvictionEvent(parts=FIGURE_MAX, size_bytes=FIGURE_MAX),
                SecurityEvent(kind="card_refused", count=FIGURE_MAX),
                RequestEvent(**request, ttft_ms=1e12, decode_tokens_per_second=1e12),
            ):
                web.tell(event, "liar", incarnation)
        web.clocks.pass_time(4.0)
    web.tell(snapshot(), "primary")
    web.fleet.tick()
    read_everything(web.server.address, read_paths(web))
    assert web.get("/v1/network/security")["total"] == FIGURE_MAX
    assert web.get("/v1/network/summary")["cache_bytes_used"] == FIGURE_MAX
    primary = next(node for node in web.get("/v1/network/nodes") if node["id"] == "primary")
    assert (primary["status"], primary["cache"]["bytes_used"]) == ("online", 300)


# --- over a real bus -----------------------------------------------------------------------------------------------------


class Liar:
    """A member of the fleet with a bus of its own, on which it says what it likes, properly sealed and signed."""

    def __init__(self, key: FleetKey, secret: bytes) -> None:
        telemetry = wire.purpose_key(secret, "kz bus telemetry")
        self._seal_key = wire.telemetry_seal_key(telemetry)
        self._identity = Identity.new("liar")
        self._numbers = itertools.count(1)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.linger = 0
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = wire.bus_curve_pair(telemetry)
        self.address = Address("127.0.0.1", self._socket.bind_to_random_port("tcp://127.0.0.1"))

    def say(self, event: dict[str, Any]) -> None:
        number = next(self._numbers)
        self._socket.send_multipart(
            wire.seal_bus_message(self._seal_key, self._identity, int(Topic.NODE), 1, number, msgpack.packb(event))
        )

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


@contextmanager
def honest_fleet(key: FleetKey) -> Iterator[SimulatedFleet]:
    fleet = SimulatedFleet(2, 20, key)
    try:
        yield fleet
    finally:
        fleet.close()


def test_a_signed_snapshot_of_impossible_figures_over_a_real_bus_takes_nothing_from_the_page(tmp_path: Path) -> None:
    secret = FleetKey.generate()
    key = FleetKey(secret)
    with (
        honest_fleet(key) as fleet,
        closing(Liar(key, secret)) as liar,
        dashboard_process(tmp_path, key, liar.address) as (_, web),
    ):
        peers = [{"node_id": "node-000", "roles": ["worker"], "bus_address": str(fleet.addresses[0])}]

        def sees_all() -> bool:
            liar.say({"roles": ["cache"], "interval_ms": 1000, "ttl_ms": 600_000, "peers": peers})
            return bool(call(web, "GET", "/healthz").json["online_nodes"] == 3)

        wait_until(sees_all, "the dashboard found the honest nodes through the liar")

        def has_refused() -> bool:
            for lie in LIES:
                liar.say({"roles": ["cache"], "sections": {"cache": {"bytes_used": lie, "max_bytes": lie}}})
            liar.say({"roles": ["cache"], "ttl_ms": 2**53})
            return bool(call(web, "GET", "/v1/network/bus").json["malformed"] > len(LIES))

        wait_until(has_refused, "the lies were refused")
        for name in ("summary", "nodes", "kvfs", "series", "groups", "topology", "prefill", "events?once=true"):
            assert call(web, "GET", f"/v1/network/{name}").status == 200, name
        assert call(web, "GET", "/healthz").json["status"] == "ok"
        assert {node["status"] for node in call(web, "GET", "/v1/network/nodes").json if node["id"] != "liar"} == {"online"}
