"""Connection events of a ZeroMQ socket: who could not connect, and why.

libzmq tells a socket's connection events through an inproc PAIR (:func:`monitor_pair`). Two hazards shape this file: a
monitor that is left open makes ``Context.term()`` hang, so it is closed before the socket itself; and libzmq's IO thread
*blocks* while the PAIR is full, so the receiving end has no high-water mark (one event is about 60 bytes, and only the rare
kinds below are subscribed).
"""

from __future__ import annotations

import contextlib
import secrets
import struct
from collections.abc import Callable
from enum import Enum
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from kakeya_zmq.io.borrowed import SetAside, oldest_of_busiest
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
CROWDED: Final = "too many of them wait, or its one bearer is there already"
_EVENT: Final = struct.Struct("=HI")
WAITING_MAX: Final = 16
"""Connections at a bulk port before its one bearer is there: its handshake takes milliseconds, and such ports are many."""


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
    """Tells whether the one connection of a lane's socket has ended, and cuts strangers' at a bound one; used on the lane's
    thread only.

    A handshake's success does not name its connection, and strangers knock at bound sockets, too. So ours is one of those
    that were open at that moment, or when the gate was seen to have let the bearer of the token in, and it has certainly
    ended when all of them have.

    Until then at most :data:`WAITING_MAX` connections stay, and the oldest one of the busiest host makes room. Whoever comes
    later has no business here and is cut at once; those that were there then are left to the handshake's own bound of time.
    The port itself stays open, as libzmq ends the connections of an endpoint that is unbound. So this must be read at every
    turn of a lane's loop, also of a busy one.

    Args:
        refused: told the reason of each cut, and of each failed handshake but for a wrong token, which the gate knows of.
        admitted: whether the gate has let the bearer in; False of a socket that connects.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        refused: Callable[[str], None],
        admitted: Callable[[], bool],
    ) -> None:
        self._refused = refused
        self._admitted = admitted
        self._watched = socket
        self._port: int | None = None
        self._borrowed: SetAside | None = None
        self._open: dict[int, str] = {}
        """File descriptors of connections that exist, the longest connected first, and their hosts."""
        self._candidates: set[int] | None = None
        """Those that may be ours; None before the handshake."""
        self._leaving: set[int] = set()
        """Cut, and their end not told yet."""
        self._unfinished = False
        """Whether the connection that is about to end does so before its handshake is through."""
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

    def listening(self, port: int) -> None:
        """The socket is about to be served at this TCP port: strangers are cut from now on.

        Raises:
            OSError: the process has no free descriptors.
        """
        self._borrowed, self._port = SetAside(), port

    def read(self) -> None:
        """Take note of what has happened, and cut who is too many. Cheap when nothing has.

        libzmq accepts thousands of connections a second, so little is done for each.
        """
        if not int(self.pair.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return
        # Asked before the events are read: of whoever has been let in by now, they tell that it has come.
        admitted = self._candidates is None and self._admitted()
        with contextlib.suppress(zmq.Again):
            while True:
                self._take_event(*_EVENT.unpack(self.pair.recv_multipart(zmq.DONTWAIT)[0]))
        if admitted and self._candidates is None:
            self._candidates = set(self._open)

    def close(self) -> None:
        """Call it before the watched socket is closed."""
        self._watched.disable_monitor()
        self.pair.close(linger=0)
        if self._borrowed is not None:
            self._borrowed.close()

    def _take_event(self, event: int, connection: int) -> None:
        match event:
            case zmq.Event.ACCEPTED | zmq.Event.CONNECTED:
                self._began(connection)
            case zmq.Event.HANDSHAKE_SUCCEEDED if self._candidates is None:
                self._candidates = set(self._open)
            case zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                self._refused(NOT_OURS)
            case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
                self._unfinished = True
            case zmq.Event.DISCONNECTED:
                if self._unfinished and connection not in self._leaving:
                    self._refused(UNFINISHED)
                self._unfinished = False
                self._ended(connection)

    def _began(self, connection: int) -> None:
        self._ended(connection)  # the number may be that of a connection whose end was not told
        borrowed = self._borrowed
        if borrowed is None:
            self._open[connection] = ""
        elif self._candidates is not None:
            self._cut(borrowed, connection)
        else:
            self._open[connection] = borrowed.host(connection, self._port)
            # The bearer may get in at any moment, and is not to be cut then: its token serves once.
            while len(self._open) > WAITING_MAX and not self._admitted():
                self._cut(borrowed, oldest_of_busiest(self._open))

    def _ended(self, connection: int) -> None:
        self._open.pop(connection, None)
        self._leaving.discard(connection)
        if self._candidates is not None:
            self._candidates.discard(connection)

    def _cut(self, borrowed: SetAside, connection: int) -> None:
        self._ended(connection)
        if borrowed.cut(connection, self._port):
            self._leaving.add(connection)
            self._refused(CROWDED)


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
