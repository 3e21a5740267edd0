"""The connection below the session of a control client: one DEALER after another to the same server.

Starting over always means a new socket (a ROUTER keeps routes of dead ones, libzmq#1575). Frames that the socket cannot take
yet wait in a bounded queue, because a request must never vanish.

The socket's monitor says why nothing works: a refused handshake is a wrong PSK, a refused connection is an absent server.
And it tells of a broken connection at once, where the machine would need seconds of silence.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

import zmq

from kakeya_zmq.io.addresses import Address
from kakeya_zmq.io.incoming import Incoming, MessageReader
from kakeya_zmq.io.monitor import CLIENT_EVENTS, LinkEvent, SocketMonitor
from kakeya_zmq.io.names import REASONS as NAME_REASONS
from kakeya_zmq.io.names import Dialling, Names
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.io.schedule import TimerHandle
from kakeya_zmq.io.sockets import CONTROL_CLIENT, apply_curve_client, create_socket
from wire import limits
from wire.keys import FleetKey

QUEUE_MESSAGES_MAX: Final = 2 * limits.REQUESTS_IN_FLIGHT_MAX
"""Frames that wait for the socket: every open request and one update or cancel for each."""
QUEUE_BYTES_MAX: Final = 64 * limits.MIB
WRONG_PSK: Final = "the other side does not accept this PSK, or something in between closes connections"
CONNECTION_LOST: Final = "the connection broke"
REJECTIONS_OF_A_KNOWN_PEER: Final = 3
"""Handshakes in a row that a peer which had accepted our PSK must refuse before we believe that it has another one."""
REJECTIONS_OF_A_STRANGER: Final = 2
"""The same of one that never did; libzmq tries again within a fraction of a second."""
NOT_A_NODE: Final = "what answers at this address is not a node of this fleet"
PAUSED: Final = "it takes the connection but does not answer: paused or overloaded"
NOBODY_THERE: Final = "nothing answers at this address"

Keys: TypeAlias = Callable[[], Sequence[FleetKey]]


class SendQueue:
    """Messages that wait for a socket, and their size."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._messages: deque[list[bytes]] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def first(self) -> list[bytes]:
        return self._messages[0]

    @property
    def last(self) -> list[bytes]:
        return self._messages[-1]

    def append(self, frames: list[bytes]) -> None:
        self._messages.append(frames)
        self.size_bytes += sum(map(len, frames))

    def drop_first(self) -> None:
        self.size_bytes -= sum(map(len, self._messages.popleft()))

    def clear(self) -> None:
        self._messages.clear()
        self.size_bytes = 0


@dataclass(frozen=True, slots=True)
class LinkOwner:
    """What a link tells, on the reactor's thread."""

    opened: Callable[[str | None], None]
    """There is a new socket; why it takes the place of one with a session, if it does."""
    received: Callable[[Incoming], None]
    failed: Callable[[str], None]
    """Why there is no connection, while there is no session either."""


