"""Connections of the web server: who is slow, silent or one of too many gives the place back, and holds up nobody."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from dashboard import connections, server
from dashboard.connections import ANSWER_BYTES, ANSWER_S, REQUEST_S, STREAM_ANSWER_S, ConnectionRules, Reason
from dashboard.http import SECURITY_HEADERS
from tests.dashboard.kit import snapshot
from tests.dashboard.web_kit import EventStream, Web
from tests.fleet_rig import wait_until

HALF: Final = b"POST /v1/network/nodes/register/redeem HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000\r\n\r\n{"
SERVED_WITHIN_S: Final = 2.0
"""Whatever others do, who sends his request at once has his answer by then."""


@dataclass(eq=False)
class FakeChannel:
    """A connection as the rules see it."""

    addr: Any = ("192.0.2.1", 1)
    request: Any = None
    requests: list[Any] = field(default_factory=list)
    since: float = 0.0
    total_outbufs_len: int = 0
    sent_bytes: int = 0
    is_cut: bool = False

    def cut(self) -> None:
        self.is_cut = True


def rules(places: int = 100, share: int = 100, unread_bytes: int = 1_000_000) -> ConnectionRules:
    return ConnectionRules(places, share, unread_bytes)


def cut_of(channels: list[FakeChannel]) -> list[bool]:
    return [channel.is_cut for channel in channels]


# --- the rules -------------------------------------------------------------------------------------------------------


def test_an_incomplete_request_has_a_deadline_whatever_trickles_in() -> None:
    slow, quick, idle, answered = (
        FakeChannel(request="a"),
        FakeChannel(request="b", since=1.0),
        FakeChannel(),
        FakeChannel(requests=["x"]),
    )
    channels, judge = [slow, quick, idle, answered], rules()
    assert judge.enforce(channels, REQUEST_S) == 0
    assert judge.enforce(channels, REQUEST_S + 0.1) == 1
    assert cut_of(channels) == [True, False, False, False]
    assert judge.enforce([quick], REQUEST_S + 1.1) == 1
    assert judge.closed[Reason.SLOW_REQUEST] == 2


def test_an_address_has_a_share_and_what_waits_longest_goes_unless_it_is_answered() -> None:
    mine = [FakeChannel(since=number) for number in range(3)]
    streams = [FakeChannel(since=-1, requests=["x"])]
    other = FakeChannel(addr=("192.0.2.2", 1), since=-2)
    judge = rules(share=2)
    assert judge.enforce([*mine, *streams, other], 3.0) == 2
    assert cut_of([*mine, *streams, other]) == [True, True, False, False, False]
    assert judge.closed[Reason.SHARE] == 2
    assert rules(share=0).enforce(streams, 0.0) == 0


def test_without_a_place_the_oldest_of_the_address_that_has_most_goes() -> None:
    many = [FakeChannel(since=number) for number in range(5, 9)]
    few = [FakeChannel(addr=("192.0.2.2", 1), since=number) for number in range(2)]
    served = [FakeChannel(requests=["x"]) for _ in range(3)]
    judge = rules(places=7)
    assert judge.make_room([*many, *few, *served]) == 2
    assert cut_of([*many, *few, *served]) == [True, True, False, False, *[False] * 5]
    assert judge.closed[Reason.NO_PLACE] == 2
    assert judge.make_room([*many[2:], *few, *served]) == 0
    assert rules(places=1).make_room(served) == 0


def test_an_answer_must_leave_at_the_least_rate() -> None:
    stalled, trickling, steady, taken, stream = (
        FakeChannel(total_outbufs_len=9 * ANSWER_BYTES),
        FakeChannel(total_outbufs_len=9 * ANSWER_BYTES),
        FakeChannel(total_outbufs_len=9 * ANSWER_BYTES),
        FakeChannel(),
        FakeChannel(total_outbufs_len=9 * ANSWER_BYTES, requests=["x"]),
    )
    channels, judge = [stalled, trickling, steady, taken, stream], rules(unread_bytes=99 * ANSWER_BYTES)
    for second in range(1, int(ANSWER_S) + 3):
        trickling.sent_bytes += 1
        steady.sent_bytes += int(ANSWER_BYTES / ANSWER_S) + 1
        judge.enforce(channels, float(second))
    assert cut_of(channels) == [True, True, False, False, False]
    assert steady.since > 0.0  # and so it is not the oldest, when there is no place
    judge.enforce([stream], STREAM_ANSWER_S + 1.1)
    assert stream.is_cut
    assert judge.closed[Reason.UNREAD] == 3


def test_answers_of_all_that_wait_are_bounded() -> None:
    many = [FakeChannel(total_outbufs_len=400, since=number) for number in range(3)]
    other = FakeChannel(addr=("192.0.2.2", 1), total_outbufs_len=500, since=-1)
    stream = FakeChannel(total_outbufs_len=900, requests=["x"])
    judge = rules(unread_bytes=1000)
    assert judge.make_room([*many, other, stream]) == 2
    assert cut_of([*many, other, stream]) == [True, True, False, False, False]
    assert judge.closed[Reason.UNREAD_OF_ALL] == 2


# --- the real server -------------------------------------------------------------------------------------------------


def opened(web: Web, data: bytes = b"", *, source: str = "127.0.0.1", receive_bytes: int = 0) -> socket.socket:
    """A connection on which something was sent, as much of it as is taken at once."""
    made = socket.socket()
    if receive_bytes:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    made.bind((source, 0))
    made.settimeout(5.0)
    with contextlib.suppress(OSError):
        made.connect((web.server.address.host, web.server.address.port))
        made.settimeout(0.1)
        made.sendall(data)
    made.settimeout(20.0)
    return made


def read_to_the_end(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def seconds_to_be_served(web: Web, source: str = "127.0.0.1") -> float:
    """From the connection to the answer; a connection that is cut is made again, as browsers do."""
    begun = time.monotonic()
    while time.monotonic() < begun + 20.0:
        with contextlib.suppress(OSError), opened(web, get("/healthz", "Connection: close"), source=source) as connection:
            if connection.recv(100).startswith(b"HTTP/1.1 200"):
                return time.monotonic() - begun
    raise AssertionError("nobody is served")


@pytest.fixture
def large(web: Web) -> Web:
    """Its list of nodes is more than the buffers of the system hold."""
    for number in range(700):
        web.tell(snapshot(), f"node-{number}")
    assert len(web.call("GET", "/v1/network/nodes").body) > 400_000
    return web


def test_slow_senders_are_cut_off_by_the_real_server(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.5)
    with opened(web, HALF) as slow:
        assert slow.recv(100) == b""
    assert web.call("GET", "/healthz").status == 200


def test_readers_that_ask_for_much_at_once_and_never_read_hold_up_nobody(web: Web) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(server.THREADS + 8):
            stack.enter_context(opened(web, get("/openapi.json") * 400, receive_bytes=4096))
        for _ in range(5):
            assert seconds_to_be_served(web) < SERVED_WITHIN_S


def test_an_answer_that_nobody_takes_is_given_up_and_counted(large: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ANSWER_S", 0.5)
    with opened(large, get("/v1/network/nodes"), receive_bytes=4096):
        wait_until(lambda: large.server.closed[Reason.UNREAD] == 1, "the connection is cut", 8.0)


def test_a_byte_now_and_then_does_not_keep_an_answer(large: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ANSWER_S", 0.5)
    given_up_at = time.monotonic() + 8.0
    with opened(large, get("/v1/network/nodes"), receive_bytes=4096) as trickling:
        while not large.server.closed[Reason.UNREAD] and time.monotonic() < given_up_at:
            trickling.recv(1)
            time.sleep(0.02)  # the pace of the reader
        with pytest.raises(ConnectionResetError):
            read_to_the_end(trickling)


def test_a_slow_reader_gets_a_large_answer(large: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty times as fast as 12.5 kB a second, with a twentieth of the time."""
    monkeypatch.setattr(connections, "ANSWER_S", connections.ANSWER_S / 20)
    monkeypatch.setattr(server, "TURN_S", server.TURN_S / 20)
    whole = len(large.call("GET", "/v1/network/nodes").body)
    with opened(large, get("/v1/network/nodes", "Connection: close"), receive_bytes=4096) as slow:
        taken = b""
        begun = time.monotonic()
        while data := slow.recv(4096):
            taken += data
            time.sleep(max(0.0, begun + len(taken) / 250_000 - time.monotonic()))  # the pace of the reader
    assert len(taken.partition(b"\r\n\r\n")[2]) == whole
    assert large.server.closed.total() == 0


