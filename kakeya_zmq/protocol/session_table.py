"""The sessions that a server has, and the requests that are open in them.

A session belongs to one route, and a route has one session. A request is open from :meth:`SessionTable.open_request` until
:meth:`SessionTable.close_request`, or until its session is removed; for so long the limiter counts it. Sessions are gone
through in the order in which they began.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kakeya_zmq.protocol.limits import OverLimit, RequestLimiter
from kakeya_zmq.protocol.session_timers import IDLE_CHECK, SessionTimers
from kakeya_zmq.protocol.session_values import PING_AFTER_NOT_SENDING_S, SESSION_IDLE_S, PeerInfo, RouteTransmit
from wire import handshake, limits
from wire.codec import encode_server
from wire.messages import Request, ServerEnvelope

OLDER_SESSION_IDLE_S: Final = PING_AFTER_NOT_SENDING_S + 1.0
"""A node may hold several sessions, and one of them may only listen: but never longer than this without a Ping."""
TIMERS_SPARE: Final = 64
"""Timers of what has ended that are never worth dropping."""


@dataclass(slots=True)
class ServerSession:
    """One session, from the WELCOME on."""

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

    def seal(self, envelope: ServerEnvelope) -> RouteTransmit:
        """The next message to the peer.

        Raises:
            LocalProtocolError: it is too large.
        """
        return RouteTransmit(self.route, self.channel.seal(encode_server(envelope)))


class SessionTable:
    """See the module's text.

    Args:
        timers: gets the idle check of each session and the deadline of each request.
        limiter: how much one peer may ask; no bounds but those of a session when None.
    """

    def __init__(self, timers: SessionTimers, limiter: RequestLimiter | None) -> None:
        self._timers = timers
        self._limiter = limiter
        self._sessions: dict[bytes, ServerSession] = {}
        self._routes: dict[bytes, bytes] = {}
        self._open_requests = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[ServerSession]:
        return iter(self._sessions.values())

    def find(self, session_id: bytes) -> ServerSession | None:
        return self._sessions.get(session_id)

    def on_route(self, route: bytes) -> ServerSession | None:
        """The session that belongs to a connection."""
        return self._sessions.get(self._routes.get(route, b""))

    def add(self, session: ServerSession, now: float) -> None:
        session_id = session.peer.session_id
        self._sessions[session_id] = session
        self._routes[session.route] = session_id
        self._timers.add(now + SESSION_IDLE_S, session_id, IDLE_CHECK)

    def remove(self, session: ServerSession) -> tuple[int, ...]:
        """It has ended. Returns the requests that were open in it, and are closed by this."""
        session_id = session.peer.session_id
        del self._sessions[session_id]
        if self._routes.get(session.route) == session_id:
            del self._routes[session.route]
        ended = tuple(session.requests)
        if self._limiter is not None:
            for _, size_bytes in session.requests.values():
                self._limiter.release(session.peer.node_id, size_bytes)
        self._open_requests -= len(ended)
        session.requests.clear()
        self._compact_timers()
        return ended

    def open_request(
        self, session: ServerSession, request: Request, size_bytes: int, *, now: float, deadline: float
    ) -> OverLimit | None:
        """Take a request of ``size_bytes``, or say why not."""
        if len(session.requests) >= limits.REQUESTS_IN_FLIGHT_MAX:
            text = f"more than {limits.REQUESTS_IN_FLIGHT_MAX} requests at once; try again when one has ended"
            return OverLimit("a session has too many requests open", text, 0)
        if self._limiter is not None:
            over = self._limiter.admit(session.peer.node_id, request.body, size_bytes, now)
            if over is not None:
                return over
        session.requests[request.request_id] = (deadline, size_bytes)
        self._open_requests += 1
        self._timers.add(deadline, session.peer.session_id, request.request_id)
        return None

    def close_request(self, session: ServerSession, request_id: int) -> None:
        """A request that is open has ended."""
        _, size_bytes = session.requests.pop(request_id)
        self._open_requests -= 1
        if self._limiter is not None:
            self._limiter.release(session.peer.node_id, size_bytes)
        self._compact_timers()

    def _compact_timers(self) -> None:
        # Ended requests leave their timers behind; keep those under half, so that long deadlines don't pile up.
        if len(self._timers) > TIMERS_SPARE + 2 * (len(self._sessions) + self._open_requests):
            self._timers.keep(self._wants_timer)

    def _wants_timer(self, session_id: bytes, what: int) -> bool:
        session = self._sessions.get(session_id)
        return session is not None and (what < 0 or what in session.requests)
