"""The control plane over real sockets: ControlServer and ControlClient on one reactor, strangers beside them."""

from __future__ import annotations

import contextlib
import logging
import socket as os_socket
import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

import psutil
import pytest
import zmq

from kakeya_zmq.io.addresses import Address
from kakeya_zmq.io.connections import REFUSED_NOT_OURS, REFUSED_WRONG_PSK
from kakeya_zmq.io.control_client import NOBODY_THERE, NOT_A_NODE, WRONG_PSK, ControlClient, LinkState, OutgoingRequest
from kakeya_zmq.io.control_server import ControlServer, IncomingRequest
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.protocol.session import PeerInfo
from tests.loopback.reactor_kit import WAIT_S, node, run_until
from tests.loopback.throttle import SlowLink
from wire import limits
from wire.errors import FailureCode, InvalidInput, LocalProtocolError, PortInUseError
from wire.keys import FleetKey
from wire.messages import (
    AppendTokens,
    Credit,
    Done,
    GetSession,
    GetStatus,
    JobProgress,
    ProgressBody,
    ReplyBody,
    RequestBody,
    SessionState,
    Status,
    UpdateBody,
)

Row: TypeAlias = dict[str, int | float | str | bool | None]

LOOPBACK = Address("127.0.0.1", 0)
KEY = FleetKey(b"k" * 32)
OTHER_KEY = FleetKey(b"o" * 32)
PROGRESS = JobProgress(tokens_done=1, tokens_total=2, tokens_reused=0)


class World:
    """A reactor with servers and clients, driven by the test's own thread."""

    def __init__(self) -> None:
        self.reactor = Reactor()
        self.server_node = node("server")
        self._closers: list[Callable[[], None]] = []

    def server(self, on_request: Callable[[IncomingRequest], None], **options: object) -> ControlServer:
        settings: dict[str, object] = {"bind": LOOPBACK, "local": self.server_node, "fleet_key": KEY, **options}
        made = ControlServer(self.reactor, on_request=on_request, **settings)  # type: ignore[arg-type]
        self._closers.append(made.close)
        return made

    def client(self, address: Address, **options: object) -> ControlClient:
        settings: dict[str, object] = {"local": node("client"), "fleet_key": KEY, **options}
        made = ControlClient(self.reactor, address=address, **settings)  # type: ignore[arg-type]
        self._closers.append(made.close)
        return made

    def until(self, condition: Callable[[], bool]) -> None:
        run_until(self.reactor, condition)

    def turns(self, seconds: float) -> None:
        """Let the reactor run on, to see that something does not happen."""
        self.reactor.call_later(seconds, self.reactor.stop)
        self.reactor.run()

    def close(self) -> None:
        for closer in reversed(self._closers):
            closer()
        assert self.reactor.close()


@pytest.fixture
def world() -> Iterator[World]:
    threads = set(threading.enumerate())
    sockets = len(psutil.Process().net_connections(kind="tcp"))
    made = World()
    yield made
    made.close()
    assert made.reactor.callback_errors == 0
    assert set(threading.enumerate()) <= threads
    assert len(psutil.Process().net_connections(kind="tcp")) <= sockets


class Asked:
    """What became of one request."""

    def __init__(self, client: ControlClient, body: RequestBody | None = None, timeout_s: float = WAIT_S) -> None:
        self.replies: list[ReplyBody] = []
        self.failures: list[tuple[FailureCode, str]] = []
        self.progress: list[ProgressBody] = []
        self.request: OutgoingRequest = client.request(
            body or GetStatus(),
            timeout_s=timeout_s,
            on_reply=self.replies.append,
            on_failure=lambda code, message: self.failures.append((code, message)),
            on_progress=self.progress.append,
        )

    @property
    def over(self) -> bool:
        return len(self.replies) + len(self.failures) > 0


def answer_done(request: IncomingRequest) -> None:
    request.reply(Done())


# --- what works -----------------------------------------------------------------------------------------------------


