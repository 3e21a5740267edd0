"""Who is connected to a bound socket: counts connections, tells refused handshakes apart, and cuts what is too much.

libzmq has no bound on connections, and a process without free file descriptors serves nobody. So the guard follows the
socket's monitor and keeps two bounds:

* Connections that have not *proven* themselves (by a message from behind the handshake): beyond ``unproven_max`` the oldest
  one is cut. An honest handshake takes milliseconds, a silent stranger's has all the time in the world.
* Connections altogether: beyond ``connections_max`` the newest one is cut.

A connection is cut by shutting its TCP stream down; libzmq then sees an ordinary end. The monitor names a connection by its
file descriptor, which may be another one's by the time we read that, so the descriptor is duplicated first and cut only when
it is a TCP connection to our own port.

Hazards: a monitor that is left open makes ``Context.term()`` hang, so :meth:`ConnectionGuard.close` runs before the socket's
own close; libzmq's IO thread *blocks* while the monitor's PAIR is full, so that one has no high-water mark and is read in
batches.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket as os_socket
import struct
from collections.abc import Callable
from typing import Final

import zmq

from kakeya_zmq.io.reactor import Reactor

REFUSED_WRONG_PSK: Final = "a connection was refused: its PSK is not this fleet's"
REFUSED_NOT_OURS: Final = "a connection was refused: it does not speak this protocol"
REFUSED_UNFINISHED: Final = "a connection ended before its handshake was through"
"""A port scanner, a silent stranger, or a node of ours that was paused or ran away: says nothing about its key."""
REFUSED_UNPROVEN: Final = "a silent connection was cut: too many of them"
REFUSED_TOO_MANY: Final = "a connection was refused: too many connections"
REFUSED_NO_DESCRIPTOR: Final = "a connection could not be accepted: out of file descriptors"
UNPROVEN_MAX: Final = 256
"""Handshakes under way at once: a fleet of two hundred nodes that start in the same moment."""
CONNECTIONS_MAX: Final = 1024
"""As many as there are sessions."""

_EVENT: Final = struct.Struct("=HI")
_EVENTS_PER_TURN: Final = 64
_CRYPTOGRAPHIC: Final = int(zmq.Event.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)
_FAILURES: Final = frozenset(
    {
        zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
        zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
        zmq.Event.HANDSHAKE_FAILED_AUTH,
    }
)
_MASK: Final = (
    zmq.Event.ACCEPTED
    | zmq.Event.ACCEPT_FAILED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


class ConnectionGuard:
    """Watches one bound socket; see the module's text. Use it on the reactor's thread, from before the socket's bind.

    Args:
        on_refused: told the reason of each refused or cut connection.
        unproven_max: most connections that have not proven themselves.
        connections_max: most connections.
    """

    def __init__(
        self,
        reactor: Reactor,
        socket: zmq.Socket[bytes],
        *,
        on_refused: Callable[[str], None],
        unproven_max: int = UNPROVEN_MAX,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self._reactor = reactor
        self._watched = socket
        self._on_refused = on_refused
        self._unproven_max = unproven_max
        self._connections_max = connections_max
        self._port: int | None = None
        self._unproven: dict[int, None] = {}
        """File descriptors, the longest connected first."""
        self._proven: set[int] = set()
        self._failure_told = False
        """Whether the last event told why the connection that is about to end does so."""
        self._closed = False
        address = f"inproc://kakeya-connections-{secrets.token_hex(8)}"
        socket.monitor(address, _MASK)
        self._pair = reactor.context.socket(zmq.PAIR)
        self._pair.linger = 0
        self._pair.rcvhwm = 0
        self._pair.connect(address)
        reactor.register(self._pair, self._on_readable)

    @property
    def connections(self) -> int:
        """Connections now, in the handshake or through."""
        return len(self._unproven) + len(self._proven)

    def listening(self, port: int) -> None:
        """The socket is bound to this TCP port. Nothing is cut before."""
        self._port = port

    def prove(self, frame: zmq.Frame) -> None:
        """A peer's message came, with this first frame: its connection has passed the handshake."""
        try:
            descriptor = frame.get(zmq.SRCFD)
        except zmq.ZMQError:
            # A libzmq that does not say where a message came from: then all connections are alike.
            self._unproven_max = self._connections_max
            return
        if descriptor in self._proven or self._closed:
            return
        # What the monitor still holds is older than the message, so the number may still stand for another connection.
        with contextlib.suppress(zmq.Again):
            self._take_events(None)
        if descriptor in self._unproven:
            del self._unproven[descriptor]
            self._proven.add(descriptor)

    def close(self) -> None:
        """Stop watching; call it before the watched socket is closed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._watched.closed:
            self._watched.disable_monitor()
        self._reactor.close_socket(self._pair)

    # --- events -----------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        self._take_events(_EVENTS_PER_TURN)

    def _take_events(self, count: int | None) -> None:
        """Take up to ``count`` events, or all.

        Raises:
            zmq.Again: there was none.
        """
        taken = 0
        while count is None or taken < count:
            try:
                frames = self._pair.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                if taken == 0:
                    raise
                return
            taken += 1
            if len(frames) == 2 and len(frames[0]) == _EVENT.size:
                self._take_event(*_EVENT.unpack(frames[0]))

    def _take_event(self, event: int, value: int) -> None:
        # libzmq's IO thread tells a failure and the end it leads to in one go; some protocol errors it does not tell at all.
        failure_told, self._failure_told = self._failure_told, event in _FAILURES
        match event:
            case zmq.Event.ACCEPTED:
                self._accepted(value)
            case zmq.Event.DISCONNECTED:
                self._proven.discard(value)
                if value in self._unproven:
                    del self._unproven[value]
                    if not failure_told:
                        self._on_refused(REFUSED_UNFINISHED)
            case zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                self._on_refused(REFUSED_WRONG_PSK if value == _CRYPTOGRAPHIC else REFUSED_NOT_OURS)
            case zmq.Event.HANDSHAKE_FAILED_AUTH:
                self._on_refused(REFUSED_WRONG_PSK)
            case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
                self._on_refused(REFUSED_UNFINISHED)
            case zmq.Event.ACCEPT_FAILED:
                self._on_refused(REFUSED_NO_DESCRIPTOR)

    def _accepted(self, descriptor: int) -> None:
        # The number may be that of a connection whose end was not told.
        self._proven.discard(descriptor)
        self._unproven.pop(descriptor, None)
        self._unproven[descriptor] = None
        if len(self._unproven) > self._unproven_max:
            self._cut(next(iter(self._unproven)), REFUSED_UNPROVEN)
        elif self.connections > self._connections_max:
            self._cut(descriptor, REFUSED_TOO_MANY)

    def _cut(self, descriptor: int, reason: str) -> None:
        del self._unproven[descriptor]
        try:
            duplicate = os_socket.socket(fileno=os.dup(descriptor))
        except OSError:
            return  # gone already, or no socket any more
        with duplicate, contextlib.suppress(OSError):
            if duplicate.family in (os_socket.AF_INET, os_socket.AF_INET6) and duplicate.getsockname()[1] == self._port:
                duplicate.shutdown(os_socket.SHUT_RDWR)
                self._on_refused(reason)
