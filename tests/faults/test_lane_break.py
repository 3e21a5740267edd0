"""A bulk connection that breaks ends its lane at once, on both sides, and what had arrived is kept."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kakeya_zmq.io.gate import Gate
from kakeya_zmq.io.lanes import CONNECTION_LOST, LaneGroup
from kakeya_zmq.protocol.effects import LaneFinished
from tests.loopback.lane_support import HOST, clean_context, make_part, same_parts, wait_until
from tests.loopback.test_lanes import Rig
from tests.proxy import Damage, Plane, Proxy, Way, other_loopback
from wire import limits

PARTS = [make_part(number, limits.CHUNK_BYTES_MIN) for number in range(64)]
"""4 MiB: one chunk each."""
BREAKS_AFTER_BYTES = 1_000_000
IDLE_S = 300.0
"""Longer than the test may take: only the end of the connection can end a lane."""


@pytest.fixture
def rig() -> Iterator[Rig]:
    with clean_context() as context:
        gate = Gate(context)
        group = LaneGroup()
        try:
            yield Rig(context, gate, group)
        finally:
            assert group.close_all(10.0)
            gate.close()


def test_a_fetch_whose_connection_breaks(rig: Rig) -> None:
    sender, grant = rig.bind_sender(idle_timeout_s=IDLE_S, credit_bytes=2 * limits.MIB)
    with Proxy(other_loopback(), HOST, {grant.port: Plane.BULK}) as proxy:
        proxy.damage(Plane.BULK, Way.TO_CLIENT, Damage.CLOSE, after=BREAKS_AFTER_BYTES)
        rig.connect_receiver(grant, PARTS, host=other_loopback(), idle_timeout_s=IDLE_S)
        sender.feed(PARTS, final=True)
        ends = [rig.received.wait_for(LaneFinished), rig.sent.wait_for(LaneFinished)]
    assert [(end.ok, end.reason) for end in ends] == [(False, CONNECTION_LOST)] * 2
    arrived = rig.received.parts
    assert 0 < len(arrived) < len(PARTS)
    assert same_parts(arrived, PARTS[: len(arrived)])


def test_a_publish_whose_connection_breaks(rig: Rig) -> None:
    _, grant = rig.bind_receiver([part.meta for part in PARTS], idle_timeout_s=IDLE_S)
    with Proxy(other_loopback(), HOST, {grant.port: Plane.BULK}) as proxy:
        proxy.damage(Plane.BULK, Way.TO_SERVER, Damage.CLOSE, after=BREAKS_AFTER_BYTES)
        rig.connect_sender(grant, PARTS, host=other_loopback(), idle_timeout_s=IDLE_S, credit_bytes=2 * limits.MIB)
        ends = [rig.received.wait_for(LaneFinished), rig.sent.wait_for(LaneFinished)]
    assert [(end.ok, end.reason) for end in ends] == [(False, CONNECTION_LOST)] * 2


def test_strangers_who_come_and_go_do_not_end_a_transfer(rig: Rig) -> None:
    sender, grant = rig.bind_sender(idle_timeout_s=IDLE_S)
    rig.wire(sender)
    for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03"):
        with socket.create_connection((HOST, grant.port), timeout=10) as stranger:
            stranger.sendall(greeting)
    rig.connect_receiver(grant, PARTS, idle_timeout_s=IDLE_S)
    sender.feed(PARTS[:32], final=False)
    wait_until(lambda: len(rig.received.parts) == 32, "half of it has arrived")
    for greeting in (b"", b"\xff" + bytes(8) + b"\x7f\x03"):
        with socket.create_connection((HOST, grant.port), timeout=10) as stranger:
            stranger.sendall(greeting)
    sender.feed(PARTS[32:], final=True)
    assert rig.received.wait_for(LaneFinished).ok
    assert rig.sent.wait_for(LaneFinished).ok
    assert same_parts(rig.received.parts, PARTS)