def test_request_progress_update_reply(world: World) -> None:
    open_requests: list[IncomingRequest] = []
    updates: list[UpdateBody] = []

    def on_request(request: IncomingRequest) -> None:
        open_requests.append(request)
        request.on_update = updates.append
        request.progress(PROGRESS)

    ups: list[PeerInfo] = []
    server = world.server(on_request, bus_port=4321)
    client = world.client(server.address, on_up=ups.append, expected_node_id="server")
    asked = Asked(client)
    world.until(lambda: asked.progress == [PROGRESS])
    asked.request.update(Credit(credit_bytes=5))
    world.until(lambda: updates == [Credit(credit_bytes=5)])
    assert open_requests[0].peer.node_id == "client"
    assert [peer.node_id for peer in server.peers()] == ["client"]
    assert not open_requests[0].finished
    state = SessionState(history_tokens=1, kv_bytes=2, idle_ms=3, busy=False)
    open_requests[0].reply(state)
    world.until(lambda: asked.over)
    assert asked.replies == [state]
    assert open_requests[0].finished
    assert (client.state, client.last_error, client.host) == (LinkState.UP, None, "127.0.0.1")
    assert client.round_trip_ms is not None
    assert [(peer.node_id, peer.bus_port) for peer in ups] == [("server", 4321)]


def test_five_hundred_requests_in_flight_are_all_answered_in_order(world: World) -> None:
    waiting: list[IncomingRequest] = []

    def on_request(request: IncomingRequest) -> None:
        # Answers come in bursts, far more of them than the socket's queue takes at once.
        waiting.append(request)
        if len(waiting) == limits.REQUESTS_IN_FLIGHT_MAX or request.request_id == 500:
            for each in waiting:
                assert isinstance(each.body, GetSession)
                each.reply(SessionState(history_tokens=int(each.body.session_id), kv_bytes=0, idle_ms=0, busy=False))
            waiting.clear()

    client = world.client(world.server(on_request).address)
    order: list[int] = []

    def on_reply(body: ReplyBody) -> None:
        assert isinstance(body, SessionState)
        order.append(body.history_tokens)

    for number in range(500):
        client.request(
            GetSession(session_id=str(number)),
            timeout_s=WAIT_S,
            on_reply=on_reply,
            on_failure=lambda code, message: order.append(-1),
        )
    world.until(lambda: len(order) == 500 or -1 in order)
    assert order == list(range(500))


def test_a_burst_of_large_answers_arrives_whole(world: World) -> None:
    rows: tuple[Row, ...] = tuple({"text": "x" * 1000} for _ in range(300))

    def on_request(request: IncomingRequest) -> None:
        request.reply(Status(node_id="server", roles=(), sections={}, peers=rows, recent=()))

    client = world.client(world.server(on_request).address)
    asked = [Asked(client) for _ in range(100)]  # 30 MB
    world.until(lambda: all(each.over for each in asked))
    assert all(len(each.replies) == 1 for each in asked)


def test_requests_asked_from_inside_callbacks_keep_the_order_of_counters(world: World) -> None:
    client = world.client(world.server(answer_done).address)
    done = 0

    def ask(depth: int) -> None:
        def on_reply(body: ReplyBody) -> None:
            nonlocal done
            done += 1
            if depth:
                ask(depth - 1)

        client.request(GetStatus(), timeout_s=WAIT_S, on_reply=on_reply, on_failure=lambda code, message: None)

    for _ in range(300):  # more than may be in flight, so that each reply also releases a waiting request
        ask(2)
    world.until(lambda: done == 900)


def test_requests_wait_for_a_server_that_is_too_busy_to_read(world: World) -> None:
    busy = Reactor()
    server = ControlServer(busy, bind=LOOPBACK, local=world.server_node, fleet_key=KEY, on_request=answer_done)
    busy.start_thread("busy server")
    client = world.client(server.address)
    world.until(lambda: client.state is LinkState.UP)
    busy.stop()
    assert busy.join(WAIT_S)
    # 60 MB: more than the queues of both sockets and the kernel take.
    body = AppendTokens(session_id="s", tokens=bytes(400_000))
    asked = [Asked(client, body) for _ in range(150)]
    assert client._queue
    busy.start_thread("busy server")
    world.until(lambda: all(each.over for each in asked))
    assert all(each.replies == [Done()] for each in asked)
    assert not client._queue
    assert client._queue.size_bytes == 0
    client.close()
    busy.call(server.close)
    assert busy.close()
    server.close()  # harmless after its reactor


def test_more_requests_than_may_wait_fail_with_resource_exhausted(world: World) -> None:
    placeholder = os_socket.socket()
    placeholder.bind(("127.0.0.1", 0))
    client = world.client(Address("127.0.0.1", placeholder.getsockname()[1]))
    asked = [Asked(client) for _ in range(4 * limits.REQUESTS_IN_FLIGHT_MAX + 2)]
    world.until(lambda: asked[-1].over)
    assert [each.over for each in asked].count(True) == 2
    assert {code for each in asked for code, _ in each.failures} == {FailureCode.RESOURCE_EXHAUSTED}
    placeholder.close()


