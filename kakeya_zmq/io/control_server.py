"""The server end of the control plane: one ROUTER socket around the :class:`ServerSessions` machine.

Admission is threefold: the CURVE handshake needs the fleet PSK (nothing of a stranger is ever buffered), the sealed HELLO
needs it again and names the node, and the host may refuse a request. A wrong PSK is therefore seen as a failed handshake on
the socket's monitor (:mod:`kakeya_zmq.io.connections`); it is counted in ``refusals`` and told to ``on_refused``.

Sending never blocks. The ROUTER is mandatory and every send is DONTWAIT: a route that is gone (EHOSTUNREACH) is counted and
told to the machine, which ends its session; a route whose queue is full (EAGAIN) gets a bounded backlog that a timer
flushes, since a burst of replies must not lose one. Beyond the bound frames are dropped and counted.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, TypeVarTuple, assert_never

import zmq

from kakeya_zmq.io.addresses import Address
from kakeya_zmq.io.connections import CONNECTIONS_MAX, Connection, ConnectionGuard
from kakeya_zmq.io.effect_queue import EffectQueue
from kakeya_zmq.io.failures import describe_exception
from kakeya_zmq.io.incoming import OVERLONG, Incoming, MessageReader
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.io.schedule import TimerHandle
from kakeya_zmq.io.sockets import CONTROL_SERVER, apply_curve_server, bind, create_socket
from kakeya_zmq.protocol import session as machine
from kakeya_zmq.protocol.effects import Tick
from kakeya_zmq.protocol.identities import IdentityBook
from kakeya_zmq.protocol.limits import RequestLimiter
from kakeya_zmq.protocol.session import LocalNode, PeerInfo, ServerSessions
from wire import limits
from wire.errors import FailureCode, KakeyaError, LocalProtocolError
from wire.keys import FleetKey
from wire.messages import ProgressBody, ReplyBody, RequestBody, UpdateBody

BACKLOG_MESSAGES_MAX: Final = 2 * limits.REQUESTS_IN_FLIGHT_MAX
"""Messages kept for one route whose queue is full: a reply and a progress message for every open request."""
BACKLOG_BYTES_MAX: Final = 64 * limits.MIB
"""Bytes kept for all such routes together."""
FLUSH_SECONDS: Final = 0.005
GOODBYE_LINGER_MS: Final = 300
"""How long a closing socket may take to get its Goodbyes out."""

_Arguments = TypeVarTuple("_Arguments")
_log = logging.getLogger(__name__)


class IncomingRequest:
    """A request of a peer, open until it is answered or ends by itself. Use it on the reactor's thread.

    Set ``on_update`` and ``on_end`` inside ``on_request``. ``on_end(reason)`` is called when no answer is wanted any more
    (cancelled, past its deadline, peer lost), and never after :meth:`reply` or :meth:`fail`; answers given after it are
    ignored, because the peer's cancel and our answer can cross.
    """

    def __init__(self, server: ControlServer, peer: PeerInfo, request_id: int, body: RequestBody, deadline: float) -> None:
        self.peer = peer
        self.request_id = request_id
        self.body = body
        self.deadline = deadline
        """Absolute, in seconds of the reactor's clock."""
        self.on_update: Callable[[UpdateBody], None] | None = None
        self.on_end: Callable[[str], None] | None = None
        self._server = server
        self._answered = False
        self._ended = False

    @property
    def finished(self) -> bool:
        """Answered, or ended by itself."""
        return self._answered or self._ended

    @property
    def congested(self) -> bool:
        """Whether the peer's queue is full: it does not read what it was sent before as fast as it asks."""
        return self._server.congested(self.peer)

    def reply(self, body: ReplyBody) -> None:
        """End the request with its result.

        Raises:
            LocalProtocolError: it was answered before.
            TypeError: the body cannot be encoded; the peer then gets INTERNAL, as it does when the body is too large.
        """
        self._answer(machine.SendReply(self.peer.session_id, self.request_id, body))

    def fail(self, code: FailureCode, message: str) -> None:
        """End the request with a failure; ``message`` is cut to its bound.

        Raises:
            LocalProtocolError: it was answered before.
        """
        text = message[: limits.TEXT_CHARACTERS_MAX]
        self._answer(machine.SendFailure(self.peer.session_id, self.request_id, code, text))

    def progress(self, body: ProgressBody) -> None:
        """Tell the peer how far it is; ignored when the request has ended by itself.

        Raises:
            LocalProtocolError: it was answered before.
        """
        if self._check_open():
            self._server._feed(machine.SendProgress(self.peer.session_id, self.request_id, body))

    def _check_open(self) -> bool:
        self._server.reactor.check_thread()
        if self._answered:
            raise LocalProtocolError("a request was answered twice")
        return not self._ended

    def _answer(self, event: machine.SendReply | machine.SendFailure) -> None:
        if not self._check_open():
            return
        self._answered = True
        self._server._forget(self)
        try:
            self._server._feed(event)
        except Exception:
            # The body cannot be encoded: the peer must not wait for its deadline because of our bug.
            self._server._feed(
                machine.SendFailure(self.peer.session_id, self.request_id, FailureCode.INTERNAL, "the answer cannot be sent")
            )
            raise

    def _end(self, reason: str) -> None:
        if self.finished:
            return
        self._ended = True
        if self.on_end is not None:
            self.on_end(reason)


