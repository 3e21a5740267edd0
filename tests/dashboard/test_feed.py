"""The feed over real sockets, with the telemetry key only: it finds buses, joins late, survives restarts."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dashboard.discovery import local_buses
from dashboard.feed import BusFeed
from dashboard.fleet_view import BusState, NodeStatus
from dashboard.hub import LiveFleet
from kakeya_zmq.io.addresses import Address
from kakeya_zmq.io.bus_publisher import Publisher
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.protocol.session import LocalNode
from tests.dashboard.kit import snapshot
from tests.fleet_rig import wait_until
from wire.bus import Topic
from wire.events import LogEvent, PeerView, encode_event
from wire.keys import FleetKey, NodeIdentity

KEY = FleetKey(b"k" * 32)


class Teller:
    """A node's telemetry: real reactor, real publisher, tells its snapshot whenever somebody subscribes."""

    def __init__(self, name: str, *, incarnation: int = 1, port: int = 0, key: FleetKey = KEY, **changes: object) -> None:
        self._reactor = Reactor()
        self._snapshot = encode_event(snapshot(interval_ms=200, ttl_ms=60_000, **changes))
        self._publisher = Publisher(
            self._reactor,
            bind=Address("127.0.0.1", port),
            local=LocalNode(
                node_id=name,
                identity=NodeIdentity(hashlib.sha256(name.encode()).digest()),
                roles=("test",),
                incarnation=incarnation,
                software="test",
            ),
            fleet_key=key,
            on_subscribed=self._subscribed,
        )
        self.address = self._publisher.address
        self._reactor.start_thread()

    def _subscribed(self, topic: Topic) -> None:
        if topic is Topic.NODE:
            self._publisher.publish(Topic.NODE, self._snapshot)

    def say(self, text: str) -> None:
        payload = encode_event(LogEvent(level="info", text=text))
        self._reactor.call(lambda: self._publisher.publish(Topic.LOG, payload))

    def close(self) -> None:
        self._reactor.close()


@pytest.fixture
def close_at_end() -> Iterator[Callable[[object], object]]:
    opened: list[object] = []

    def keep(thing: object) -> object:
        opened.append(thing)
        return thing

    yield keep
    for thing in reversed(opened):
        thing.close()  # type: ignore[attr-defined]


Keep = Callable[[object], object]


def listening(keep: Keep, **arguments: object) -> LiveFleet:
    fleet = LiveFleet()
    feed = BusFeed(fleet, KEY.telemetry_key(), **arguments)  # type: ignore[arg-type]
    keep(feed)
    feed.start()
    return fleet


def names(fleet: LiveFleet) -> list[str]:
    return [node.node_id for node in fleet.read(lambda view, now: view.nodes(now))]


def test_a_late_feed_sees_the_state_at_once_and_then_events(close_at_end: Keep) -> None:
    teller = Teller("alpha")
    close_at_end(teller)
    fleet = listening(close_at_end, addresses=[teller.address])
    wait_until(lambda: names(fleet) == ["alpha"], "the snapshot")

    def heard() -> bool:
        teller.say("hello")
        return bool(fleet.read(lambda view, now: view.logs.newest()))

    wait_until(heard, "an event")
    assert fleet.read(lambda view, now: view.bus_state(now)) is BusState.LIVE


def test_one_bus_leads_to_all_others(close_at_end: Keep) -> None:
    second = Teller("beta")
    close_at_end(second)
    first = Teller("alpha", peers=(PeerView(node_id="beta", bus_address=str(second.address)),))
    close_at_end(first)
    fleet = listening(close_at_end, addresses=[first.address])
    wait_until(lambda: names(fleet) == ["alpha", "beta"], "both nodes")


@pytest.mark.parametrize("host", ["localhost", "127.1", "2130706433", "0.0.0.0", "224.0.0.1"])
def test_names_odd_forms_and_addresses_of_no_machine_that_a_node_tells_are_not_dialled(
    close_at_end: Keep, host: str
) -> None:
    second = Teller("beta")
    close_at_end(second)
    told = PeerView(node_id="beta", bus_address=f"{host}:{second.address.port}")
    first = Teller("alpha", peers=(told,))
    close_at_end(first)
    feed = BusFeed(LiveFleet(), KEY.telemetry_key(), addresses=[first.address])
    close_at_end(feed)
    feed.start()
    wait_until(lambda: feed.figures().get("addresses_refused", 0) >= 2, "the address is refused, twice")
    assert feed.figures()["addresses"] == 1


