"""Connection events of a ZeroMQ socket: who could not connect, and why.

libzmq tells a socket's connection events through an inproc PAIR (:func:`monitor_pair`). Two hazards shape this file: a
monitor that is left open makes ``Context.term()`` hang, so it is closed before the socket itself; and libzmq's IO thread
*blocks* while the PAIR is full, so the receiving end has no high-water mark (one event is about 60 bytes, and only the rare
kinds below are subscribed).
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from enum import Enum
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from kakeya_zmq.io.reactor import Reactor


class LinkEvent(Enum):
    """What happened to a connection, below the level of sessions."""

    CONNECTED = "connected"
    """TCP connected; the peer is not known yet."""
    SECURED = "secured"
    """The ZMTP handshake is through: the peer holds the same PSK."""
    REJECTED = "rejected"
    """The ZMTP handshake failed: another PSK, or not one of us at all."""
    UNREACHED = "unreached"
    """A connection attempt failed and will be repeated."""
    LOST = "lost"
    """An established connection ended."""


_EVENTS: Final[dict[int, LinkEvent]] = {
    zmq.Event.CONNECTED: LinkEvent.CONNECTED,
    zmq.Event.HANDSHAKE_SUCCEEDED: LinkEvent.SECURED,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: LinkEvent.REJECTED,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: LinkEvent.REJECTED,
    zmq.Event.HANDSHAKE_FAILED_AUTH: LinkEvent.REJECTED,
    zmq.Event.CONNECT_RETRIED: LinkEvent.UNREACHED,
    zmq.Event.DISCONNECTED: LinkEvent.LOST,
}
SERVER_EVENTS: Final = frozenset({LinkEvent.REJECTED})
CLIENT_EVENTS: Final = frozenset(LinkEvent)
NOT_OURS: Final = "it does not speak this protocol"
UNFINISHED: Final = "it ended before its handshake was through"


def monitor_pair(context: zmq.Context[zmq.Socket[bytes]], watched: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """The socket that tells these events (zmq.Event, combined) of a socket from now on, whose monitor is on with it."""
    address = f"inproc://kakeya-monitor-{secrets.token_hex(8)}"
    # Made before the monitor is on: a process may be out of file descriptors, and a monitor without a reader blocks libzmq.
    pair = context.socket(zmq.PAIR)
    try:
        pair.linger = 0
        pair.rcvhwm = 0
        watched.monitor(address, events)
        try:
            pair.connect(address)
        except zmq.ZMQError:
            watched.disable_monitor()
            raise
    except BaseException:
        pair.close(linger=0)
        raise
    return pair


class ConnectionWatch:
    """Tells whether the one connection of a lane's socket has ended; used on the lane's thread only.

    A handshake's success does not name its connection, and strangers knock at bound sockets, too. So ours is one of those
    that were open at that moment, and it has certainly ended when all of them have.

    Args:
        refused: told the reason of each handshake that failed, but for a wrong token, which the gate knows of.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], refused: Callable[[str], None]
    ) -> None:
        self._refused = refused
        self._watched = socket
        self._open: set[int] = set()
        """File descriptors of connections that exist."""
        self._candidates: set[int] | None = None
        """Those that may be ours; None before the handshake."""
        begins = zmq.Event.ACCEPTED | zmq.Event.CONNECTED
        failures = zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
        events = begins | failures | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
        self.pair = monitor_pair(context, socket, events)

    @property
    def lost(self) -> bool:
        return self._candidates is not None and not self._candidates

    @property
    def began(self) -> bool:
        """Whether there ever was one, handshake included."""
        return self._candidates is not None

    def read(self) -> None:
        """Take note of what has happened; call it when ``pair`` is readable."""
        with contextlib.suppress(zmq.Again):
            while True:
                message = parse_monitor_message(self.pair.recv_multipart(zmq.DONTWAIT))
                connection = message["value"]
                match message["event"]:
                    case zmq.Event.ACCEPTED | zmq.Event.CONNECTED:
                        self._open.add(connection)
                    case zmq.Event.HANDSHAKE_SUCCEEDED if self._candidates is None:
                        self._candidates = set(self._open)
                    case zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                        self._refused(NOT_OURS)
                    case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
                        self._refused(UNFINISHED)
                    case zmq.Event.DISCONNECTED:
                        self._open.discard(connection)
                        if self._candidates is not None:
                            self._candidates.discard(connection)

    def close(self) -> None:
        """Call it before the watched socket is closed."""
        self._watched.disable_monitor()
        self.pair.close(linger=0)


class SocketMonitor:
    """Calls ``on_event`` on the reactor's thread for each wanted event of ``socket``, until :meth:`close`."""

    def __init__(
        self,
        reactor: Reactor,
        socket: zmq.Socket[bytes],
        events: frozenset[LinkEvent],
        on_event: Callable[[LinkEvent], None],
    ) -> None:
        self._reactor = reactor
        self._watched = socket
        self._on_event = on_event
        self._closed = False
        mask = 0
        for kind, event in _EVENTS.items():
            if event in events:
                mask |= kind
        self._pair = monitor_pair(reactor.context, socket, mask)
        reactor.register(self._pair, self._on_readable)

    def close(self) -> None:
        """Stop watching; call it before the watched socket is closed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._watched.closed:
            self._watched.disable_monitor()
        self._reactor.close_socket(self._pair)

    def _on_readable(self) -> None:
        frames = self._pair.recv_multipart(zmq.DONTWAIT)
        event = _EVENTS.get(parse_monitor_message(frames)["event"]) if len(frames) == 2 else None
        if event is not None:
            self._on_event(event)