class ClientLink:
    """See the module's text. Nothing happens before :meth:`open`.

    Args:
        address: where the server listens.
        keys: gives the PSKs that may be valid. They are tried in turn, as an endpoint admits one of them only.
        names: looks up the host of ``address``, where it is a name, each time the connection is opened.
        queue: where frames wait for the socket.
        counters: counts ``sockets``, ``handshakes_rejected`` and ``frames_dropped``.
    """

    def __init__(
        self,
        reactor: Reactor,
        *,
        address: Address,
        keys: Keys,
        names: Names,
        queue: SendQueue,
        counters: Counter[str],
        owner: LinkOwner,
    ) -> None:
        self.fleet_key = keys()[0]
        """The PSK the connection is made with."""
        self._reactor = reactor
        self._address = address
        self._keys = keys
        self._tried = 0
        """Keys that were refused in a row."""
        self._detour_port = 0
        """Where the server goes on for now; 0: at its address."""
        self._dialling = Dialling(reactor, address.host, names)
        self._queue = queue
        self._counters = counters
        self._owner = owner
        self._known = False
        """Whether there has been a session: the server accepted our PSK."""
        self._in_session = False
        self._connected = False
        """Whether the present socket has had a TCP connection."""
        self._secured = False
        """Whether the present socket has finished a ZMTP handshake."""
        self._rejections = 0
        """Handshakes in a row that were refused."""
        self._error: str | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: SocketMonitor | None = None
        self._reopen_timer: TimerHandle | None = None

    @property
    def host(self) -> str:
        """The IP address by which the server is reached."""
        return self._dialling.host

    # --- what the owner does ----------------------------------------------------------------------------------------

    def session_began(self) -> None:
        self._known = self._in_session = True
        self._dialling.reached()

    def session_ended(self, reason: str) -> str:
        """Also for an attempt that never got up. Returns why there is no session."""
        # Of a HELLO that never reached a peer with our PSK, the socket's monitor knows more than the machine.
        line = reason if self._secured else self._error or self._silence()
        if self._in_session:
            self._error = None
        self._in_session = False
        return line

    def open(self, replaced_because: str | None = None) -> None:
        """Make a socket and connect it."""
        socket = create_socket(self._reactor.context, zmq.DEALER, CONTROL_CLIENT)
        self._counters["sockets"] += 1
        # With IMMEDIATE, libzmq throws away what has been received but not yet read when the connection ends, among it the
        # Goodbye that explains the end (measured: one in twenty). What IMMEDIATE is for is done here: frames wait in our own
        # queue until the handshake is through, and after a lost connection comes a new socket.
        socket.immediate = 0
        # Where a server goes on for now it admits a newer key than where it came from.
        keys = tuple(reversed(self._keys())) if self._detour_port else self._keys()
        self.fleet_key = keys[self._tried % len(keys)]
        apply_curve_client(socket, self.fleet_key.curve_server().public, self.fleet_key.curve_client())
        self._socket = socket
        self._connected = self._secured = False
        self._error = replaced_because
        self._monitor = SocketMonitor(self._reactor, socket, CLIENT_EVENTS, self._on_link_event)
        self._reactor.register(socket, self._on_readable, self._on_writable)
        # A name is looked up anew for each socket, and each address it has gets its turn.
        self._dialling.dial(
            self._detour_port or self._address.port,
            connect=lambda literal: self._connect(socket, literal),
            failed=self._fail,
        )
        self._owner.opened(replaced_because)

    def replace(self, reason: str) -> None:
        """Another socket at once, although there is a session."""
        self._close_socket()
        self.open(reason)

    def reopen(self, delay_s: float, port: int) -> None:
        """Another socket later; to this port of the server, unless it is 0."""
        self._detour_port = port
        self._close_socket()
        self._cancel_reopening()
        self._tried = 0
        self._reopen_timer = self._reactor.call_later(delay_s, self.open)

    def close(self, *, linger_ms: int) -> None:
        self._cancel_reopening()
        self._close_socket(linger_ms=linger_ms)

    def send(self, frames: list[bytes]) -> None:
        """Now, or as soon as the socket takes it."""
        if self._socket is None:
            self._counters["frames_dropped"] += 1  # between two sockets nothing can be sent, and nobody would understand it
            return
        if not self._queue and self._secured:
            try:
                self._socket.send_multipart(frames, zmq.DONTWAIT)
                return
            except zmq.Again:
                self._reactor.watch_writable(self._socket, True)
        if self._queue and self._queue.last == frames:
            return  # the same HELLO again, while the first one still waits for a connection
        if len(self._queue) >= 2 * QUEUE_MESSAGES_MAX:
            # Requests are refused long before; what else is sent (updates, cancels, pings) can be lost with the connection.
            self._counters["frames_dropped"] += 1
            return
        self._queue.append(frames)

    # --- the socket -------------------------------------------------------------------------------------------------

    def _connect(self, socket: zmq.Socket[bytes], literal: Address) -> None:
        if self._error in NAME_REASONS:  # it has one now
            self._error = None
        socket.connect(literal.zmq_endpoint())

    def _close_socket(self, *, linger_ms: int = 0) -> None:
        self._dialling.stop()
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if self._socket is not None:
            self._reactor.close_socket(self._socket, linger_ms=linger_ms)
            self._socket = None
        self._queue.clear()

    def _cancel_reopening(self) -> None:
        if self._reopen_timer is not None:
            self._reopen_timer.cancel()

    def _on_readable(self) -> None:
        if self._socket is None:
            raise zmq.Again
        # What is left of a message that is too long goes with the socket, whose owner need not read it for that.
        self._owner.received(MessageReader(self._socket).receive())

    def _on_writable(self) -> None:
        if self._socket is None:
            return
        while self._queue:
            try:
                self._socket.send_multipart(self._queue.first, zmq.DONTWAIT)
            except zmq.Again:
                return
            self._queue.drop_first()
        self._reactor.watch_writable(self._socket, False)

    # --- what its monitor tells -------------------------------------------------------------------------------------

    def _on_link_event(self, event: LinkEvent) -> None:
        match event:
            case LinkEvent.REJECTED if self._next_key():
                self._close_socket()
                self.open()
            case LinkEvent.REJECTED:
                self._rejected()
            case LinkEvent.UNREACHED:
                # A rejected connection is retried too; that it was rejected is the news.
                if self._error is None:
                    self._fail(self._silence())
            case LinkEvent.SECURED:
                self._secured = True
                self._rejections = 0
                self._tried = 0
                self._error = None
                if self._queue and self._socket is not None:
                    self._reactor.watch_writable(self._socket, True)
            case LinkEvent.LOST:
                if self._secured:
                    self._lost()
                elif self._error is None:
                    self._fail(NOT_A_NODE)
            case LinkEvent.CONNECTED:
                self._connected = True
            case _:
                assert_never(event)

    def _next_key(self) -> bool:
        """Whether there is another key to try before the endpoint is given up for now."""
        if self._in_session or self._secured:
            return False
        self._tried += 1
        return self._tried < len(self._keys())

    def _rejected(self) -> None:
        self._counters["handshakes_rejected"] += 1
        self._rejections += 1
        # A process that dies during a handshake looks the same once; where our PSK was accepted, wait for proof.
        if self._rejections >= (REJECTIONS_OF_A_KNOWN_PEER if self._known else REJECTIONS_OF_A_STRANGER):
            self._fail(WRONG_PSK)
        elif self._known:
            self._fail(CONNECTION_LOST)
        else:
            self._error = CONNECTION_LOST  # no news yet

    def _silence(self) -> str:
        """What a connection that never became secure means."""
        if not self._connected:
            return NOBODY_THERE
        return PAUSED if self._known else NOT_A_NODE

    def _fail(self, line: str) -> None:
        self._error = line
        if not self._in_session and not self._secured:
            self._owner.failed(line)

    def _lost(self) -> None:
        """The connection broke. The server's session belongs to it, so start over at once instead of waiting for silence."""
        socket = self._socket
        try:
            while self._socket is socket:  # what arrived before the end still counts: answers, a Goodbye
                self._on_readable()
        except zmq.Again:
            self._secured = False
            if self._in_session:
                self._detour_port = 0
                self.replace(CONNECTION_LOST)
