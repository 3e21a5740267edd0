"""Who is connected to a bound socket: counts connections, tells refused handshakes apart, and cuts what is too much.

libzmq has no bound on connections, and a process without free file descriptors serves nobody. So the guard follows the
socket's monitor and keeps three bounds. Connections are *proven* or not, as the owner of the socket says: on the control
plane those in use by a session (whose number is bounded for each identity), on the bus those from behind the handshake.

* Connections of one address: at most ``address_max``.
* Connections that are not proven: at most ``unproven_max``.
* Connections altogether: at most ``connections_max``.

What is cut beyond a bound is one that is not proven (the newest one is not, so there is one): the oldest one of the
address in question, else of the address that has the most of them. An honest handshake takes milliseconds, a silent
stranger's has all the time in the world.

Where being proven says little, as on the bus, whose readers all have the same key, proven ones make room, too
(``address_share``). An eighth of all places is kept for who is not proven yet, so that everybody gets through a handshake.
Who is proven when the other places are taken gets that of some other connection of the address that has most proven ones:
of any one of them. The oldest would be the reader that was there before a crowd came to its address, the newest the one that
has just got in; so each has the same chance, and a crowd mostly pushes out itself. An address with no more than its share
loses none. A stranger without the key pushes out nobody who is proven.

A connection is cut by shutting its TCP stream down; libzmq then sees an ordinary end. The monitor names a connection by its
file descriptor, which may be another one's by the time we read that; :mod:`kakeya_zmq.io.borrowed` sees to it that only a
TCP connection to our own port is cut, and that it is cut also where no descriptor is free.

Hazards: a monitor that is left open makes ``Context.term()`` hang, so :meth:`ConnectionGuard.close` runs before the socket's
own close; libzmq's IO thread *blocks* while the monitor's PAIR is full, so that one has no high-water mark and is read in
batches. So no kind of event may be listened to that comes without end: ACCEPT_FAILED does in a process without free
descriptors, thousands in a second (who looks at the descriptors instead: ``daemons.descriptor_watch``).
"""

from __future__ import annotations

import contextlib
import secrets
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import zmq

from kakeya_zmq.io.borrowed import SetAside, oldest_of_busiest
from kakeya_zmq.io.monitor import monitor_pair
from kakeya_zmq.io.reactor import Reactor

REFUSED_WRONG_PSK: Final = "a connection was refused: its PSK is not this fleet's"
REFUSED_NOT_OURS: Final = "a connection was refused: it does not speak this protocol"
REFUSED_UNFINISHED: Final = "a connection ended before its handshake was through"
"""A port scanner, a silent stranger, or a node of ours that was paused or ran away: says nothing about its key."""
REFUSED_UNPROVEN: Final = "a silent connection was cut: too many of them"
REFUSED_TOO_MANY: Final = "a connection was refused: too many connections"
REFUSED_ADDRESS: Final = "a connection was refused: too many from one address"
REFUSED_CROWDED: Final = "a reader was cut: its address has most of the places, and another one needed one"
REFUSED_NO_DESCRIPTOR: Final = "a connection could not be accepted: out of file descriptors"
"""Not seen here: told by who looks at the descriptors of the process."""
UNPROVEN_MAX: Final = 256
"""Handshakes under way at once: a fleet of two hundred nodes that start in the same moment."""
CONNECTIONS_MAX: Final = 1024
"""As many as there are sessions."""
ADDRESS_SHARE: Final = 8
"""Readers of one address that nobody pushes out: the nodes, dashboards and monitors of one machine."""
_NEWCOMERS_SHARE: Final = 8
"""One place of so many is kept for who is not proven yet, where proven ones make room."""

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
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


@dataclass(frozen=True, slots=True, eq=False)
class Connection:
    """One connection, also when its file descriptor has become another one's."""

    descriptor: int
    host: str
    """What the bound of an address goes by; empty when it could not be seen."""


