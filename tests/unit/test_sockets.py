"""Addresses, port ranges and binding."""

from __future__ import annotations

import threading

import pytest
import zmq

from kakeya_zmq.io import sockets
from kakeya_zmq.io.addresses import Address, PortRange, parse_address, parse_port_range
from kakeya_zmq.io.wake_up import WakeUp
from tests.loopback.lane_support import HOST, clean_context
from wire import limits
from wire.errors import ConfigError, LocalProtocolError, PortInUseError


@pytest.mark.parametrize(
    ("text", "host", "port", "endpoint"),
    [
        ("127.0.0.1:5555", "127.0.0.1", 5555, "tcp://127.0.0.1:5555"),
        (" mac-studio.local:0 ", "mac-studio.local", 0, "tcp://mac-studio.local:0"),
        ("[::1]:5555", "::1", 5555, "tcp://[::1]:5555"),
        ("[fe80::1%en0]:65535", "fe80::1%en0", 65_535, "tcp://[fe80::1%en0]:65535"),
    ],
)
def test_addresses(text: str, host: str, port: int, endpoint: str) -> None:
    address = parse_address(text)
    assert address == Address(host, port)
    assert address.zmq_endpoint() == endpoint
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        ":5555",
        "host:",
        "host:port",
        "host:65536",
        "host:-1",
        "::1:5555",
        "[::1]",
        "[host]:1",
        "*:5555",
        "tcp://host:1",
        "ho st:1",
        "a:1:2",
        "[::1]x:1",
        "host:１",
        "-host:1",
    ],
)
def test_wrong_addresses_are_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(text)
    assert caught.value.remedy


def test_port_ranges() -> None:
    assert parse_port_range("7000-7099") == PortRange(7000, 7099)
    assert parse_port_range("7000") == PortRange(7000, 7000)
    for text in ("", "7-", "9-8", "0-5", "1-65536", "a-b"):
        with pytest.raises(ConfigError):
            parse_port_range(text)


def test_binding_tells_the_real_port_and_names_a_taken_one() -> None:
    with clean_context() as context:
        first, second = (sockets.create_socket(context, zmq.PULL, sockets.LANE_PULL) for _ in range(2))
        with first, second:
            address = sockets.bind(first, Address(HOST, 0))
            assert address.host == HOST
            assert address.port > 0
            with pytest.raises(PortInUseError, match=str(address.port)) as caught:
                sockets.bind(second, address)
            assert "choose another port" in caught.value.remedy
            with pytest.raises(PortInUseError, match="every port"):
                sockets.bind_in_range(second, HOST, PortRange(address.port, address.port))
            with pytest.raises(ConfigError, match="cannot listen"):
                sockets.bind(second, Address("192.0.2.1", 0))
            assert sockets.bind(second, Address("localhost", 0)).port > 0


def test_a_port_range_is_searched_for_a_free_port() -> None:
    with clean_context() as context:
        pulls = [sockets.create_socket(context, zmq.PULL, sockets.LANE_PULL) for _ in range(2)]
        with pulls[0], pulls[1]:
            taken = sockets.bind(pulls[0], Address(HOST, 0)).port
            last = min(taken + 50, 65_535)
            found = sockets.bind_in_range(pulls[1], HOST, PortRange(taken, last))
            assert taken < found.port <= last


@pytest.mark.parametrize(
    ("kind", "profile"),
    [
        (zmq.ROUTER, sockets.CONTROL_SERVER),
        (zmq.DEALER, sockets.CONTROL_CLIENT),
        (zmq.PUB, sockets.BUS_PUB),
        (zmq.SUB, sockets.BUS_SUB),
        (zmq.PUSH, sockets.LANE_PUSH),
        (zmq.PULL, sockets.LANE_PULL),
    ],
)
def test_profiles_bound_every_socket(kind: int, profile: sockets.SocketProfile) -> None:
    with clean_context() as context, sockets.create_socket(context, kind, profile) as socket:
        assert socket.getsockopt(zmq.MAXMSGSIZE) == profile.message_bytes_max
        assert profile.message_bytes_max >= limits.KIB  # less than 276 breaks the handshake itself
        assert socket.getsockopt(zmq.LINGER) == profile.linger_ms
        assert socket.getsockopt(zmq.RCVHWM) == profile.queue_messages > 0
        assert socket.getsockopt(zmq.SNDHWM) == (profile.send_queue_messages or profile.queue_messages)
        assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 0
        assert socket.getsockopt(zmq.HANDSHAKE_IVL) == limits.HANDSHAKE_INTERVAL_MS
        assert socket.getsockopt(zmq.IDENTITY) == b""
        with pytest.raises(LocalProtocolError):
            sockets.create_socket(context, zmq.PAIR, profile)


def test_an_old_libzmq_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sockets.check_libzmq()
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: (4, 3, 2))
    with pytest.raises(ConfigError, match=r"4\.3\.2"):
        sockets.check_libzmq()


def test_a_wake_up_ends_a_poll_and_outlives_its_close() -> None:
    wake_up = WakeUp()
    poller = zmq.Poller()
    poller.register(wake_up.fileno(), zmq.POLLIN)
    assert poller.poll(0) == []
    for _ in range(100_000):  # far more than the pipe holds: notify never blocks
        wake_up.notify()
    assert poller.poll(0)
    wake_up.drain()
    assert poller.poll(0) == []
    thread = threading.Thread(target=wake_up.notify)
    thread.start()
    assert poller.poll(20_000)
    thread.join()
    wake_up.close()
    wake_up.notify()