# --- how requests end ------------------------------------------------------------------------------------------------


def test_cancel_reaches_the_server_and_a_late_reply_is_ignored_on_both_sides(world: World) -> None:
    open_requests: list[IncomingRequest] = []
    ended: list[str] = []

    def on_request(request: IncomingRequest) -> None:
        open_requests.append(request)
        request.on_end = ended.append

    client = world.client(world.server(on_request).address)
    asked, crossing = Asked(client), Asked(client)
    world.until(lambda: len(open_requests) == 2)
    asked.request.cancel()
    asked.request.cancel()
    # This answer and the cancel of the same request cross on their way.
    open_requests[1].reply(Done())
    crossing.request.cancel()
    world.until(lambda: len(ended) == 1)
    open_requests[0].reply(Done())
    open_requests[0].progress(PROGRESS)
    open_requests[0].fail(FailureCode.INTERNAL, "late")
    later = Asked(client)
    world.until(lambda: len(open_requests) == 3)
    open_requests[2].reply(Done())
    world.until(lambda: later.over)
    assert not asked.over
    assert not crossing.over
    assert not asked.progress
    assert len(ended) == 1


def test_a_deadline_ends_a_request_on_both_sides(world: World) -> None:
    ended: list[str] = []

    def on_request(request: IncomingRequest) -> None:
        request.on_end = ended.append

    client = world.client(world.server(on_request).address)
    world.until(lambda: client.state is LinkState.UP)
    asked = Asked(client, timeout_s=0.1)
    world.until(lambda: asked.over and bool(ended))
    assert [code for code, _ in asked.failures] == [FailureCode.DEADLINE_EXCEEDED]
    assert len(ended) == 1


def test_on_end_does_not_follow_an_answer(world: World) -> None:
    ended: list[str] = []

    def on_request(request: IncomingRequest) -> None:
        request.on_end = ended.append
        request.fail(FailureCode.NOT_FOUND, "no such thing")

    server = world.server(on_request)
    client = world.client(server.address)
    asked = Asked(client)
    world.until(lambda: asked.over)
    assert asked.failures == [(FailureCode.NOT_FOUND, "no such thing")]
    client.close()
    world.until(lambda: not server.peers())
    assert ended == []


def test_a_connection_that_broke_ends_its_requests_at_the_next_message(world: World) -> None:
    ended: list[str] = []
    opened: list[IncomingRequest] = []

    def on_request(request: IncomingRequest) -> None:
        request.on_end = ended.append
        opened.append(request)

    server = world.server(on_request)
    with SlowLink(server.address.port, 1000.0) as link:
        Asked(world.client(Address("127.0.0.1", link.port)))
        world.until(lambda: bool(opened))

    def told() -> bool:
        opened[0].progress(JobProgress(tokens_done=1, tokens_total=9, tokens_reused=0))
        return bool(ended)

    world.until(told)
    assert ended == ["the session ended: its connection is gone"]
    assert not server.refusals
    assert server.idle


def test_a_client_that_leaves_ends_its_requests(world: World) -> None:
    ended: list[str] = []
    downs: list[str] = []

    def on_request(request: IncomingRequest) -> None:
        request.on_end = ended.append

    server = world.server(on_request, on_peer_down=lambda peer, reason: downs.append(peer.node_id))
    client = world.client(server.address)
    asked = Asked(client)
    world.until(lambda: bool(server._requests))
    client.close("done here")
    assert client.state is LinkState.CLOSED
    assert [code for code, _ in asked.failures] == [FailureCode.CANCELLED]
    world.until(lambda: downs == ["client"])
    assert len(ended) == 1
    assert "done here" in ended[0]
    refused = Asked(client)
    assert not refused.over  # callbacks never come from inside request()
    world.until(lambda: refused.over)
    assert refused.failures[0][0] is FailureCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("raised", "code", "told"),
    [
        (ValueError("a secret"), FailureCode.INTERNAL, "the request failed inside the node; its log says where"),
        (LocalProtocolError("our bug"), FailureCode.INTERNAL, "the request failed inside the node; its log says where"),
        (InvalidInput("not like this"), FailureCode.INVALID_ARGUMENT, "not like this"),
    ],
)
def test_an_exception_in_a_handler_fails_that_request_only(
    world: World, caplog: pytest.LogCaptureFixture, raised: Exception, code: FailureCode, told: str
) -> None:
    def on_request(request: IncomingRequest) -> None:
        if isinstance(request.body, GetStatus):
            raise raised
        request.reply(Done())

    client = world.client(world.server(on_request).address)
    with caplog.at_level(logging.ERROR):
        bad, good = Asked(client), Asked(client, GetSession(session_id="s"))
        world.until(lambda: bad.over and good.over)
    assert bad.failures == [(code, told)]
    assert good.replies == [Done()]
    assert "secret" not in caplog.text


