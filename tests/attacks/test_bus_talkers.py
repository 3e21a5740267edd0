"""A holder of the telemetry key, who may read and is no member, talks to a node's bus instead."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final

import psutil
import pytest
import zmq

from kakeya_zmq.io.bus_publisher import REFUSED_TALKER
from kakeya_zmq.io.connections import REFUSED_CROWDED, REFUSED_UNFINISHED
from tests.attacks.kit import Siege, lone_cache
from tests.fleet_rig import wait_until
from tests.vectors import independent as wire

NODE: Final = b"\x42"
TALKERS: Final = 3
SECONDS: Final = 1.5
CONNECTIONS_MAX: Final = 64
READERS_MAX: Final = 56
"""Of those places: the others are kept for newcomers."""


@pytest.fixture(scope="module")
def narrow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    with lone_cache(
        request, tmp_path_factory.mktemp("talkers"), "narrow", "--max-connections", str(CONNECTIONS_MAX)
    ) as siege:
        yield siege


def bus_port(siege: Siege) -> int:
    return int(siege.status().sections["node"]["bus_port"] or 0)


@contextlib.contextmanager
def reader(siege: Siege, kind: int, host: str = "127.0.0.1") -> Iterator[zmq.Socket[bytes]]:
    """Connected to the bus with the keys that the telemetry key gives."""
    port = bus_port(siege)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(kind)
    socket.linger = 0
    public, secret = wire.bus_curve_pair(wire.purpose_key(siege.psk, "kz bus telemetry"))
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = public, secret, public
    socket.connect(f"tcp://{host}:0;127.0.0.1:{port}")
    try:
        yield socket
    finally:
        socket.close(linger=0)
        context.term()


def talk(siege: Siege, message: list[bytes], until: float) -> None:
    """It comes back as often as it is cut."""
    with reader(siege, zmq.XSUB) as socket:
        socket.sndhwm = 100
        while time.monotonic() < until:
            try:
                socket.send_multipart(message, zmq.DONTWAIT)
            except zmq.Again:
                socket.poll(10, zmq.POLLOUT)


@pytest.mark.parametrize(
    ("frame", "frames", "reason"),
    [
        (bytes(30_000), 15, REFUSED_UNFINISHED),
        (bytes(60_000), 200, REFUSED_UNFINISHED),
        (bytes(4_000), 4_000, REFUSED_UNFINISHED),
        (b"x" * 900, 1, REFUSED_TALKER),
        (b"", 15, REFUSED_TALKER),
        (b"\x01" + NODE, 1, REFUSED_TALKER),
    ],
    ids=["fifteen", "large", "thousands", "small", "empty", "subscriptions"],
)
def test_a_reader_that_talks_is_cut_and_fills_no_memory(siege: Siege, frame: bytes, frames: int, reason: str) -> None:
    with siege.expect(reason), reader(siege, zmq.SUB) as honest:
        honest.setsockopt(zmq.SUBSCRIBE, NODE)
        until = time.monotonic() + SECONDS
        talkers = [threading.Thread(target=talk, args=(siege, [frame] * frames, until)) for _ in range(TALKERS)]
        for each in talkers:
            each.start()
        try:
            assert honest.poll(10_000), "whoever only reads hears the node all the while"
        finally:
            for each in talkers:
                each.join()
        while honest.poll(0):
            honest.recv_multipart()
        assert honest.poll(10_000), "and after it"


def hears(socket: zmq.Socket[bytes]) -> None:
    """From now on, and not just what has come already."""
    while socket.poll(0):
        socket.recv_multipart()
    assert socket.poll(10_000)


def bus_connections(siege: Siege, host: str) -> int:
    """Of one address, finished handshake or not."""
    port = bus_port(siege)
    connections = psutil.Process(siege.node.pid).net_connections("tcp")
    return sum(each.laddr.port == port and bool(each.raddr) and each.raddr.ip.endswith(host) for each in connections)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system has one loopback address only")
def test_readers_from_two_addresses_that_hold_every_place_keep_nobody_out(narrow: Siege) -> None:
    """They come back whenever they are cut."""
    with narrow.expect(REFUSED_CROWDED, count=20), reader(narrow, zmq.SUB) as before, contextlib.ExitStack() as stack:
        before.setsockopt(zmq.SUBSCRIBE, NODE)
        hears(before)
        for number in range(CONNECTIONS_MAX + 16):
            holder = stack.enter_context(reader(narrow, zmq.SUB, f"127.0.0.{2 + number % 2}"))
            holder.setsockopt(zmq.SUBSCRIBE, NODE)
        wait_until(
            lambda: bus_connections(narrow, "127.0.0.2") + bus_connections(narrow, "127.0.0.3") >= READERS_MAX - 1,
            "every place is held",
        )
        for host in ("127.0.0.1", "127.0.0.4", "127.0.0.5", "127.0.0.1"):
            late = stack.enter_context(reader(narrow, zmq.SUB, host))
            late.setsockopt(zmq.SUBSCRIBE, NODE)
            hears(late)
            hears(late)
        with reader(narrow, zmq.SUB, "127.0.0.2") as neighbour:
            neighbour.setsockopt(zmq.SUBSCRIBE, NODE)
            hears(neighbour)
        hears(before)
