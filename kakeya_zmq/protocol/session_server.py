"""The server's side of its control sessions; rules and theory of operation in kakeya_zmq.protocol.session.

What a member may cost: each connection has so many HELLOs, new nodes come in at a bounded rate, and a
:class:`~kakeya_zmq.protocol.limits.RequestLimiter` bounds its requests. A session counts for an identity key only when its
first sealed message has come: a HELLO that a node was sent can be sent again by it, but nobody but its author can use the
answer. So a key has so many sessions that were begun and confirmed, and of those so many at one time, under all its names (a
new one takes the place of its oldest). Sessions that wait for that message are bounded all together, and so are HELLOs of
which nothing comes.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, assert_never

from kakeya_zmq.protocol.effects import Tick
from kakeya_zmq.protocol.identities import OTHER_KEY, IdentityBook
from kakeya_zmq.protocol.limits import KeyedBuckets, RequestLimiter, TokenBucket
from kakeya_zmq.protocol.session_values import (
    HELLOS_REMEMBERED,
    PING_AFTER_NOT_SENDING_S,
    SESSION_IDLE_S,
    Expel,
    LocalNode,
    Move,
    NameTaken,
    PeerDown,
    PeerInfo,
    PeerUp,
    Refused,
    RequestEnded,
    RequestOpened,
    RequestUpdated,
    RouteGone,
    RouterFrames,
    RouteTransmit,
    SendFailure,
    SendProgress,
    SendReply,
    ServerEffect,
    ServerEvent,
    Shutdown,
    one_line,
)
from wire import handshake, limits
from wire.codec import decode_client, encode_server
from wire.errors import FailureCode, LocalProtocolError, RemoteProtocolError
from wire.frames import FrameKind, Header, split_frames
from wire.keys import FleetKey
from wire.messages import (
    Cancel,
    ClientEnvelope,
    Failure,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Progress,
    Reply,
    Request,
    ServerEnvelope,
    Update,
    Welcome,
)


@dataclass(slots=True)
class _ServerSession:
    route: bytes
    peer: PeerInfo
    channel: handshake.Channel
    hello_hash: bytes
    welcome_frames: tuple[bytes, bytes]
    heard_at: float
    proven: bool = False
    """A sealed message has come: the peer holds the keys."""
    last_request_id: int = -1
    route_gone: bool = False
    newer_at: float = -math.inf
    """When a newer session of the same node was proven."""
    requests: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Open: request id → (absolute deadline, size of its message in bytes)."""

    def is_lost(self, due: float) -> bool:
        """Whether its connection is gone, or the node has left it for a newer session."""
        return self.route_gone or (self.heard_at < self.newer_at and due >= self.newer_at + OLDER_SESSION_IDLE_S)


_IDLE_CHECK: Final = -1
"""In the timer heap, in place of a request id."""
_LOSS_CHECK: Final = -2
"""The same, for a session whose connection is gone or whose node has a newer one."""
OLDER_SESSION_IDLE_S: Final = PING_AFTER_NOT_SENDING_S + 1.0
"""A node may hold several sessions, and one of them may only listen: but never longer than this without a Ping."""
HELLOS_PER_S: Final = 1.0
HELLOS_BURST: Final = 8.0
"""Of one connection: a client repeats a HELLO after a second, and says a new one when its session got lost."""
KEY_HELLOS_PER_S: Final = 8.0
KEY_HELLOS_BURST: Final = 64.0
"""Confirmed ones of one identity key over all its connections: twice as many a second as an honest node may ever need to
come back with all its sessions."""
UNPROVEN_HELLOS_PER_S: Final = 500.0
UNPROVEN_HELLOS_BURST: Final = 2000.0
"""HELLOs that nobody confirms, of all connections together: a tenth of a processor for them."""
UNPROVEN_SESSIONS_MAX: Final = 512
"""Sessions that wait for their first sealed message, which comes within a round trip; a new one ends the oldest."""
REGISTRATIONS_PER_S: Final = 50.0
REGISTRATIONS_BURST: Final = 500.0
"""Node ids never seen before, of all connections together: a fleet of some hundred nodes that starts in the same moment."""
SESSIONS_PER_KEY_MAX: Final = 16
"""A node has one session, and for SESSION_IDLE_S those that it lost with their connections."""


