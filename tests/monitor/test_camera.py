"""What the monitor says while nothing is heard, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dashboard.feed import BusFeed
from dashboard.fleet_view import BusState
from dashboard.hub import LiveFleet
from dashboard.monitor.screen import NO_BUS, NOT_LET_IN, Camera
from kakeya_zmq.io.addresses import Address
from tests.dashboard.test_feed import Teller
from tests.fleet_rig import wait_until
from wire.keys import FleetKey

KEY = FleetKey(b"k" * 32)


@contextmanager
def camera(*addresses: Address) -> Iterator[Camera]:
    fleet = LiveFleet()
    feed = BusFeed(fleet, KEY.telemetry_key(), addresses=addresses)
    try:
        feed.start()
        yield Camera(fleet, feed.figures)
    finally:
        feed.close()


def test_without_any_bus_it_says_how_to_get_one() -> None:
    with camera() as eye:
        assert eye.take().bus.hint == NO_BUS


def test_a_bus_that_does_not_answer_is_waited_for() -> None:
    teller = Teller("gone")
    address = teller.address
    teller.close()
    with camera(address) as eye:
        wait_until(lambda: eye.take().bus.hint == "waiting for 1 bus to answer", "the hint")


def test_a_bus_of_another_fleet_lets_nobody_in_and_that_is_said() -> None:
    stranger = Teller("stranger", key=FleetKey(b"x" * 32))
    try:
        with camera(stranger.address) as eye:
            wait_until(lambda: eye.take().bus.hint == NOT_LET_IN, "the hint")
            assert eye.take().bus.state is BusState.WAITING
    finally:
        stranger.close()


def test_what_is_heard_is_in_the_picture_and_needs_no_hint() -> None:
    teller = Teller("alpha")
    try:
        with camera(teller.address) as eye:
            wait_until(lambda: [node.node_id for node in eye.take().nodes] == ["alpha"], "the node")
            news = eye.take().bus
            assert (news.state, news.hint) == (BusState.LIVE, "")
    finally:
        teller.close()