class ControlServer:
    """Serves requests of every authenticated peer on one bound address.

    Args:
        bind: where to listen; port 0 picks one.
        on_request: called for each request; what it raises becomes a Failure (a KakeyaError with its own code and line,
            anything else INTERNAL with nothing leaked).
        on_refused: told one line for each refused connection, handshake or request, and whose it was where that is proven.
        bus_port: port of this node's bus, told to clients, or what gives it; 0 for none.
        identities: which key belongs to which node id; a book of its own when None.
        limiter: how much one peer may ask; no bounds but those of a session when None.
        connections_max: most connections at once.

    Raises:
        PortInUseError: the address is taken.
    """

    def __init__(
        self,
        reactor: Reactor,
        *,
        bind: Address,
        local: LocalNode,
        fleet_key: FleetKey,
        on_request: Callable[[IncomingRequest], None],
        on_refused: Callable[[str, str], None] | None = None,
        on_peer_up: Callable[[PeerInfo], None] | None = None,
        on_peer_down: Callable[[PeerInfo, str], None] | None = None,
        on_name_taken: Callable[[str], None] | None = None,
        bus_port: int | Callable[[], int] = 0,
        identities: IdentityBook | None = None,
        limiter: RequestLimiter | None = None,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        reactor.check_thread()
        self.reactor = reactor
        self.refusals: Counter[str] = Counter()
        """Refused connections and handshakes by reason."""
        self.counters: Counter[str] = Counter()
        """``frames_dropped``, ``routes_gone``, ``handler_errors``."""
        self._on_request = on_request
        self._on_refused = on_refused
        self._on_peer_up = on_peer_up
        self._on_peer_down = on_peer_down
        self._on_name_taken = on_name_taken
        self._sessions = ServerSessions(
            local=local,
            fleet_key=fleet_key,
            random_bytes=secrets.token_bytes,
            bus_port=bus_port if callable(bus_port) else lambda: bus_port,
            identities=identities,
            limiter=limiter,
        )
        self._effects = EffectQueue(self._apply)
        self._peers: dict[bytes, PeerInfo] = {}
        self._used: dict[bytes, Connection] = {}
        """By the id of the session that uses it."""
        self._requests: dict[tuple[bytes, int], IncomingRequest] = {}
        self._backlog: dict[bytes, deque[list[bytes]]] = {}
        self._backlog_bytes = 0
        self._flush_timer: TimerHandle | None = None
        self._closed = False
        self._socket = create_socket(reactor.context, zmq.ROUTER, CONTROL_SERVER)
        self._incoming = MessageReader(self._socket)
        self._connections = ConnectionGuard(
            reactor, self._socket, on_refused=self._count_refusal, connections_max=connections_max
        )
        self.key_id = fleet_key.key_id
        self._listen(bind, fleet_key)
        reactor.register(self._socket, self._on_readable)
        self._deadline = reactor.add_deadline_source(self._sessions.deadline, lambda now: self._feed(Tick()))

    def _listen(self, address: Address, fleet_key: FleetKey) -> None:
        domain = f"control/{secrets.token_hex(8)}"
        self._domain = domain
        self.reactor.gate.allow_curve(domain, {fleet_key.curve_client().public})
        apply_curve_server(self._socket, fleet_key.curve_server(), domain)
        try:
            self.address = bind(self._socket, address)
        except BaseException:
            self._connections.close()
            self._socket.close(linger=0)
            self.reactor.gate.forget(domain)
            raise
        self._connections.listening(self.address.port)

    @property
    def connections(self) -> int:
        """Connections now, in the handshake or through."""
        return self._connections.connections

    def peers(self) -> list[PeerInfo]:
        """The peers with a live session."""
        return list(self._peers.values())

    @property
    def idle(self) -> bool:
        """Whether nobody has a session here any more."""
        return not self._peers and not self._requests and not self._backlog

    def congested(self, peer: PeerInfo) -> bool:
        """Whether messages for a peer wait because its queue is full."""
        waiting = (self._sessions.peer_on(route) for route in self._backlog)
        return any(each is not None and each.session_id == peer.session_id for each in waiting)

    def move(self, port: int, reason: str) -> None:
        """Let nobody in any more and send everybody to another port of this node, each when nothing of it is open here."""
        self.reactor.check_thread()
        self.reactor.gate.allow_curve(self._domain, ())
        self._feed(machine.Move(port, reason))

    def expel(self, identity_public_key: bytes, reason: str) -> None:
        """End the sessions of whoever has this identity key."""
        self.reactor.check_thread()
        self._feed(machine.Expel(identity_public_key, reason))

    def close(self, reason: str = "shutting down") -> None:
        """Say Goodbye to every peer and stop listening. Open requests end with ``reason``. Idempotent.

        Called from inside a handler it takes effect right after it.
        """
        if self._closed or self.reactor.closed:
            self._closed = True
            return
        self.reactor.check_thread()
        if self._effects.draining:
            self.reactor.post(lambda: self.close(reason))
            return
        self._feed(machine.Shutdown(reason[: limits.TEXT_CHARACTERS_MAX]))
        self._closed = True
        for request in list(self._requests.values()):
            self._end_request(request, reason)
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._backlog.clear()
        self._peers.clear()
        self._used.clear()
        self._deadline.remove()
        self._connections.close()
        self.reactor.close_socket(self._socket, linger_ms=GOODBYE_LINGER_MS)
        self.reactor.gate.forget(self._domain)

    # --- the machine ------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        message = self._incoming.receive()
        if message.overlong:
            self._cut(message)
            return
        first = message.first
        route = first.bytes
        self._feed(machine.RouterFrames(route, message.others))
        # Being behind the transport's handshake proves little: every member gets there, as often as it likes.
        peer = self._sessions.peer_on(route)
        if peer is None:
            self._connections.prove(first, wholly=False)
        elif peer.session_id not in self._used and (connection := self._connections.prove(first)) is not None:
            self._used[peer.session_id] = connection

    def _cut(self, message: Incoming) -> None:
        """End the connection of a message that has no end: each one that follows costs a handshake."""
        peer = self._sessions.peer_on(message.first.bytes)
        connection = self._used.get(peer.session_id) if peer is not None else None
        if connection is None:
            connection = self._connections.prove(message.first, wholly=False)
            if connection in self._used.values():
                connection = None  # it has ended, and its descriptor is another one's by now
        if connection is not None:
            self._connections.cut(connection, OVERLONG)

    def _feed(self, event: machine.ServerEvent) -> None:
        if self._closed:
            return
        self._effects.extend(self._sessions.on(event, self.reactor.clock()))

    def _apply(self, effect: machine.ServerEffect) -> None:
        match effect:
            case machine.RouteTransmit():
                self._transmit(effect.route, list(effect.frames))
            case machine.RequestOpened():
                self._open_request(effect)
            case machine.RequestUpdated():
                request = self._requests.get((effect.session_id, effect.request_id))
                if request is not None and request.on_update is not None:
                    self._guarded(request, lambda: request.on_update(effect.body))  # type: ignore[misc]
            case machine.RequestEnded():
                ended = self._requests.get((effect.session_id, effect.request_id))
                if ended is not None:
                    self._end_request(ended, effect.reason)
            case machine.PeerUp():
                self._peers[effect.peer.session_id] = effect.peer
                self._tell(self._on_peer_up, effect.peer)
            case machine.PeerDown():
                self._drop_peer(effect.peer, effect.reason)
            case machine.Refused():
                self._count_refusal(effect.reason, effect.node_id)
            case machine.NameTaken():
                self._tell(self._on_name_taken, effect.node_id)
            case _:
                assert_never(effect)

    def _open_request(self, effect: machine.RequestOpened) -> None:
        request = IncomingRequest(self, effect.peer, effect.request_id, effect.body, effect.deadline)
        self._requests[effect.peer.session_id, effect.request_id] = request
        self._guarded(request, lambda: self._on_request(request))

    def _guarded(self, request: IncomingRequest, handler: Callable[[], None]) -> None:
        """Run a handler of the host; what it raises fails the request instead of the machine's remaining effects."""
        try:
            handler()
        except KakeyaError as error:
            if isinstance(error, LocalProtocolError):
                self._handler_failed(request, error)
            elif not request.finished:
                request.fail(error.code, str(error))
        except Exception as error:  # a bug in a handler: the peer gets one line, the log gets the place
            self._handler_failed(request, error)

    def _tell(self, observer: Callable[[*_Arguments], None] | None, *arguments: *_Arguments) -> None:
        """Call an observer of the host; its failure is its own."""
        if observer is None:
            return
        try:
            observer(*arguments)
        except Exception as error:  # must not keep the machine's remaining effects from being applied
            self.counters["handler_errors"] += 1
            _log.error("an observer of the control server failed: %s", describe_exception(error))

    def _handler_failed(self, request: IncomingRequest, error: Exception) -> None:
        self.counters["handler_errors"] += 1
        _log.error("a request handler failed: %s", describe_exception(error))
        if not request.finished:
            request.fail(FailureCode.INTERNAL, "the request failed inside the node; its log says where")

    def _end_request(self, request: IncomingRequest, reason: str) -> None:
        self._forget(request)
        self._guarded(request, lambda: request._end(reason))

    def _forget(self, request: IncomingRequest) -> None:
        self._requests.pop((request.peer.session_id, request.request_id), None)

    def _drop_peer(self, peer: PeerInfo, reason: str) -> None:
        self._peers.pop(peer.session_id, None)
        if (connection := self._used.pop(peer.session_id, None)) is not None:
            self._connections.doubt(connection)
        for key, request in list(self._requests.items()):
            if key[0] == peer.session_id:
                self._end_request(request, reason)
        self._tell(self._on_peer_down, peer, reason)

    # --- refusals ---------------------------------------------------------------------------------------------------

    def _count_refusal(self, reason: str, node_id: str = "") -> None:
        self.refusals[reason] += 1
        self._tell(self._on_refused, reason, node_id)

    # --- sending ----------------------------------------------------------------------------------------------------

    def _transmit(self, route: bytes, frames: list[bytes]) -> None:
        waiting = self._backlog.get(route)
        if waiting is None and self._try_send(route, frames):
            return
        if waiting is None:
            waiting = self._backlog[route] = deque()
        size_bytes = sum(map(len, frames))
        self._schedule_flush()
        if len(waiting) >= BACKLOG_MESSAGES_MAX or self._backlog_bytes + size_bytes > BACKLOG_BYTES_MAX:
            self.counters["frames_dropped"] += 1
            return
        waiting.append(frames)
        self._backlog_bytes += size_bytes

    def _try_send(self, route: bytes, frames: list[bytes]) -> bool:
        """Whether the message is off our hands: sent, or its route is gone."""
        try:
            self._socket.send_multipart([route, *frames], zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.counters["routes_gone"] += 1
            self._feed(machine.RouteGone(route))
        return True

    def _schedule_flush(self) -> None:
        if self._flush_timer is None or not self._flush_timer.pending:
            self._flush_timer = self.reactor.call_later(FLUSH_SECONDS, self._flush)

    def _flush(self) -> None:
        for route, waiting in list(self._backlog.items()):
            while waiting and self._try_send(route, waiting[0]):
                self._backlog_bytes -= sum(map(len, waiting.popleft()))
            if not waiting:
                del self._backlog[route]
        if self._backlog:
            self._schedule_flush()
