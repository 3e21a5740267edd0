"""A holder of the telemetry key, who may read and is no member, talks to a node's bus instead."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final

import pytest
import zmq

from kakeya_zmq.io.bus_publisher import REFUSED_TALKER
from kakeya_zmq.io.connections import REFUSED_UNFINISHED
from tests.attacks.kit import Siege
from tests.vectors import independent as wire

NODE: Final = b"\x42"
TALKERS: Final = 3
SECONDS: Final = 1.5


@contextlib.contextmanager
def reader(siege: Siege, kind: int) -> Iterator[zmq.Socket[bytes]]:
    """Connected to the bus with the keys that the telemetry key gives."""
    port = int(siege.status().sections["node"]["bus_port"] or 0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(kind)
    socket.linger = 0
    public, secret = wire.bus_curve_pair(wire.purpose_key(siege.psk, "kz bus telemetry"))
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = public, secret, public
    socket.connect(f"tcp://127.0.0.1:{port}")
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
