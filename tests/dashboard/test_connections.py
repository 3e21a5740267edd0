"""Connections of the web server: slow senders and the many of one address give their places back."""

from __future__ import annotations

import contextlib
import http.client
import socket
from dataclasses import dataclass, field
from typing import Any

import pytest

from dashboard import connections, server
from dashboard.connections import REQUEST_S, ConnectionRules
from tests.dashboard.web_kit import Web
from tests.fleet_rig import wait_until

HALF = b"POST /v1/network/nodes/register/redeem HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000\r\n\r\n{"


@dataclass(eq=False)
class FakeChannel:
    """A connection as the rules see it."""

    addr: Any = ("192.0.2.1", 1)
    request: Any = None
    requests: list[Any] = field(default_factory=list)
    creation_time: float = 0.0
    will_close: bool = False


def test_an_incomplete_request_has_a_deadline_whatever_trickles_in() -> None:
    rules = ConnectionRules(10)
    slow, quick, idle, answered = (
        FakeChannel(request="a"),
        FakeChannel(request="b"),
        FakeChannel(),
        FakeChannel(requests=["x"]),
    )
    channels = [slow, quick, idle, answered]
    assert rules.enforce(channels, 0.0) == 0
    quick.request = "c"
    assert rules.enforce(channels, REQUEST_S) == 0
    assert rules.enforce(channels, REQUEST_S + 0.1) == 1
    assert [channel.will_close for channel in channels] == [True, False, False, False]
    assert rules.enforce([quick], 2 * REQUEST_S + 0.1) == 1


def test_an_address_has_a_share_and_its_newest_connections_go_unless_they_are_answered() -> None:
    rules = ConnectionRules(2)
    mine = [FakeChannel(creation_time=number) for number in range(3)]
    streams = [FakeChannel(creation_time=9, requests=["x"])]
    other = FakeChannel(addr=("192.0.2.2", 1))
    assert rules.enforce([*mine, *streams, other], 0.0) == 2
    assert [channel.will_close for channel in [*mine, *streams, other]] == [False, True, True, False, False]
    assert ConnectionRules(0).enforce(streams, 0.0) == 0


def test_slow_senders_are_cut_off_by_the_real_server(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.5)
    with socket.create_connection((web.server.address.host, web.server.address.port), 20) as slow:
        slow.sendall(HALF)
        assert slow.recv(100) == b""
    assert web.call("GET", "/healthz").status == 200


def test_half_requests_of_one_address_leave_room_for_others(web: Web) -> None:
    """More connections than there are places: a request is answered well before the half ones have timed out."""
    with contextlib.ExitStack() as stack:
        for _ in range(server.CONNECTIONS_MAX + 20):
            opened = stack.enter_context(socket.create_connection((web.server.address.host, web.server.address.port), 20))
            with contextlib.suppress(OSError):
                opened.sendall(HALF)
        wait_until(lambda: is_answered(web), "an answer")


def is_answered(web: Web) -> bool:
    """The newest connections may be cut while there are too many."""
    try:
        return web.call("GET", "/healthz").status == 200
    except (OSError, http.client.HTTPException):
        return False
