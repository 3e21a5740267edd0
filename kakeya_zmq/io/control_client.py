"""The client end of the control plane: one long-lived connection to one server around the :class:`ClientSession` machine.

Theory of operation
    The machine decides when to say HELLO, to ping, to give up and to start over; this shell owns the DEALER. Starting over
    always means a new socket (a ROUTER keeps routes of dead ones, libzmq#1575). Frames that the socket cannot take yet wait
    in a bounded queue, because a request must never vanish; when it is full, new requests fail with RESOURCE_EXHAUSTED.

    The socket's monitor says why nothing works: a refused handshake is a wrong PSK, a refused connection is an absent
    server (``last_error``). And it tells of a broken connection at once, where the machine would need seconds of silence.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, TypeAlias, assert_never

import zmq

from kakeya_zmq.io.incoming import OVERLONG, MessageReader
from kakeya_zmq.io.monitor import CLIENT_EVENTS, LinkEvent, SocketMonitor
from kakeya_zmq.io.names import REASONS as NAME_REASONS
from kakeya_zmq.io.names import Dialling, Names
from kakeya_zmq.io.reactor import EffectQueue, Reactor, TimerHandle, describe_exception
from kakeya_zmq.io.sockets import CONTROL_CLIENT, Address, apply_curve_client, create_socket
from kakeya_zmq.protocol import session as machine
from kakeya_zmq.protocol.effects import Tick
from kakeya_zmq.protocol.identities import IdentityBook
from kakeya_zmq.protocol.session import ClientSession, LocalNode, PeerInfo
from wire import limits
from wire.errors import FailureCode
from wire.keys import FleetKey
from wire.messages import ProgressBody, ReplyBody, RequestBody, UpdateBody

QUEUE_MESSAGES_MAX: Final = 2 * limits.REQUESTS_IN_FLIGHT_MAX
"""Frames that wait for the socket: every open request and one update or cancel for each."""
QUEUE_BYTES_MAX: Final = 64 * limits.MIB
GOODBYE_LINGER_MS: Final = 300
ROUND_TRIP_WEIGHT: Final = 0.2
"""Weight of a new sample in the moving average of the round trip time."""
WRONG_PSK: Final = "the other side does not accept this PSK, or something in between closes connections"
CONNECTION_LOST: Final = "the connection broke"
REJECTIONS_OF_A_KNOWN_PEER: Final = 3
"""Handshakes in a row that a peer which had accepted our PSK must refuse before we believe that it has another one."""
REJECTIONS_OF_A_STRANGER: Final = 2
"""The same of one that never did; libzmq tries again within a fraction of a second."""
NOT_A_NODE: Final = "what answers at this address is not a node of this fleet"
ABANDONED_S: Final = 60.0
"""How long a server is left alone that broke the rules of the transport."""
PAUSED: Final = "it takes the connection but does not answer: paused or overloaded"
NOBODY_THERE: Final = "nothing answers at this address"

Keys: TypeAlias = Callable[[], Sequence[FleetKey]]

_log = logging.getLogger(__name__)


class LinkState(Enum):
    """How far a client is; what ``kakeya status`` shows."""

    CONNECTING = "connecting"
    UP = "up"
    DOWN = "down"
    CLOSED = "closed"


class OutgoingRequest:
    """A request we sent. Exactly one of ``on_reply`` and ``on_failure`` is called, or none after :meth:`cancel`."""

    __slots__ = ("_client", "_on_failure", "_on_progress", "_on_reply", "finished", "request_id")

    def __init__(
        self,
        client: ControlClient,
        request_id: int,
        on_reply: Callable[[ReplyBody], None],
        on_failure: Callable[[FailureCode, str], None],
        on_progress: Callable[[ProgressBody], None] | None,
    ) -> None:
        self.request_id = request_id
        self.finished = False
        self._client = client
        self._on_reply = on_reply
        self._on_failure = on_failure
        self._on_progress = on_progress

    def update(self, body: UpdateBody) -> None:
        """Send the server something while the request is open; ignored afterwards (the answer may have crossed it)."""
        self._client.reactor.check_thread()
        if not self.finished:
            self._client.counters["updates"] += 1
            self._client._feed(machine.StartUpdate(self.request_id, body))

    def cancel(self) -> None:
        """Tell the server to stop; no callback follows. Idempotent."""
        self._client.reactor.check_thread()
        if not self.finished:
            self.finished = True
            self._client._requests.pop(self.request_id, None)
            self._client.counters["cancels"] += 1
            self._client._feed(machine.StartCancel(self.request_id))
            self._client._check_idle()


class ControlClient:
    """One connection to the server at ``address``, kept up until :meth:`close`. Use it on the reactor's thread.

    Args:
        address: where the server listens.
        fleet_key: the PSK; or a function that gives those that may be valid, asked each time the connection is opened. They
            are tried in turn, as an endpoint admits one of them only.
        expected_node_id: refuse any other node there.
        identities: which key belongs to which node id; a book of its own when None.
        on_up: called with the peer each time a session is established.
        on_refused: told why a connection was ended for what the server sent.
        on_round_trip: called with each measured round trip, in ms.
        names: looks up the host of ``address``, where it is a name, each time the connection is opened.
        on_down: called with one line each time a session ends, and when a first or repeated attempt fails for a new reason.
    """

    def __init__(
        self,
        reactor: Reactor,
        *,
        address: Address,
        local: LocalNode,
        fleet_key: FleetKey | Keys,
        expected_node_id: str | None = None,
        identities: IdentityBook | None = None,
        on_up: Callable[[PeerInfo], None] | None = None,
        on_down: Callable[[str], None] | None = None,
        on_refused: Callable[[str], None] | None = None,
        on_round_trip: Callable[[float], None] | None = None,
        names: Names | None = None,
    ) -> None:
        reactor.check_thread()
        self.reactor = reactor
        self.address = address
        self.peer: PeerInfo | None = None
        self.last_error: str | None = None
        """Why there is no session, in one line; None while there is one."""
        self.round_trip_ms: float | None = None
        """Moving average of the round trip, None until measured."""
        self.counters: Counter[str] = Counter()
        """``sessions``, ``sockets``, ``handshakes_rejected``, ``rules_broken``, ``late_replies``, ``frames_dropped``,
        ``callback_errors``; of the host's own traffic, pings aside: ``requests``, ``updates``, ``cancels``, ``answers``."""
        self._keys: Keys = (lambda: (fleet_key,)) if isinstance(fleet_key, FleetKey) else fleet_key
        self._fleet_key = self._keys()[0]
        self._tried = 0
        """Keys that were refused in a row."""
        self._detour_port = 0
        """Where the server goes on for now; 0: at its address."""
        self._dialling = Dialling(reactor, address.host, names or Names(reactor))
        self._on_up = on_up
        self._on_down = on_down
        self._on_refused = on_refused
        self._on_round_trip = on_round_trip
        self._when_idle: Callable[[], None] | None = None
        self._session = ClientSession(
            local=local,
            fleet_key=self._fleet_key,
            random_bytes=secrets.token_bytes,
            expected_node_id=expected_node_id,
            identities=identities,
        )
        self._effects = EffectQueue(self._apply)
        self._requests: dict[int, OutgoingRequest] = {}
        self._starting: int | None = None
        """The request whose request() call is on the stack, so that its failure is told later."""
        self._queue: deque[list[bytes]] = deque()
        self._queue_bytes = 0
        self._connected = False
        """Whether the present socket has had a TCP connection."""
        self._secured = False
        """Whether the present socket has finished a ZMTP handshake."""
        self._rejections = 0
        """Handshakes in a row that were refused."""
        self._link_error: str | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: SocketMonitor | None = None
        self._reopen_timer: TimerHandle | None = None
        self._closed = False
        self._deadline = reactor.add_deadline_source(self._session.deadline, lambda now: self._feed(Tick()))
        self._open_socket()

    @property
    def host(self) -> str:
        """The IP address by which the server is reached; its lanes and bus are on the same one."""
        return self._dialling.host

    @property
    def answered_by(self) -> str | None:
        """Who answered last in place of the expected node, by its own words."""
        return self._session.answered_by

    @property
    def fleet_key(self) -> FleetKey:
        """The PSK the connection is made with."""
        return self._fleet_key

    @property
    def state(self) -> LinkState:
        if self._closed:
            return LinkState.CLOSED
        if self.peer is not None:
            return LinkState.UP
        return LinkState.CONNECTING if self.last_error is None else LinkState.DOWN

    def request(
        self,
        body: RequestBody,
        *,
        timeout_s: float,
        on_reply: Callable[[ReplyBody], None],
        on_failure: Callable[[FailureCode, str], None],
        on_progress: Callable[[ProgressBody], None] | None = None,
    ) -> OutgoingRequest:
        """Ask the server. Callbacks come later, on the reactor's thread, never from inside this call.

        Raises:
            LocalProtocolError: this is another thread.
        """
        self.reactor.check_thread()
        request = OutgoingRequest(self, self._session.next_request_id(), on_reply, on_failure, on_progress)
        self._requests[request.request_id] = request
        self.counters["requests"] += 1
        if self._closed:
            self._fail_later(request, FailureCode.UNAVAILABLE, "the connection is closed")
        elif self._queue_full():
            self._fail_later(request, FailureCode.RESOURCE_EXHAUSTED, "too much is waiting to be sent to this node")
        else:
            self._starting = request.request_id
            try:
                self._feed(machine.StartRequest(request.request_id, body, timeout_s))
            except Exception:
                self._requests.pop(request.request_id, None)
                raise
            finally:
                self._starting = None
        return request

    @property
    def open_requests(self) -> int:
        return len(self._requests)

    def retire(self, limit_s: float, on_closed: Callable[[], None]) -> None:
        """Close once nothing is open any more, or after ``limit_s``; until then it tells nobody of ups and downs."""
        self.reactor.check_thread()
        self._on_up = self._on_down = self._on_round_trip = None

        def end() -> None:
            if not self._closed:
                self.close("another connection is used")
                on_closed()

        if not self._requests:
            self.reactor.post(end)
            return
        self._when_idle = lambda: self.reactor.post(end)
        self.reactor.call_later(limit_s, end)

    def start_over(self, reason: str) -> None:
        """Give up the session, if there is one, and open another: requests under way fail as UNAVAILABLE, at once.

        For a host that knows better than the silence of the line: the node behind it was restarted.
        """
        self.reactor.check_thread()
        if self._closed or self.peer is None:
            return
        if self._effects.draining:
            self.reactor.post(lambda: self.start_over(reason))
            return
        self._session.replaced_because = reason
        self._close_socket()
        self._open_socket(reason)

    def close(self, reason: str = "closed") -> None:
        """Say Goodbye and close; open requests fail with CANCELLED. Idempotent.

        Called from inside a callback it takes effect right after it.
        """
        if self._closed or self.reactor.closed:
            self._closed = True
            return
        self.reactor.check_thread()
        if self._effects.draining:
            self.reactor.post(lambda: self.close(reason))
            return
        self._on_up = self._on_down = self._on_round_trip = None
        self._feed(machine.Leave(reason[: limits.TEXT_CHARACTERS_MAX]))
        self._closed = True
        self.peer = None
        if self._reopen_timer is not None:
            self._reopen_timer.cancel()
        self._deadline.remove()
        self._close_socket(linger_ms=GOODBYE_LINGER_MS)
        for request in list(self._requests.values()):
            self._finish(request, lambda request=request: request._on_failure(FailureCode.UNAVAILABLE, reason))  # type: ignore[misc]

    # --- the machine ------------------------------------------------------------------------------------------------

    def _feed(self, event: machine.ClientEvent) -> None:
        if not self._closed:
            self._effects.extend(self._session.on(event, self.reactor.clock()))

    def _apply(self, effect: machine.ClientEffect) -> None:
        match effect:
            case machine.Transmit():
                self._transmit(list(effect.frames))
            case machine.Reopen():
                self._detour_port = effect.port
                self._reopen(effect.delay_s)
            case machine.SessionUp():
                self._session_up(effect.peer)
            case machine.SessionDown():
                self._session_down(effect.reason)
            case machine.Replied():
                self.counters["answers"] += 1
                reply = effect.body
                self._answer(effect.request_id, lambda request: request._on_reply(reply))
            case machine.Failed():
                self._failed(effect)
            case machine.Progressed():
                self.counters["answers"] += 1
                request = self._requests.get(effect.request_id)
                if request is not None and request._on_progress is not None:
                    on_progress, progress = request._on_progress, effect.body
                    self._guarded(lambda: on_progress(progress))
            case machine.Measured():
                sample_ms, mean_ms = effect.round_trip_ms, self.round_trip_ms
                self.round_trip_ms = sample_ms if mean_ms is None else mean_ms + ROUND_TRIP_WEIGHT * (sample_ms - mean_ms)
                if self._on_round_trip is not None:
                    on_round_trip = self._on_round_trip
                    self._guarded(lambda: on_round_trip(sample_ms))
            case _:
                assert_never(effect)

    def _failed(self, effect: machine.Failed) -> None:
        request = self._requests.get(effect.request_id)
        if request is None:
            self.counters["late_replies"] += 1
        elif effect.request_id == self._starting:
            self._fail_later(request, effect.code, effect.message)
        else:
            self._finish(request, lambda: request._on_failure(effect.code, effect.message))

    def _answer(self, request_id: int, tell: Callable[[OutgoingRequest], None]) -> None:
        request = self._requests.get(request_id)
        if request is None:
            self.counters["late_replies"] += 1
        else:
            self._finish(request, lambda: tell(request))

    def _finish(self, request: OutgoingRequest, tell: Callable[[], None]) -> None:
        if request.finished:
            return
        request.finished = True
        self._requests.pop(request.request_id, None)
        self._guarded(tell)
        self._check_idle()

    def _check_idle(self) -> None:
        if self._when_idle is not None and not self._requests:
            when_idle, self._when_idle = self._when_idle, None
            when_idle()

    def _fail_later(self, request: OutgoingRequest, code: FailureCode, message: str) -> None:
        self.reactor.post(lambda: self._finish(request, lambda: request._on_failure(code, message)))

    def _guarded(self, callback: Callable[[], None]) -> None:
        """A callback of the host must not take the machine's remaining effects with it."""
        try:
            callback()
        except Exception as error:  # its bug, logged with its place
            self.counters["callback_errors"] += 1
            _log.error("a callback of a control client failed: %s", describe_exception(error))

    def _session_up(self, peer: PeerInfo) -> None:
        self.peer = peer
        self._dialling.reached()
        self.last_error = None
        self.counters["sessions"] += 1
        if self._on_up is not None:
            on_up = self._on_up
            self._guarded(lambda: on_up(peer))

    def _session_down(self, reason: str) -> None:
        was_up = self.peer is not None
        self.peer = None
        # Of a HELLO that never reached a peer with our PSK, the socket's monitor knows more than the machine.
        self._explain(reason if self._secured else self._link_error or self._silence(), force=was_up)
        self._link_error = None if was_up else self._link_error

    def _explain(self, line: str, *, force: bool = False) -> None:
        """Remember why there is no session, and tell it once."""
        if line == self.last_error and not force:
            return
        self.last_error = line
        if self._on_down is not None:
            on_down = self._on_down
            self._guarded(lambda: on_down(line))

    # --- the socket -------------------------------------------------------------------------------------------------

    def _open_socket(self, link_error: str | None = None) -> None:
        socket = create_socket(self.reactor.context, zmq.DEALER, CONTROL_CLIENT)
        self.counters["sockets"] += 1
        # With IMMEDIATE, libzmq throws away what has been received but not yet read when the connection ends, among it the
        # Goodbye that explains the end (measured: one in twenty). What IMMEDIATE is for is done here: frames wait in our own
        # queue until the handshake is through, and after a lost connection comes a new socket.
        socket.immediate = 0
        # Where a server goes on for now it admits a newer key than where it came from.
        keys = tuple(reversed(self._keys())) if self._detour_port else self._keys()
        self._fleet_key = keys[self._tried % len(keys)]
        self._session.use_key(self._fleet_key)
        apply_curve_client(socket, self._fleet_key.curve_server().public, self._fleet_key.curve_client())
        self._socket = socket
        self._connected = self._secured = False
        self._link_error = link_error
        self._monitor = SocketMonitor(self.reactor, socket, CLIENT_EVENTS, self._on_link_event)
        self.reactor.register(socket, self._on_readable, self._on_writable)
        # A name is looked up anew for each socket, and each address it has gets its turn.
        self._dialling.dial(
            self._detour_port or self.address.port,
            connect=lambda literal: self._connect(socket, literal),
            failed=self._link_failed,
        )
        self._feed(machine.SocketOpened())

    def _connect(self, socket: zmq.Socket[bytes], literal: Address) -> None:
        if self._link_error in NAME_REASONS:  # it has one now
            self._link_error = None
        socket.connect(literal.zmq_endpoint())

    def _close_socket(self, *, linger_ms: int = 0) -> None:
        self._dialling.stop()
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if self._socket is not None:
            self.reactor.close_socket(self._socket, linger_ms=linger_ms)
            self._socket = None
        self._queue.clear()
        self._queue_bytes = 0

    def _reopen(self, delay_s: float) -> None:
        self._close_socket()
        if self._reopen_timer is not None:
            self._reopen_timer.cancel()
        self._tried = 0
        self._reopen_timer = self.reactor.call_later(delay_s, self._open_socket)

    def _on_readable(self) -> None:
        if self._socket is None:
            raise zmq.Again
        # What is left of a message that is too long goes with the socket, whose owner need not read it for that.
        message = MessageReader(self._socket).receive()
        if message.overlong:
            self._abandon(OVERLONG)
        else:
            self._feed(machine.FramesReceived(message.frames))

    def _abandon(self, reason: str) -> None:
        """The server sends what no node of ours does: have none of it for a while."""
        self.counters["rules_broken"] += 1
        if self._on_refused is not None:
            on_refused = self._on_refused
            self._guarded(lambda: on_refused(reason))
        self._feed(machine.Abandon(reason, ABANDONED_S))

    def _on_link_event(self, event: LinkEvent) -> None:
        match event:
            case LinkEvent.REJECTED if self._next_key():
                self._close_socket()
                self._open_socket()
            case LinkEvent.REJECTED:
                self.counters["handshakes_rejected"] += 1
                self._rejections += 1
                # A process that dies during a handshake looks the same once; where our PSK was accepted, wait for proof.
                known = self.counters["sessions"] > 0
                if self._rejections >= (REJECTIONS_OF_A_KNOWN_PEER if known else REJECTIONS_OF_A_STRANGER):
                    self._link_failed(WRONG_PSK)
                elif known:
                    self._link_failed(CONNECTION_LOST)
                else:
                    self._link_error = CONNECTION_LOST  # no news yet
            case LinkEvent.UNREACHED:
                # A rejected connection is retried too; that it was rejected is the news.
                if self._link_error is None:
                    self._link_failed(self._silence())
            case LinkEvent.SECURED:
                self._secured = True
                self._rejections = 0
                self._tried = 0
                self._link_error = None
                if self._queue and self._socket is not None:
                    self.reactor.watch_writable(self._socket, True)
            case LinkEvent.LOST:
                if self._secured:
                    self._lost()
                elif self._link_error is None:
                    self._link_failed(NOT_A_NODE)
            case LinkEvent.CONNECTED:
                self._connected = True
            case _:
                assert_never(event)

    def _next_key(self) -> bool:
        """Whether there is another key to try before the endpoint is given up for now."""
        if self.peer is not None or self._secured:
            return False
        self._tried += 1
        return self._tried < len(self._keys())

    def _silence(self) -> str:
        """What a connection that never became secure means."""
        if not self._connected:
            return NOBODY_THERE
        return PAUSED if self.counters["sessions"] else NOT_A_NODE

    def _link_failed(self, line: str) -> None:
        self._link_error = line
        if self.peer is None and not self._secured:
            self._explain(line)

    def _lost(self) -> None:
        """The connection broke. The server's session belongs to it, so start over at once instead of waiting for silence."""
        socket = self._socket
        try:
            while self._socket is socket:  # what arrived before the end still counts: answers, a Goodbye
                self._on_readable()
        except zmq.Again:
            self._secured = False
            if self.peer is not None:
                self._session.replaced_because = CONNECTION_LOST
                self._detour_port = 0
                self._close_socket()
                self._open_socket(CONNECTION_LOST)

    def _queue_full(self) -> bool:
        return len(self._queue) >= QUEUE_MESSAGES_MAX or self._queue_bytes >= QUEUE_BYTES_MAX

    def _transmit(self, frames: list[bytes]) -> None:
        if self._socket is None:
            self.counters["frames_dropped"] += 1  # between two sockets nothing can be sent, and nobody would understand it
            return
        if not self._queue and self._secured:
            try:
                self._socket.send_multipart(frames, zmq.DONTWAIT)
                return
            except zmq.Again:
                self.reactor.watch_writable(self._socket, True)
        if self._queue and self._queue[-1] == frames:
            return  # the same HELLO again, while the first one still waits for a connection
        if len(self._queue) >= 2 * QUEUE_MESSAGES_MAX:
            # Requests are refused long before; what else is sent (updates, cancels, pings) can be lost with the connection.
            self.counters["frames_dropped"] += 1
            return
        self._queue.append(frames)
        self._queue_bytes += sum(map(len, frames))

    def _on_writable(self) -> None:
        if self._socket is None:
            return
        while self._queue:
            try:
                self._socket.send_multipart(self._queue[0], zmq.DONTWAIT)
            except zmq.Again:
                return
            self._queue_bytes -= sum(map(len, self._queue.popleft()))
        self.reactor.watch_writable(self._socket, False)
