"""The health port over real HTTP: whom it answers."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from daemons import health_server
from daemons.health import HealthBoard, Liveness
from daemons.health_server import HealthServer

PATHS = ("/healthz", "/v1/runtime/liveness", "/v1/runtime/memory")
SECRET = "123456789"


@pytest.fixture
def server() -> Iterator[HealthServer]:
    board = HealthBoard()
    board.put(Liveness("idle", 1), {"active_bytes": int(SECRET)})
    made = HealthServer(board.answer, 0)
    yield made
    made.close()


def ask(server: HealthServer, path: str, *hosts: str, version: str = "HTTP/1.1") -> tuple[int, str]:
    """(status, everything that was answered)"""
    lines = [f"GET {path} {version}", *(f"Host: {host}" for host in hosts), "Connection: close", "", ""]
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall("\r\n".join(lines).encode("latin-1"))
        answer = b""
        while data := connection.recv(65_536):
            answer += data
    text = answer.decode()
    return int(text.split()[1]), text


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "localhost.", "[::1]"])
def test_it_answers_to_the_names_of_loopback_at_any_port(server: HealthServer, path: str, host: str) -> None:
    assert ask(server, path, host)[0] == 200
    assert ask(server, path, f"{host}:{server.port}")[0] == 200
    assert ask(server, path, f"{host}:80")[0] == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8091",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil.example@127.0.0.1",
        "127.0.0.1, evil.example",
        "127.0.0.1\x00",
        "192.0.2.1",
        "0.0.0.0",
        "2130706433",
        "127.1",
        "[::]",
        "",
    ],
)
def test_a_page_whose_name_was_made_to_lead_here_reads_nothing(server: HealthServer, path: str, host: str) -> None:
    status, text = ask(server, path, host)
    assert status in (400, 421)
    assert SECRET not in text
    assert "idle" not in text


def test_two_hosts_or_none_are_refused_but_a_probe_of_the_older_http_is_answered(server: HealthServer) -> None:
    assert ask(server, "/healthz", "127.0.0.1", "evil.example")[0] == 421
    assert ask(server, "/healthz", "evil.example", "127.0.0.1")[0] == 421
    assert ask(server, "/healthz")[0] == 421
    assert ask(server, "/healthz", version="HTTP/1.0")[0] == 200
    assert ask(server, "/healthz", "evil.example", version="HTTP/1.0")[0] == 421


def hold(server: HealthServer) -> socket.socket:
    """A connection whose request is never complete."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.sendall(b"GET /healthz HTTP/1.1\r\n")
    return connection


def trickle(held: list[socket.socket]) -> None:
    """One more header each; those that were cut say so by an error."""
    for each in held:
        with contextlib.suppress(OSError):
            each.sendall(b"X: y\r\n")


def is_cut(connection: socket.socket) -> bool:
    """Waits for its end."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_however_many_requests_are_held_a_probe_is_answered_and_no_thread_or_descriptor_is_spent(
    server: HealthServer,
) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/dev/fd"))
    with contextlib.ExitStack() as stack:
        held = []
        for number in range(10 * health_server.CONNECTIONS_MAX):
            held.append(stack.enter_context(hold(server)))
            if number % 20 == 0:
                trickle(held)
                assert ask(server, "/healthz", "127.0.0.1")[0] == 200
        assert ask(server, "/healthz", "127.0.0.1")[0] == 200
        assert threading.active_count() == threads
        # One more has been let in before the oldest goes; and one is that of the list itself.
        assert len(os.listdir("/dev/fd")) <= descriptors + len(held) + health_server.CONNECTIONS_MAX + 2
        assert all(map(is_cut, held[:20])), "the oldest go"
    assert ask(server, "/healthz", "127.0.0.1")[0] == 200


def test_a_request_has_a_deadline_whatever_trickles_in(server: HealthServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_server, "REQUEST_S", 0.2)
    with hold(server) as slow:
        slow.settimeout(0.01)
        ended = False
        while not ended:
            trickle([slow])
            with contextlib.suppress(TimeoutError):
                try:
                    ended = slow.recv(1) == b""
                except ConnectionError:
                    ended = True
    assert ask(server, "/healthz", "127.0.0.1")[0] == 200


@pytest.mark.parametrize(
    "request_bytes",
    [b"\r\n\r\n", b"GET\r\n\r\n", b"\xff\xfe \x00 HTTP/9.9.9\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n"],
)
def test_requests_that_are_none_end_and_the_next_one_is_answered(server: HealthServer, request_bytes: bytes) -> None:
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(request_bytes)
            while connection.recv(65_536):
                pass
    assert ask(server, "/healthz", "127.0.0.1")[0] == 200


def test_a_request_without_end_is_cut(server: HealthServer) -> None:
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection,
        contextlib.suppress(ConnectionError),
    ):
        connection.sendall(b"GET /" + b"x" * health_server.REQUEST_BYTES_MAX)
        assert connection.recv(1) == b""
    assert ask(server, "/healthz", "127.0.0.1")[0] == 200


def test_an_answer_reaches_whoever_sends_on_after_the_request(server: HealthServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4000\r\n\r\n")
        connection.sendall(b"x" * 4000)
        assert connection.recv(12) == b"HTTP/1.0 200"
