"""Attacks below the control plane: plain TCP against the listening ports. A stranger gets nothing and costs nothing."""

from __future__ import annotations

import contextlib
import socket as os_socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import zmq

from tests.attacks.kit import (
    ZMTP_CURVE_GREETING,
    ZMTP_NULL_GREETING,
    ZMTP_PLAIN_GREETING,
    Honest,
    RawClient,
    Relay,
    Siege,
    tcp,
    until_closed,
)
from tests.attacks.test_telemetry import NODE
from tests.fleet_rig import wait_until
from tests.vectors import independent as wire

NOT_OURS = "a connection was refused: it does not speak this protocol"
UNFINISHED = "a connection ended before its handshake was through"
SILENT = "a silent connection was cut: too many of them"
WRONG_PSK = "a connection was refused: its PSK is not this fleet's"
CONNECTIONS = 2_000
SERVED_WITHIN_S = 2.0


def address_of(siege: Siege, port: str) -> str:
    if port == "control":
        return siege.address
    return f"127.0.0.1:{siege.status().sections['node']['bus_port']}"


@pytest.fixture(params=["control", "bus"])
def address(request: pytest.FixtureRequest, siege: Siege) -> str:
    return address_of(siege, request.param)


def send_until_cut(connection: os_socket.socket, data: bytes, most_bytes: int) -> int:
    """Send the same bytes again and again; how many went out before the other side hung up."""
    sent = 0
    connection.settimeout(10)
    with contextlib.suppress(OSError):
        while sent < most_bytes:
            sent += connection.send(data)
    return sent


def test_noise(siege: Siege, address: str) -> None:
    with siege.expect(NOT_OURS, UNFINISHED, count=3):
        for noise in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20, b"\xff" * 500, bytes(500)):
            with tcp(address) as connection, contextlib.suppress(OSError):  # cut in the middle of it
                connection.sendall(noise)
                connection.shutdown(os_socket.SHUT_WR)
                until_closed(connection)


def test_the_null_mechanism(siege: Siege, address: str) -> None:
    with siege.expect(NOT_OURS), tcp(address) as connection:
        connection.sendall(ZMTP_NULL_GREETING)
        # A greeting is all that a stranger hears.
        assert len(until_closed(connection)) <= 64


def test_an_endless_multipart_message(siege: Siege, address: str) -> None:
    """libzmq would buffer frames for ever that have a successor; before the handshake there are no frames."""
    frame = b"\x03" + struct.pack(">Q", 32_768) + bytes(32_768)
    with siege.expect(NOT_OURS, count=10):
        for _ in range(10):
            with contextlib.suppress(ConnectionError), tcp(address) as connection:
                connection.sendall(ZMTP_NULL_GREETING)
                assert send_until_cut(connection, frame, 64 * 2**20) < 16 * 2**20


@pytest.mark.parametrize(
    "greeting", [ZMTP_NULL_GREETING, ZMTP_CURVE_GREETING, ZMTP_PLAIN_GREETING], ids=["null", "curve", "plain"]
)
@pytest.mark.parametrize("flags", [0x02, 0x03, 0x06], ids=["message", "more", "command"])
def test_two_gigabytes_announced(siege: Siege, greeting: bytes, flags: int) -> None:
    """A length is no reason to allocate: it is looked at before, and who claims too much is cut at once."""
    with siege.expect(NOT_OURS, UNFINISHED, count=4), no_memory_set_aside(siege) as look:
        for _ in range(4):
            with contextlib.suppress(ConnectionError), tcp(siege.address) as connection:
                connection.sendall(greeting + claim(flags))
                look_until(lambda connection=connection: hung_up(connection), look)  # type: ignore[misc]


@pytest.mark.parametrize("flags", [0x02, 0x03, 0x06], ids=["message", "more", "command"])
@pytest.mark.parametrize("port", ["control", "bus"])
def test_two_gigabytes_announced_by_a_member(siege: Siege, port: str, flags: int) -> None:
    """From behind the handshake, where a length is read before anything is opened: the same."""
    with Honest(siege.node) as honest, no_memory_set_aside(siege) as look, Relay(address_of(siege, port)) as relay:
        with member_behind(relay, port, siege.psk):
            relay.say(claim(flags))
            look_until(relay.hung_up.is_set, look)
        served = honest.answers
        wait_until(lambda: honest.answers > served or bool(honest.failures), "the honest client is still served")
    assert honest.failures == []


def claim(flags: int) -> bytes:
    """A ZMTP frame that says to be 2 GiB long, and the first of it."""
    return bytes([flags]) + struct.pack(">Q", 2 * 2**30) + bytes(1000)