def test_a_stream_that_nobody_reads_gives_its_place_back(large: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STREAM_ANSWER_S", 0.5)
    with (
        opened(large, get("/v1/network/events?topics=nodes"), receive_bytes=4096),
        EventStream(large.server.address, "/v1/network/events?topics=bus") as read,
    ):
        read.next("bus")
        wait_until(lambda: large.server.closed[Reason.UNREAD] == 1, "the stream is cut", 8.0)
        large.clocks.pass_time(2.0)
        read.next("bus")
    assert large.server.closed.total() == 1


def test_requests_that_come_at_once_are_answered_one_after_the_other(web: Web) -> None:
    body = b'{"alias":"x","address":"host:1"}'
    post = b"POST /v1/network/nodes/register HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    whole = (get("/healthz") + post + b"\r\n" + get("/nothing")) * 40 + get("/", "Connection: close")
    with opened(web) as connection:
        sender = threading.Thread(target=connection.sendall, args=(whole,))
        sender.start()
        answers = read_to_the_end(connection)
        sender.join()
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answers)]
    assert statuses == [200, 401, 404] * 40 + [200]


def test_half_requests_of_one_address_leave_room_for_others(web: Web) -> None:
    """More connections than there are places: a request is answered well before the half ones have timed out."""
    with contextlib.ExitStack() as stack:
        for _ in range(server.CONNECTIONS_MAX + 20):
            stack.enter_context(opened(web, HALF))
        assert seconds_to_be_served(web) < SERVED_WITHIN_S


