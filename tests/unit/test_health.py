"""The health port over real HTTP: whom it answers."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from daemons.health import HealthBoard, HealthServer, Liveness

PATHS = ("/healthz", "/v1/runtime/liveness", "/v1/runtime/memory")
SECRET = "123456789"


@pytest.fixture
def server() -> Iterator[HealthServer]:
    board = HealthBoard()
    board.put(Liveness("idle", 1), {"active_bytes": int(SECRET)})
    made = HealthServer(board, 0)
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