@contextlib.contextmanager
def no_memory_set_aside(siege: Siege) -> Iterator[Callable[[], None]]:
    """Virtual memory is measured whenever the given function is called: what is allocated and not touched counts, too."""
    process = psutil.Process(siege.node.pid)
    before = most = process.memory_info().vms

    def look() -> None:
        nonlocal most
        most = max(most, process.memory_info().vms)

    yield look
    assert most - before < 1 * 2**30


def look_until(cut: Callable[[], bool], look: Callable[[], None]) -> None:
    def looked() -> bool:
        look()
        return cut()

    wait_until(looked, "the connection is cut", 20)


def hung_up(connection: os_socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return not connection.recv(65_536)
    except TimeoutError:
        return False
    except OSError:
        return True


@contextlib.contextmanager
def member_behind(relay: Relay, port: str, psk: bytes) -> Iterator[None]:
    """A member whose handshake at the node's port, through the relay, is done."""
    if port == "control":
        with RawClient(relay.address, psk, reconnects=False) as client:
            client.join()
            yield
        return
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.linger, reader.reconnect_ivl = 0, -1
        public, secret = wire.bus_curve_pair(wire.purpose_key(psk, "kz bus telemetry"))
        reader.curve_publickey, reader.curve_secretkey, reader.curve_serverkey = public, secret, public
        reader.setsockopt(zmq.SUBSCRIBE, bytes([NODE]))
        reader.connect(f"tcp://{relay.address}")
        assert reader.poll(20_000), "nothing is heard"
        yield


def test_a_curve_hello_without_the_fleets_key(siege: Siege, address: str) -> None:
    hello = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + b"\x11" * 32 + bytes(8) + b"\x22" * 80
    with siege.expect(WRONG_PSK, NOT_OURS), tcp(address) as connection:
        connection.sendall(ZMTP_CURVE_GREETING + hello)
        until_closed(connection)


# --- holding connections ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def held(address: str, count: int, first_bytes: bytes = b"") -> Iterator[list[os_socket.socket]]:
    connections: list[os_socket.socket] = []
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(tcp(address))
            if first_bytes:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(first_bytes)
            connections.append(connection)
        yield connections


def newcomer_is_served(siege: Siege) -> float:
    began = time.monotonic()
    siege.status()
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("port", "first_bytes"),
    [("control", b""), ("control", ZMTP_CURVE_GREETING), ("bus", ZMTP_CURVE_GREETING)],
    ids=["silent", "greeted", "bus"],
)
def test_two_thousand_idle_connections(siege: Siege, port: str, first_bytes: bytes) -> None:
    """They are cut as others come; whoever comes with the key is served at once, during and after."""
    address = address_of(siege, port)
    descriptors = psutil.Process(siege.node.pid).num_fds()
    with siege.expect(SILENT, count=CONNECTIONS // 10), held(address, CONNECTIONS, first_bytes) as connections:
        assert newcomer_is_served(siege) < 5.0
        wait_until(lambda: psutil.Process(siege.node.pid).num_fds() < descriptors + CONNECTIONS // 2, "most are cut")
        assert len(connections) == CONNECTIONS
    assert newcomer_is_served(siege) < SERVED_WITHIN_S
    wait_until(lambda: psutil.Process(siege.node.pid).num_fds() < descriptors + 50, "all are gone")


def test_a_slow_handshake(siege: Siege) -> None:
    """Greetings byte by byte on many connections: cut after the handshake's time, newcomers are served all the while."""
    stop = threading.Event()
    before = siege.refusals().get(UNFINISHED, 0)

    def drip(connections: list[os_socket.socket]) -> None:
        for byte in ZMTP_CURVE_GREETING:
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.send(bytes([byte]))
            if stop.wait(0.2):
                return

    with siege.expect(UNFINISHED, count=100), held(siege.address, 200) as connections:
        thread = threading.Thread(target=drip, args=(connections,))
        thread.start()
        try:
            assert newcomer_is_served(siege) < 5.0
            wait_until(lambda: siege.refusals().get(UNFINISHED, 0) >= before + 100, "slow ones are cut while they go on")
        finally:
            stop.set()
            thread.join()
    assert newcomer_is_served(siege) < SERVED_WITHIN_S


def test_a_node_that_was_paused_is_not_taken_for_a_stranger(siege: Siege) -> None:
    """A handshake that was left unfinished says nothing about anybody's key."""
    before = siege.refusals().get(WRONG_PSK, 0)
    with siege.expect(UNFINISHED), tcp(siege.address) as connection:
        connection.sendall(ZMTP_CURVE_GREETING)
        connection.shutdown(os_socket.SHUT_RDWR)
    assert siege.refusals().get(WRONG_PSK, 0) == before


def test_connections_that_come_and_go(siege: Siege, address: str) -> None:
    with siege.expect(UNFINISHED, count=1500):
        for _ in range(1500):
            with tcp(address):
                pass
    assert newcomer_is_served(siege) < SERVED_WITHIN_S