def test_an_exception_after_the_answer_changes_nothing_for_the_peer(world: World) -> None:
    def on_request(request: IncomingRequest) -> None:
        request.reply(Done())
        with pytest.raises(LocalProtocolError, match="twice"):
            request.reply(Done())
        raise ValueError

    server = world.server(on_request)
    asked = Asked(world.client(server.address))
    world.until(lambda: asked.over)
    assert asked.replies == [Done()]
    assert server.counters["handler_errors"] == 1


def test_an_answer_that_cannot_be_sent_becomes_a_failure(world: World) -> None:
    def on_request(request: IncomingRequest) -> None:
        rows: tuple[Row, ...] = tuple({"text": "x" * 10_000} for _ in range(200))
        request.reply(Status(node_id="server", roles=(), sections={}, peers=rows, recent=()))

    asked = Asked(world.client(world.server(on_request).address))
    world.until(lambda: asked.over)
    assert [code for code, _ in asked.failures] == [FailureCode.INTERNAL]


def test_a_failing_callback_of_the_client_does_not_hurt_other_requests(world: World) -> None:
    client = world.client(world.server(answer_done).address)

    def on_reply(body: ReplyBody) -> None:
        raise ValueError

    client.request(GetStatus(), timeout_s=WAIT_S, on_reply=on_reply, on_failure=lambda code, message: None)
    asked = Asked(client)
    world.until(lambda: asked.over)
    assert asked.replies == [Done()]
    assert client.counters["callback_errors"] == 1


# --- servers that come and go ---------------------------------------------------------------------------------------


def test_a_client_waits_for_a_server_that_is_not_there_yet(world: World) -> None:
    placeholder = os_socket.socket()
    placeholder.bind(("127.0.0.1", 0))
    address = Address("127.0.0.1", placeholder.getsockname()[1])
    downs: list[str] = []
    client = world.client(address, on_down=downs.append)
    asked = Asked(client)
    world.until(lambda: bool(downs))
    assert (downs, client.last_error, client.state) == ([NOBODY_THERE], NOBODY_THERE, LinkState.DOWN)
    placeholder.close()
    world.server(answer_done, bind=address)
    world.until(lambda: asked.over)
    assert asked.replies == [Done()]
    assert client.last_error is None


def test_a_client_recovers_when_its_server_restarts_without_a_word(world: World) -> None:
    # A server in a reactor of its own, closed without Goodbye, as by kill -9.
    first = Reactor()
    server = ControlServer(first, bind=LOOPBACK, local=world.server_node, fleet_key=KEY, on_request=lambda request: None)
    address = server.address
    first.start_thread("first server")
    downs: list[str] = []
    client = world.client(address, on_down=downs.append)
    lost = Asked(client)
    world.until(lambda: client.state is LinkState.UP)
    assert first.close()
    world.until(lambda: lost.over)
    assert lost.failures[0][0] is FailureCode.UNAVAILABLE
    assert downs
    second = world.server(answer_done, bind=address)
    asked = Asked(client)
    world.until(lambda: asked.over)
    assert asked.replies == [Done()]
    assert client.counters["sessions"] == 2
    assert len(second.peers()) == 1


def test_a_server_that_leaves_says_so(world: World) -> None:
    ended: list[str] = []

    def on_request(request: IncomingRequest) -> None:
        request.on_end = ended.append

    server = world.server(on_request)
    downs: list[str] = []
    client = world.client(server.address, on_down=downs.append)
    asked = Asked(client)
    world.until(lambda: bool(server._requests))
    server.close("maintenance")
    assert ended != []
    world.until(lambda: asked.over and bool(downs))
    assert asked.failures[0][0] is FailureCode.UNAVAILABLE
    assert "maintenance" in downs[0]


def test_a_handler_may_close_the_server(world: World) -> None:
    servers: list[ControlServer] = []

    def on_request(request: IncomingRequest) -> None:
        request.reply(Done())
        servers[0].close("last one")

    servers.append(world.server(on_request))
    asked = Asked(world.client(servers[0].address))
    world.until(lambda: asked.over)
    assert asked.replies == [Done()]