def test_a_bus_that_goes_away_is_told_and_one_that_returns_is_heard_again(close_at_end: Keep) -> None:
    teller = Teller("alpha")
    fleet = listening(close_at_end, addresses=[teller.address])
    wait_until(lambda: names(fleet) == ["alpha"], "the snapshot")
    teller.close()
    wait_until(lambda: fleet.read(lambda view, now: view.bus_state(now)) is BusState.SILENT, "silence")
    assert fleet.read(lambda view, now: view.nodes(now))[0].status is NodeStatus.STALE
    returned = Teller("alpha", incarnation=2, port=teller.address.port)
    close_at_end(returned)
    wait_until(lambda: fleet.read(lambda view, now: view.nodes(now))[0].restarts == 1, "the new incarnation")
    assert fleet.read(lambda view, now: view.bus_state(now)) is BusState.LIVE


def test_a_bus_of_another_fleet_is_not_heard_and_its_refusal_told_once(
    close_at_end: Keep, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = Teller("stranger", key=FleetKey(b"x" * 32))
    own = Teller("own")
    close_at_end(stranger)
    close_at_end(own)
    fleet = LiveFleet()
    feed = BusFeed(fleet, KEY.telemetry_key(), addresses=[stranger.address, own.address])
    close_at_end(feed)
    feed.start()
    wait_until(lambda: names(fleet) == ["own"], "our own node")
    wait_until(lambda: feed.figures().get("handshakes_rejected", 0) > 0, "a refused handshake")
    wait_until(lambda: "a bus refused this dashboard" in caplog.text, "a line")
    stranger.say("let me in")
    own.say("after it")
    wait_until(lambda: bool(fleet.read(lambda view, now: view.logs.newest())) or own.say("again") is not None, "a line")
    assert names(fleet) == ["own"]
    assert caplog.text.count("a bus refused this dashboard") == 1


def test_local_nodes_are_found_by_what_they_leave_under_the_home(close_at_end: Keep, tmp_path: Path) -> None:
    teller = Teller("alpha")
    close_at_end(teller)
    fleet = listening(close_at_end, discover=lambda: local_buses(tmp_path))
    (tmp_path / "run").mkdir()
    row = {"address": "127.0.0.1:1", "bus_port": teller.address.port}
    (tmp_path / "run" / "primary.ready").write_text(json.dumps(row), encoding="utf-8")
    wait_until(lambda: names(fleet) == ["alpha"], "the node that started later")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("fleet.json", '[{"bus_address": "127.0.0.1:5000"}, {"bus_address": ""}, {}, 7]', {Address("127.0.0.1", 5000)}),
        ("fleet.json", "not json", set()),
        ("fleet.json", '{"a": 1}', set()),
        ("fleet.json", '[{"bus_address": "nonsense"}]', set()),
        ("w.ready", '{"address": "[::1]:1", "bus_port": 6000}', {Address("::1", 6000)}),
        ("w.ready", '{"address": "h:1", "bus_port": 70000}', set()),
        ("w.ready", '{"address": 3, "bus_port": 7}', set()),
        ("w.ready", "[]", set()),
    ],
)
def test_files_of_local_nodes_are_read_with_distrust(tmp_path: Path, name: str, text: str, expected: set[Address]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text(text, encoding="utf-8")
    assert local_buses(tmp_path) == expected


def test_the_hub_wakes_who_waits_and_stops_waiting_when_it_closes() -> None:
    fleet = LiveFleet()
    fleet.tick()
    number = fleet.wait(0, 5.0)
    assert number == 1
    fleet.tick()
    assert fleet.wait(number, 5.0) == 2
    fleet.close()
    started = time.monotonic()
    fleet.wait(2, 60.0)
    assert time.monotonic() - started < 30
