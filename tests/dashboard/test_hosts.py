"""Which Host headers are answered to: a name that was bent to this machine's address is refused."""

from __future__ import annotations

import http.client
import socket

import pytest

from dashboard.hosts import host_rule
from tests.dashboard.web_kit import API_KEY, Web
from wire.errors import ConfigError


@pytest.mark.parametrize(
    ("bound", "further", "header", "allowed"),
    [
        ("127.0.0.1", (), "127.0.0.1:8090", True),
        ("127.0.0.1", (), "localhost", True),
        ("127.0.0.1", (), "LOCALHOST.:1", True),
        ("127.0.0.1", (), "[::1]:8090", True),
        ("::1", (), "[::1]", True),
        ("127.0.0.7", (), "127.0.0.7:1", True),
        ("127.0.0.1", (), "evil.example", False),
        ("127.0.0.1", (), "192.168.1.20", False),
        ("127.0.0.1", (), "127.0.0.1.evil.example", False),
        ("127.0.0.1", (), "localhost@evil", False),
        ("127.0.0.1", (), "", False),
        ("127.0.0.1", ("kakeya.example",), "kakeya.example:443", True),
        ("127.0.0.1", ("[2001:db8::7]",), "[2001:db8::7]:443", True),
        ("127.0.0.1", ("2001:db8::7",), "[2001:db8::7]", True),
        ("192.168.1.20", (), "192.168.1.20:8090", True),
        ("192.168.1.20", (), "192.168.1.21:8090", False),
        ("192.168.1.20", (), "localhost", False),
        ("192.168.1.20", (), socket.gethostname(), True),
        ("0.0.0.0", (), "192.168.1.20:8090", True),
        ("::", (), "[2001:db8::7]", True),
        ("0.0.0.0", (), "localhost:8090", True),
        ("0.0.0.0", (), f"{socket.gethostname().partition('.')[0]}.local", True),
        ("0.0.0.0", (), "evil.example", False),
    ],
)
def test_names_that_are_answered_to(bound: str, further: tuple[str, ...], header: str, allowed: bool) -> None:
    assert host_rule(bound, further).allows(header) is allowed


@pytest.mark.parametrize("name", ["", "http://a", "a:80", "a b", "*", "a/b"])
def test_a_further_host_is_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match="host name"):
        host_rule("127.0.0.1", (name,))


@pytest.mark.parametrize("path", ["/", "/v1/network/summary", "/v1/network/events?once=true", "/nothing"])
def test_another_host_is_refused_on_every_route_also_with_the_key(web: Web, path: str) -> None:
    answer = web.call("GET", path, key=API_KEY, headers={"Host": "evil.example"})
    assert answer.status == 421
    assert answer.json["detail"]
    assert web.call("GET", "/healthz", headers={"Host": f"localhost:{web.server.address.port}"}).status == 200


def test_a_request_without_host_is_refused(web: Web) -> None:
    connection = http.client.HTTPConnection(web.server.address.host, web.server.address.port, timeout=20)
    try:
        connection.putrequest("GET", "/healthz", skip_host=True)
        connection.endheaders()
        assert connection.getresponse().status == 421
    finally:
        connection.close()
