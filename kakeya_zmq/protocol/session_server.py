"""The server's side of its control sessions; rules and theory of operation in kakeya_zmq.protocol.session.

The machine decides what an event means, for sessions and for HELLOs. The sessions are in
:class:`~kakeya_zmq.protocol.session_table.SessionTable`, what becomes of requests is decided by
:class:`~kakeya_zmq.protocol.session_requests.SessionRequests`, and what members may cost is bounded by
:class:`~kakeya_zmq.protocol.session_bounds.SessionBounds` and :class:`~kakeya_zmq.protocol.limits.RequestLimiter`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import assert_never

from kakeya_zmq.protocol.effects import Tick
from kakeya_zmq.protocol.identities import OTHER_KEY, IdentityBook
from kakeya_zmq.protocol.limits import RequestLimiter
from kakeya_zmq.protocol.session_bounds import SessionBounds
from kakeya_zmq.protocol.session_requests import SessionRequests
from kakeya_zmq.protocol.session_table import OLDER_SESSION_IDLE_S, ServerSession, SessionTable
from kakeya_zmq.protocol.session_timers import IDLE_CHECK, LOSS_CHECK, SessionTimers
from kakeya_zmq.protocol.session_values import (
    HELLOS_REMEMBERED,
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
from kakeya_zmq.protocol.session_welcome import begin_session
from wire import handshake, limits
from wire.codec import decode_client
from wire.errors import RemoteProtocolError
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
    Update,
)


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
        self._identities = identities or IdentityBook((local.node_id, local.identity.public_key))
        self._bounds = SessionBounds(sessions_max)
        self._timers = SessionTimers()
        self._sessions = SessionTable(self._timers, limiter)
        self._requests = SessionRequests(self._sessions, self.refusals)
        self._hellos: OrderedDict[bytes, None] = OrderedDict()
        """Hashes of those that were answered lately, oldest first."""
        self._shut = False
        self._moving: Move | None = None

    @property
    def peers(self) -> tuple[PeerInfo, ...]:
        """Peers of proven sessions."""
        return tuple(session.peer for session in self._sessions if session.proven)

    def peer_on(self, route: bytes) -> PeerInfo | None:
        """Whose proven session uses this connection."""
        session = self._sessions.on_route(route)
        return session.peer if session is not None and session.proven else None

    def deadline(self) -> float | None:
        """When to call with Tick at the latest; None: only when something happens."""
        return self._timers.deadline()

    def on(self, event: ServerEvent, now: float) -> list[ServerEffect]:
        """Take note of an event."""
        effects: list[ServerEffect] = []
        match event:
            case RouterFrames(route=route, frames=frames):
                self._run_clock(now, effects, only_requests=True)
                self._receive(route, frames, now, effects)
            case SendReply(session_id=session_id, request_id=request_id, body=reply):
                self._run_clock(now, effects, only_requests=True)
                self._requests.answer(session_id, request_id, Reply(request_id=request_id, body=reply), effects)
            case SendProgress(session_id=session_id, request_id=request_id, body=progress):
                self._run_clock(now, effects, only_requests=True)
                self._requests.answer(session_id, request_id, Progress(request_id=request_id, body=progress), effects)
            case SendFailure(session_id=session_id, request_id=request_id, code=code, message=message):
                failure = Failure(request_id=request_id, code=code, message=one_line(message))
                self._requests.answer(session_id, request_id, failure, effects)
            case Tick():
                self._run_clock(now, effects, only_requests=False)
            case Move():
                self._moving = event
            case RouteGone(route=route):
                gone = self._sessions.on_route(route)
                if gone is not None and not gone.route_gone:
                    gone.route_gone = True
                    self._timers.add(now, gone.peer.session_id, LOSS_CHECK)
            case Expel(identity_public_key=key, reason=reason):
                for session in [each for each in self._sessions if each.peer.identity_public_key == key]:
                    effects.append(session.seal(Goodbye(reason=one_line(reason))))
                    self._end(session, reason, effects)
            case Shutdown(reason=reason):
                self._shut = True
                for session in list(self._sessions):
                    effects.append(session.seal(Goodbye(reason=one_line(reason))))
                    self._end(session, reason, effects)
                self._timers.clear()
            case _:
                assert_never(event)
        if self._moving is not None:
            self._move_idle(self._moving, effects)
        return effects

    def _move_idle(self, move: Move, effects: list[ServerEffect]) -> None:
        for session in [each for each in self._sessions if not each.requests]:
            goodbye = Goodbye(reason=one_line(move.reason), moved_to=move.port, unopened_from=session.last_request_id + 1)
            effects.append(session.seal(goodbye))
            self._end(session, move.reason, effects)

    # the clock

    def _run_clock(self, now: float, effects: list[ServerEffect], *, only_requests: bool) -> None:
        """Expire what is due. Idle sessions end on Tick only: the frames at hand may be just what proves them alive."""
        postponed: list[tuple[float, bytes, int]] = []
        while (timer := self._timers.pop_due(now)) is not None:
            due, session_id, what = timer
            session = self._sessions.find(session_id)
            if session is None:
                continue
            if what >= 0:
                self._requests.expire(session, what, now, effects)
            elif what == LOSS_CHECK and not session.is_lost(due):
                continue
            elif what == IDLE_CHECK and session.heard_at + SESSION_IDLE_S > now:
                self._timers.add(session.heard_at + SESSION_IDLE_S, session_id, IDLE_CHECK)
            elif only_requests:
                postponed.append(timer)
            elif what == LOSS_CHECK:
                why = "its connection is gone" if session.route_gone else "the node goes on with a newer one"
                self._end(session, why, effects)
            else:
                self._end(session, f"nothing heard for {SESSION_IDLE_S:.0f} seconds", effects)
        for due, session_id, what in postponed:
            self._timers.add(due, session_id, what)

    def _end(self, session: ServerSession, reason: str, effects: list[ServerEffect]) -> None:
        for request_id in self._sessions.remove(session):
            effects.append(RequestEnded(session.peer.session_id, request_id, f"the session ended: {reason}"))
        if session.proven:
            effects.append(PeerDown(session.peer, reason))

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
        known = self._sessions.on_route(route)
        if known is not None and known.hello_hash == hello_hash:
            # Sent again because our answer was lost or late; only the one who sent it can use the answer.
            effects.append(RouteTransmit(route, known.welcome_frames))
            return
        if hello_hash in self._hellos:
            raise RemoteProtocolError("a replayed hello")
        hello = handshake.open_hello(header, body, self._keys)
        # Counted only when it is a member's; before the costly steps, two products on the curve and a signature.
        self._bounds.take_hello(route, now)
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
        session = begin_session(
            hello,
            hello_hash,
            route=route,
            now=now,
            local=self._local,
            bus_port=self._bus_port(),
            handshake_keys=self._keys,
            random_bytes=self._random_bytes,
        )
        self._sessions.add(session, now)
        effects.append(RouteTransmit(route, session.welcome_frames))

    def _identify(self, hello: Hello, now: float) -> str:
        """Hold the node to the key that its name is bound to; why it is not let in, or an empty text.

        Raises:
            RemoteProtocolError: too many new nodes came lately.
        """
        if self._identities.key_of(hello.node_id) is None:
            self._bounds.take_registration(now)

        def in_use() -> set[str]:
            return {session.peer.node_id for session in self._sessions}

        return self._identities.admit(hello.node_id, hello.identity_public_key, hello.roles, in_use)

    def _make_room(self, effects: list[ServerEffect]) -> None:
        oldest = self._bounds.gives_way_to_new(self._sessions)
        if oldest is not None:
            self._refuse("an unproven session made room", effects)
            self._end(oldest, "made room", effects)

    def _sealed(self, route: bytes, header: Header, body: bytes, now: float, effects: list[ServerEffect]) -> None:
        session = self._sessions.find(header.session_id)
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

    def _prove(self, session: ServerSession, now: float, effects: list[ServerEffect]) -> bool:
        """Its author has confirmed the HELLO, which counts for its key from now on; False: it has had too many of them."""
        peer = session.peer
        if not self._bounds.confirm_hello(peer.identity_public_key, now):
            self._refuse("a node says hello too often", effects, peer.node_id)
            self._end(session, "the node says hello too often", effects)
            return False
        for older in self._bounds.give_way_to_own(peer.identity_public_key, self._sessions):
            self._end(older, "the node has too many sessions", effects)
        session.proven = True
        self._doubt_older(peer, now)
        effects.append(PeerUp(peer))
        return True

    def _doubt_older(self, peer: PeerInfo, now: float) -> None:
        """A node that says hello again has most likely lost the connections of its other sessions: they end unless heard."""
        for session in self._sessions:
            older = session.peer
            same = older.identity_public_key == peer.identity_public_key and older.node_id == peer.node_id
            if same and older.session_id != peer.session_id and older.incarnation <= peer.incarnation:
                session.newer_at = now
                self._timers.add(now + OLDER_SESSION_IDLE_S, older.session_id, LOSS_CHECK)

    def _envelope(
        self, envelope: ClientEnvelope, size_bytes: int, session: ServerSession, now: float, effects: list[ServerEffect]
    ) -> None:
        match envelope:
            case Request():
                if self._moving is None:  # else it is told when it may send this again, and where
                    self._requests.open(envelope, size_bytes, session, now, effects)
            case Update():
                self._requests.update(envelope, session, effects)
            case Cancel(request_id=request_id):
                self._requests.cancel(request_id, session, effects)
            case Ping():
                effects.append(session.seal(Pong()))
            case Goodbye(reason=reason):
                self._end(session, f"the client left: {one_line(reason)}", effects)
            case _:
                assert_never(envelope)