class ServerSessions:
    """The server's side of all its clients; see the module's theory of operation.

    Args:
        local: this node.
        fleet_key: the PSK of the endpoint whose frames come here (one machine for each valid PSK).
        random_bytes: source of randomness.
        bus_port: gives the port of this node's bus, 0 when it has none; asked for every WELCOME.
        sessions_max: most sessions at once.
        identities: which key belongs to which node id; a book of its own when None.
        limiter: how much one peer may ask; no bounds but those of a session when None.
    """

    def __init__(
        self,
        *,
        local: LocalNode,
        fleet_key: FleetKey,
        random_bytes: Callable[[int], bytes],
        bus_port: Callable[[], int] = lambda: 0,
        sessions_max: int = limits.SESSIONS_MAX,
        identities: IdentityBook | None = None,
        limiter: RequestLimiter | None = None,
    ) -> None:
        self.refusals: Counter[str] = Counter()
        self._local = local
        self._keys = handshake.HandshakeKeys(fleet_key)
        self._random_bytes = random_bytes
        self._bus_port = bus_port
        self._sessions_max = sessions_max
        self._identities = identities or IdentityBook((local.node_id, local.identity.public_key))
        self._limiter = limiter
        self._hello_rates = KeyedBuckets(HELLOS_PER_S, HELLOS_BURST)
        self._key_hello_rates = KeyedBuckets(KEY_HELLOS_PER_S, KEY_HELLOS_BURST)
        self._unproven = TokenBucket(UNPROVEN_HELLOS_PER_S, UNPROVEN_HELLOS_BURST)
        self._registrations = TokenBucket(REGISTRATIONS_PER_S, REGISTRATIONS_BURST)
        self._sessions: dict[bytes, _ServerSession] = {}
        self._routes: dict[bytes, bytes] = {}
        self._hellos: OrderedDict[bytes, None] = OrderedDict()
        self._timers: list[tuple[float, bytes, int]] = []
        """(due, session id, request id or _IDLE_CHECK); entries of what has ended stay until due or compacted."""
        self._open_requests = 0
        self._shut = False
        self._moving: Move | None = None

    @property
    def peers(self) -> tuple[PeerInfo, ...]:
        """Peers of proven sessions."""
        return tuple(session.peer for session in self._sessions.values() if session.proven)

    def peer_on(self, route: bytes) -> PeerInfo | None:
        """Whose proven session uses this connection."""
        session = self._sessions.get(self._routes.get(route, b""))
        return session.peer if session is not None and session.proven else None

    def deadline(self) -> float | None:
        """When to call with Tick at the latest; None: only when something happens."""
        return self._timers[0][0] if self._timers else None

    def on(self, event: ServerEvent, now: float) -> list[ServerEffect]:
        """Take note of an event."""
        effects: list[ServerEffect] = []
        match event:
            case RouterFrames(route=route, frames=frames):
                self._run_clock(now, effects, only_requests=True)
                self._receive(route, frames, now, effects)
            case SendReply(session_id=session_id, request_id=request_id, body=reply):
                self._run_clock(now, effects, only_requests=True)
                self._answer(session_id, request_id, Reply(request_id=request_id, body=reply), effects)
            case SendProgress(session_id=session_id, request_id=request_id, body=progress):
                self._run_clock(now, effects, only_requests=True)
                self._answer(session_id, request_id, Progress(request_id=request_id, body=progress), effects)
            case SendFailure(session_id=session_id, request_id=request_id, code=code, message=message):
                failure = Failure(request_id=request_id, code=code, message=one_line(message))
                self._answer(session_id, request_id, failure, effects)
            case Tick():
                self._run_clock(now, effects, only_requests=False)
            case Move():
                self._moving = event
            case RouteGone(route=route):
                gone = self._sessions.get(self._routes.get(route, b""))
                if gone is not None and not gone.route_gone:
                    gone.route_gone = True
                    heapq.heappush(self._timers, (now, gone.peer.session_id, _LOSS_CHECK))
            case Expel(identity_public_key=key, reason=reason):
                for session in [each for each in self._sessions.values() if each.peer.identity_public_key == key]:
                    self._transmit(session, Goodbye(reason=one_line(reason)), effects)
                    self._end(session, reason, effects)
            case Shutdown(reason=reason):
                self._shut = True
                for session in list(self._sessions.values()):
                    self._transmit(session, Goodbye(reason=one_line(reason)), effects)
                    self._end(session, reason, effects)
                self._timers.clear()
            case _:
                assert_never(event)
        if self._moving is not None:
            self._move_idle(self._moving, effects)
        return effects

    def _move_idle(self, move: Move, effects: list[ServerEffect]) -> None:
        for session in [each for each in self._sessions.values() if not each.requests]:
            goodbye = Goodbye(reason=one_line(move.reason), moved_to=move.port, unopened_from=session.last_request_id + 1)
            self._transmit(session, goodbye, effects)
            self._end(session, move.reason, effects)

    # the clock

    def _run_clock(self, now: float, effects: list[ServerEffect], *, only_requests: bool) -> None:
        """Expire what is due. Idle sessions end on Tick only: the frames at hand may be just what proves them alive."""
        postponed: list[tuple[float, bytes, int]] = []
        while self._timers and self._timers[0][0] <= now:
            due, session_id, request_id = heapq.heappop(self._timers)
            session = self._sessions.get(session_id)
            if session is None:
                continue
            if request_id >= 0:
                self._expire(session, request_id, now, effects)
            elif request_id == _LOSS_CHECK and not session.is_lost(due):
                continue
            elif request_id == _IDLE_CHECK and session.heard_at + SESSION_IDLE_S > now:
                heapq.heappush(self._timers, (session.heard_at + SESSION_IDLE_S, session_id, _IDLE_CHECK))
            elif only_requests:
                postponed.append((due, session_id, request_id))
            elif request_id == _LOSS_CHECK:
                why = "its connection is gone" if session.route_gone else "the node goes on with a newer one"
                self._end(session, why, effects)
            else:
                self._end(session, f"nothing heard for {SESSION_IDLE_S:.0f} seconds", effects)
        for timer in postponed:
            heapq.heappush(self._timers, timer)

    def _expire(self, session: _ServerSession, request_id: int, now: float, effects: list[ServerEffect]) -> None:
        due, _ = session.requests.get(request_id, (now + 1, 0))
        if due > now:
            return
        self._close_request(session, request_id)
        effects.append(RequestEnded(session.peer.session_id, request_id, "deadline passed"))
        message = "the request was not finished within its deadline"
        failure = Failure(request_id=request_id, code=FailureCode.DEADLINE_EXCEEDED, message=message)
        self._transmit(session, failure, effects)

    def _compact_timers(self) -> None:
        # Ended requests leave their timers behind; keep those under half, so that long deadlines don't pile up.
        if len(self._timers) > 64 + 2 * (len(self._sessions) + self._open_requests):
            self._timers = [
                timer
                for timer in self._timers
                if (session := self._sessions.get(timer[1])) is not None and (timer[2] < 0 or timer[2] in session.requests)
            ]
            heapq.heapify(self._timers)

    # what the host says

    def _answer(
        self, session_id: bytes, request_id: int, envelope: Reply | Progress | Failure, effects: list[ServerEffect]
    ) -> None:
        session = self._sessions.get(session_id)
        if session is None or request_id not in session.requests:
            return
        try:
            self._transmit(session, envelope, effects)
        except LocalProtocolError as error:
            # Our own answer is too large: the peer must hear something, and the host that it is over.
            self.refusals["an answer of ours does not fit a message"] += 1
            self._close_request(session, request_id)
            if isinstance(envelope, Progress):
                effects.append(RequestEnded(session_id, request_id, "an answer does not fit a message"))
            failure = Failure(request_id=request_id, code=FailureCode.INTERNAL, message=one_line(error.message))
            self._transmit(session, failure, effects)
            return
        if not isinstance(envelope, Progress):
            self._close_request(session, request_id)

    def _close_request(self, session: _ServerSession, request_id: int) -> None:
        _, size_bytes = session.requests.pop(request_id)
        self._open_requests -= 1
        if self._limiter is not None:
            self._limiter.release(session.peer.node_id, size_bytes)
        self._compact_timers()

    def _transmit(self, session: _ServerSession, envelope: ServerEnvelope, effects: list[ServerEffect]) -> None:
        effects.append(RouteTransmit(session.route, session.channel.seal(encode_server(envelope))))

    def _end(self, session: _ServerSession, reason: str, effects: list[ServerEffect]) -> None:
        session_id = session.peer.session_id
        del self._sessions[session_id]
        if self._routes.get(session.route) == session_id:
            del self._routes[session.route]
        for request_id, (_, size_bytes) in session.requests.items():
            effects.append(RequestEnded(session_id, request_id, f"the session ended: {reason}"))
            if self._limiter is not None:
                self._limiter.release(session.peer.node_id, size_bytes)
        self._open_requests -= len(session.requests)
        session.requests.clear()
        if session.proven:
            effects.append(PeerDown(session.peer, reason))
        self._compact_timers()

    # frames

    def _receive(self, route: bytes, frames: tuple[bytes, ...], now: float, effects: list[ServerEffect]) -> None:
        try:
            if self._shut:
                raise RemoteProtocolError("this server has shut down")
            header, body = split_frames(frames)
            if header.key_id != self._keys.key_id:
                raise RemoteProtocolError("another fleet key")
            match header.kind:
                case FrameKind.HELLO:
                    self._hello(route, header, body, now, effects)
                case FrameKind.SEALED:
                    self._sealed(route, header, body, now, effects)
                case FrameKind.WELCOME | FrameKind.UNKNOWN_SESSION:
                    raise RemoteProtocolError("an unexpected message")
                case _:
                    assert_never(header.kind)
        except RemoteProtocolError as error:
            self._refuse(error.message, effects)

    def _refuse(self, reason: str, effects: list[ServerEffect], node_id: str = "") -> None:
        self.refusals[reason] += 1
        effects.append(Refused(reason, node_id))

    def _hello(self, route: bytes, header: Header, body: bytes, now: float, effects: list[ServerEffect]) -> None:
        if self._moving is not None:
            raise RemoteProtocolError("a hello at an endpoint that is being given up")
        hello_hash = handshake.hash_hello((header.pack(), body))
        known = self._sessions.get(self._routes.get(route, b""))
        if known is not None and known.hello_hash == hello_hash:
            # Sent again because our answer was lost or late; only the one who sent it can use the answer.
            effects.append(RouteTransmit(route, known.welcome_frames))
            return
        if hello_hash in self._hellos:
            raise RemoteProtocolError("a replayed hello")
        hello = handshake.open_hello(header, body, self._keys)
        # Counted only when it is a member's; before the costly steps, two products on the curve and a signature.
        if self._hello_rates.take(route, now) > 0:
            raise RemoteProtocolError("a connection says hello too often")
        if self._unproven.take(now) > 0:
            raise RemoteProtocolError("too many hellos that nobody confirms")
        refusal = self._identify(hello, now)
        if refusal:
            self._refuse(refusal, effects)
            if refusal == OTHER_KEY:
                effects.append(NameTaken(hello.node_id))
            return
        if known is not None:
            self._end(known, "the client started a new session", effects)
        self._make_room(effects)
        self._hellos[hello_hash] = None
        if len(self._hellos) > HELLOS_REMEMBERED:
            self._hellos.popitem(last=False)
        session = self._welcome(route, hello, hello_hash, now)
        session_id = session.peer.session_id
        self._sessions[session_id] = session
        self._routes[route] = session_id
        heapq.heappush(self._timers, (now + SESSION_IDLE_S, session_id, _IDLE_CHECK))
        effects.append(RouteTransmit(route, session.welcome_frames))

    def _identify(self, hello: Hello, now: float) -> str:
        """Hold the node to the key that its name is bound to; why it is not let in, or an empty text.

        Raises:
            RemoteProtocolError: too many new nodes came lately.
        """
        if self._identities.key_of(hello.node_id) is None and self._registrations.take(now) > 0:
            raise RemoteProtocolError("too many new nodes in a short time")

        def in_use() -> set[str]:
            return {session.peer.node_id for session in self._sessions.values()}

        return self._identities.admit(hello.node_id, hello.identity_public_key, hello.roles, in_use)

    def _make_room_of(self, public_key: bytes, effects: list[ServerEffect]) -> None:
        proven = [session for session in self._sessions.values() if session.proven]
        own = [session for session in proven if session.peer.identity_public_key == public_key]
        for session in own[: max(0, len(own) + 1 - SESSIONS_PER_KEY_MAX)]:
            self._end(session, "the node has too many sessions", effects)

    def _make_room(self, effects: list[ServerEffect]) -> None:
        unproven = [session for session in self._sessions.values() if not session.proven]
        if len(self._sessions) < self._sessions_max and len(unproven) < UNPROVEN_SESSIONS_MAX:
            return
        if not unproven:
            raise RemoteProtocolError("too many sessions")
        self._refuse("an unproven session made room", effects)
        self._end(unproven[0], "made room", effects)

    def _welcome(self, route: bytes, hello: Hello, hello_hash: bytes, now: float) -> _ServerSession:
        ephemeral = handshake.new_ephemeral(self._random_bytes)
        local = self._local
        welcome = Welcome(
            node_id=local.node_id,
            identity_public_key=local.identity.public_key,
            ephemeral_public_key=ephemeral.public,
            incarnation=local.incarnation,
            roles=local.roles,
            software=local.software,
            session_id=handshake.new_session_id(self._random_bytes),
            hello_hash=hello_hash,
            bus_port=self._bus_port(),
            signature=b"",
        )
        keys = handshake.agree_on_keys(self._keys, ephemeral, hello.ephemeral_public_key, welcome)
        channel = handshake.Channel(
            session_id=welcome.session_id,
            key_id=self._keys.key_id,
            send_key=keys.server_to_client,
            receive_key=keys.client_to_server,
        )
        peer = PeerInfo(
            session_id=welcome.session_id,
            node_id=hello.node_id,
            identity_public_key=hello.identity_public_key,
            roles=hello.roles,
            incarnation=hello.incarnation,
            software=hello.software,
            bus_port=0,
        )
        frames = handshake.seal_welcome(welcome, local.identity, self._keys, self._random_bytes)
        return _ServerSession(route, peer, channel, hello_hash, frames, heard_at=now)

    def _sealed(self, route: bytes, header: Header, body: bytes, now: float, effects: list[ServerEffect]) -> None:
        session = self._sessions.get(header.session_id)
        if session is None:
            self._refuse("an unknown session", effects)
            frames = handshake.seal_unknown_session(header.session_id, self._local.identity, self._keys, self._random_bytes)
            effects.append(RouteTransmit(route, frames))
            return
        if session.route != route:
            raise RemoteProtocolError("a session on another connection")
        plaintext = session.channel.open(header, body)
        session.heard_at = now
        if not session.proven and not self._prove(session, now, effects):
            return
        self._envelope(decode_client(plaintext), len(plaintext), session, now, effects)

    def _prove(self, session: _ServerSession, now: float, effects: list[ServerEffect]) -> bool:
        """Its author has confirmed the HELLO, which counts for its key from now on; False: it has had too many of them."""
        peer = session.peer
        self._unproven.give_back()
        if self._key_hello_rates.take(peer.identity_public_key, now) > 0:
            self._refuse("a node says hello too often", effects, peer.node_id)
            self._end(session, "the node says hello too often", effects)
            return False
        self._make_room_of(peer.identity_public_key, effects)
        session.proven = True
        self._doubt_older(peer, now)
        effects.append(PeerUp(peer))
        return True

    def _doubt_older(self, peer: PeerInfo, now: float) -> None:
        """A node that says hello again has most likely lost the connections of its other sessions: they end unless heard."""
        for session in self._sessions.values():
            older = session.peer
            same = older.identity_public_key == peer.identity_public_key and older.node_id == peer.node_id
            if same and older.session_id != peer.session_id and older.incarnation <= peer.incarnation:
                session.newer_at = now
                heapq.heappush(self._timers, (now + OLDER_SESSION_IDLE_S, older.session_id, _LOSS_CHECK))

    def _envelope(
        self, envelope: ClientEnvelope, size_bytes: int, session: _ServerSession, now: float, effects: list[ServerEffect]
    ) -> None:
        session_id = session.peer.session_id
        match envelope:
            case Request():
                self._open_request(envelope, size_bytes, session, now, effects)
            case Update(request_id=request_id, body=body):
                if request_id in session.requests:
                    effects.append(RequestUpdated(session_id, request_id, body))
            case Cancel(request_id=request_id):
                if request_id in session.requests:
                    self._close_request(session, request_id)
                    effects.append(RequestEnded(session_id, request_id, "cancelled by the client"))
            case Ping():
                self._transmit(session, Pong(), effects)
            case Goodbye(reason=reason):
                self._end(session, f"the client left: {one_line(reason)}", effects)
            case _:
                assert_never(envelope)

    def _open_request(
        self, request: Request, size_bytes: int, session: _ServerSession, now: float, effects: list[ServerEffect]
    ) -> None:
        request_id = request.request_id
        if self._moving is not None:
            return  # it is told when it may send this again, and where
        if request_id <= session.last_request_id:
            raise RemoteProtocolError("a request id that is not new")
        session.last_request_id = request_id
        if len(session.requests) >= limits.REQUESTS_IN_FLIGHT_MAX:
            text = f"more than {limits.REQUESTS_IN_FLIGHT_MAX} requests at once; try again when one has ended"
            self._decline(session, request_id, "a session has too many requests open", text, effects)
            return
        if self._limiter is not None:
            over = self._limiter.admit(session.peer.node_id, request.body, size_bytes, now)
            if over is not None:
                self._decline(session, request_id, over.reason, over.message, effects)
                return
        deadline = now + request.deadline_ms / 1000
        session.requests[request_id] = (deadline, size_bytes)
        self._open_requests += 1
        heapq.heappush(self._timers, (deadline, session.peer.session_id, request_id))
        effects.append(RequestOpened(session.peer, request_id, request.body, deadline))

    def _decline(
        self, session: _ServerSession, request_id: int, reason: str, message: str, effects: list[ServerEffect]
    ) -> None:
        """A request over a limit: the peer hears what it may do, we count it."""
        self._refuse(reason, effects, session.peer.node_id)
        failure = Failure(request_id=request_id, code=FailureCode.RESOURCE_EXHAUSTED, message=message)
        self._transmit(session, failure, effects)