class ConnectionGuard:
    """Watches one bound socket; see the module's text. Use it on the reactor's thread, from before the socket's bind.

    Args:
        on_refused: told the reason of each refused or cut connection.
        unproven_max: most connections that are not proven; never more than half of all.
        connections_max: most connections.
        address_max: most connections from one address. None: half of all, or, where proven ones make room, all that nobody
            else wants.
        address_share: proven connections make room for newly proven ones, but of an address with no more than so many. None:
            no proven one does.
        choose: one of those that may make room, by file descriptor.
    """

    def __init__(
        self,
        reactor: Reactor,
        socket: zmq.Socket[bytes],
        *,
        on_refused: Callable[[str], None],
        unproven_max: int = UNPROVEN_MAX,
        connections_max: int = CONNECTIONS_MAX,
        address_max: int | None = None,
        address_share: int | None = None,
        choose: Callable[[Sequence[int]], int] = secrets.choice,
    ) -> None:
        self._reactor = reactor
        self._watched = socket
        self._on_refused = on_refused
        self._unproven_max = min(unproven_max, max(1, connections_max // 2))
        self._connections_max = connections_max
        if address_max is None:
            address_max = max(1, connections_max // 2) if address_share is None else connections_max
        self._address_max = address_max
        self._address_share = address_share
        self._proven_max = max(1, connections_max - max(1, connections_max // _NEWCOMERS_SHARE))
        """Where proven ones make room."""
        self._choose = choose
        self._port: int | None = None
        self._known: dict[int, Connection] = {}
        """By file descriptor."""
        self._unproven: dict[int, bool] = {}
        """File descriptors, the longest connected first, and whether a message has come from behind the handshake."""
        self._of_host: Counter[str] = Counter()
        self._failure_told = False
        """Whether the last event told why the connection that is about to end does so."""
        self._closed = False
        self._borrowed = SetAside()
        try:
            self._pair = monitor_pair(reactor.context, socket, _MASK)
        except BaseException:
            self._borrowed.close()
            raise
        reactor.register(self._pair, self._on_readable)

    @property
    def connections(self) -> int:
        """Connections now, in the handshake or through."""
        return len(self._known)

    def listening(self, port: int) -> None:
        """The socket is bound to this TCP port. Nothing is cut before."""
        self._port = port

    def prove(self, frame: zmq.Frame, *, wholly: bool = True) -> Connection | None:
        """A peer's message came, with this first frame: its connection is proven, or (not ``wholly``) only through the
        handshake. None: it is not known any more."""
        try:
            descriptor = frame.get(zmq.SRCFD)
        except zmq.ZMQError:
            # A libzmq that does not say where a message came from: then all connections are alike.
            self._unproven_max = self._connections_max
            return None
        if self._closed:
            return None
        if descriptor in self._unproven or descriptor not in self._known:
            # What the monitor still holds is older than the message, so the number may still stand for another connection.
            with contextlib.suppress(zmq.Again):
                self._take_events(None)
            if not wholly and descriptor in self._unproven:
                self._unproven[descriptor] = True
            elif wholly and self._unproven.pop(descriptor, None) is not None:
                self._make_room(descriptor)
        return self._known.get(descriptor)

    def doubt(self, connection: Connection) -> None:
        """What proved a connection is over: it is like a new one."""
        descriptor = connection.descriptor
        if self._closed:
            return
        if self._known.get(descriptor) is connection and descriptor not in self._unproven:
            self._unproven[descriptor] = True
            self._keep_bounds(descriptor)

    def knows(self, connection: Connection | None) -> bool:
        """Whether it has not ended, as far as has been told."""
        return connection is not None and self._known.get(connection.descriptor) is connection

    def cut(self, connection: Connection, reason: str) -> None:
        """End a connection for what came over it; one that has ended already is nobody's any more."""
        if not self._closed and self._known.get(connection.descriptor) is connection:
            self._cut(connection.descriptor, reason)

    def close(self) -> None:
        """Stop watching; call it before the watched socket is closed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._watched.closed:
            self._watched.disable_monitor()
        self._reactor.close_socket(self._pair)
        self._borrowed.close()

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
                if self._unproven.get(value) is False and not failure_told:
                    self._on_refused(REFUSED_UNFINISHED)
                self._forget(value)
            case zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                self._on_refused(REFUSED_WRONG_PSK if value == _CRYPTOGRAPHIC else REFUSED_NOT_OURS)
            case zmq.Event.HANDSHAKE_FAILED_AUTH:
                self._on_refused(REFUSED_WRONG_PSK)
            case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
                self._on_refused(REFUSED_UNFINISHED)

    def _accepted(self, descriptor: int) -> None:
        self._forget(descriptor)  # the number may be that of a connection whose end was not told
        host = self._borrowed.host(descriptor, self._port)
        self._known[descriptor] = Connection(descriptor, host)
        self._of_host[host] += 1
        self._unproven[descriptor] = False
        self._keep_bounds(descriptor)

    def _keep_bounds(self, newest: int) -> None:
        host = self._known[newest].host
        if host and self._of_host[host] > self._address_max:
            self._cut(next(each for each in self._unproven if self._known[each].host == host), REFUSED_ADDRESS)
        elif len(self._unproven) > self._unproven_max:
            self._cut(self._least_wanted(), REFUSED_UNPROVEN)
        elif self.connections > self._connections_max:
            self._cut(self._least_wanted(), REFUSED_TOO_MANY)

    def _make_room(self, newest: int) -> None:
        """One more is proven. Where that is one too many, some other one goes; it goes itself where no address has more than
        its share.
        """
        if self._address_share is None or len(self._known) - len(self._unproven) <= self._proven_max:
            return
        proven = {each: connection.host for each, connection in self._known.items() if each not in self._unproven}
        host, count = Counter(proven.values()).most_common(1)[0]
        if count > self._address_share:
            self._cut(self._choose([each for each in proven if proven[each] == host and each != newest]), REFUSED_CROWDED)
        else:
            self._cut(newest, REFUSED_TOO_MANY)

    def _least_wanted(self) -> int:
        return oldest_of_busiest({each: self._known[each].host for each in self._unproven})

    def _forget(self, descriptor: int) -> None:
        self._unproven.pop(descriptor, None)
        connection = self._known.pop(descriptor, None)
        if connection is not None:
            self._of_host[connection.host] -= 1
            if not self._of_host[connection.host]:
                del self._of_host[connection.host]

    def _cut(self, descriptor: int, reason: str) -> None:
        self._forget(descriptor)
        if self._borrowed.cut(descriptor, self._port):
            self._on_refused(reason)