def test_a_taken_port_is_a_clear_error_and_leaves_nothing_behind(world: World) -> None:
    server = world.server(answer_done)
    with pytest.raises(PortInUseError, match="in use"):
        world.server(answer_done, bind=server.address)


def test_another_node_than_the_expected_one_is_not_served(world: World) -> None:
    server = world.server(answer_done)
    client = world.client(server.address, expected_node_id="somebody else")
    asked = Asked(client)
    world.until(lambda: asked.over)
    assert asked.failures[0][0] is FailureCode.UNAVAILABLE
    assert client.last_error == "another node answers at this address"


# --- strangers --------------------------------------------------------------------------------------------------------


def test_a_wrong_psk_is_no_service_and_a_clear_line_on_both_sides(world: World) -> None:
    refused: list[str] = []
    downs: list[str] = []
    server = world.server(answer_done, on_refused=lambda reason, node_id: refused.append(reason))
    stranger = world.client(server.address, fleet_key=OTHER_KEY, on_down=downs.append)
    asked = Asked(stranger, timeout_s=1.0)
    world.until(lambda: asked.over and bool(refused))
    assert asked.failures[0][0] is FailureCode.DEADLINE_EXCEEDED
    assert downs == [WRONG_PSK]
    assert (stranger.last_error, stranger.state) == (WRONG_PSK, LinkState.DOWN)
    assert set(refused) == {REFUSED_WRONG_PSK}
    assert server.refusals[REFUSED_WRONG_PSK] == len(refused)
    assert server.peers() == []
    friend = Asked(world.client(server.address))
    world.until(lambda: friend.over)
    assert friend.replies == [Done()]


def test_something_else_at_the_address_is_not_taken_for_a_server(world: World) -> None:
    listener = os_socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                connection.recv(1024)

    thread = threading.Thread(target=serve)
    thread.start()
    client = world.client(Address("127.0.0.1", listener.getsockname()[1]))
    world.until(lambda: client.last_error is not None)
    assert client.last_error == NOT_A_NODE
    thread.join(WAIT_S)
    listener.close()


def test_a_flood_by_a_stranger_costs_no_memory(world: World) -> None:
    server = world.server(answer_done)
    process = psutil.Process()
    before = process.memory_info().rss
    sent_bytes = 0
    stop = threading.Event()

    def flood() -> None:
        nonlocal sent_bytes
        # The ZMTP 3.0 greeting of a NULL client, then an endless multipart message.
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)
        frame = b"\x03" + (32_768).to_bytes(8, "big") + bytes(32_768)
        while not stop.is_set() and sent_bytes < 200 * limits.MIB:
            try:
                with os_socket.create_connection(("127.0.0.1", server.address.port), timeout=1) as connection:
                    connection.sendall(greeting)
                    while not stop.is_set() and sent_bytes < 200 * limits.MIB:
                        connection.sendall(frame)
                        sent_bytes += len(frame)
            except OSError:
                continue  # cut off, as it should be; try again

    thread = threading.Thread(target=flood)
    thread.start()
    asked = [Asked(world.client(server.address, local=node(f"client-{number}"))) for number in range(3)]
    world.until(lambda: all(each.over for each in asked))
    world.until(lambda: server.refusals[REFUSED_NOT_OURS] >= 20)
    stop.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert all(each.replies == [Done()] for each in asked)
    assert process.memory_info().rss - before < 60 * limits.MIB


def test_silent_connections_do_not_keep_clients_out(world: World) -> None:
    server = world.server(answer_done)
    silent = [os_socket.create_connection(("127.0.0.1", server.address.port)) for _ in range(100)]
    asked = Asked(world.client(server.address))
    world.until(lambda: asked.over)
    assert asked.replies == [Done()]
    for connection in silent:
        connection.close()


def test_a_member_that_sends_nonsense_is_counted_and_not_served(world: World) -> None:
    server = world.server(answer_done)
    socket = world.reactor.context.socket(zmq.DEALER)
    socket.linger = 0
    pair = KEY.curve_client()
    socket.curve_serverkey = KEY.curve_server().public
    socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret
    socket.connect(server.address.zmq_endpoint())
    for frames in ([b""], [b"x", b"y"], [b"", b"", b""], [bytes(36), bytes(100)], [b"z"] * 500):
        socket.send_multipart(frames)
    world.until(lambda: server.refusals.total() == 5)
    assert not socket.poll(0)
    socket.close()
    asked = Asked(world.client(server.address))
    world.until(lambda: asked.over)
    assert asked.replies == [Done()]