@pytest.mark.parametrize("data", [b"", HALF], ids=["silent", "half"])
def test_connections_of_two_addresses_that_wait_keep_nobody_out(web: Web, data: bytes) -> None:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(opened(web, source="127.0.0.3"))
        except OSError:
            pytest.skip("this machine has one loopback address")
        for _ in range(server.CONNECTIONS_MAX // 2 + 20):
            for source in ("127.0.0.1", "127.0.0.2"):
                stack.enter_context(opened(web, data, source=source))
        for source in ("127.0.0.1", "127.0.0.3", "127.0.0.2"):
            assert seconds_to_be_served(web, source) < SERVED_WITHIN_S
    assert web.server.closed[Reason.NO_PLACE] > 0


def test_what_was_closed_is_told_in_one_line(web: Web, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(server.CONNECTIONS_MAX + 20):
            stack.enter_context(opened(web))
        wait_until(lambda: bool(lines(caplog)), "a line", 8.0)
    assert lines(caplog)[0].startswith("closed connections: ")
    assert "no place" in lines(caplog)[0]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "dashboard.server"]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * server.HEADER_BYTES_MAX + b"\r\n\r\n", 431),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: xchunked\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n\r\n", 400),
        (b"\0\r\n\r\n", 400),
    ],
)
def test_errors_that_no_route_makes_have_the_form_of_all_others(web: Web, sent: bytes, status: int) -> None:
    with opened(web, sent) as connection:
        response = http.client.HTTPResponse(connection)
        response.begin()
        answer = json.loads(response.read())
    assert response.status == status
    assert list(answer) == ["detail"]
    assert answer["detail"].isascii()
    expected = {**SECURITY_HEADERS, "Content-Type": "application/json", "Cache-Control": "no-store", "Connection": "close"}
    assert {name: response.headers[name] for name in expected} == expected
