"""Socket profiles, addresses and the two handshakes (CURVE, PLAIN): every socket of the project is made here.

Rules, each learnt from a public thread or an experiment:

1. LINGER is set at creation, so that no forgotten socket can make ``Context.term`` hang.
2. MAXMSGSIZE is never libzmq's default (-1): a frame's claimed size is allocated before it arrives.
3. Identities are never set: a duplicate one silently swallows messages. Names live in the sealed handshake.
4. A security domain is never empty: without one libzmq asks nobody and lets everybody in.
5. A socket belongs to the thread that made it; other threads reach that thread through a :class:`WakeUp`.
6. No ZMTP heartbeats. libzmq 4.3.5 aborts the process when a heartbeat is due on a connection that has ended while its
   receiving queue was full (``Assertion failed: !_io_error``: timer_event in stream_engine_base.cpp does not ask). Sessions
   ping by themselves, lanes have their clocks, and TCP keepalive finds connections whose other end has vanished.
"""

from __future__ import annotations

import contextlib
import errno
import re
import socket as os_socket
import threading
from dataclasses import dataclass
from typing import Final, Protocol

import zmq

from wire import limits
from wire.errors import ConfigError, LocalProtocolError, PortInUseError

LIBZMQ_VERSION_MIN: Final = (4, 3, 3)
"""Older ones have remotely exploitable bugs (CVE-2019-6250, CVE-2019-13132, CVE-2020-15166)."""
PLAIN_USERNAME: Final = b"kakeya"
"""Says nothing: the one-time token in the password field is what counts."""
ZAP_DOMAIN_BYTES_MAX: Final = 255

_PORT_MAX: Final = 65_535
_KEEPALIVE_IDLE_S: Final = 30
_KEEPALIVE_INTERVAL_S: Final = 10
_KEEPALIVE_COUNT: Final = 3
_RECONNECT_MS: Final = 100
_RECONNECT_MS_MAX: Final = 5_000
_LANE_LINGER_MS: Final = 2_000
_LANE_MESSAGES: Final = 4
_CONTROL_MESSAGES: Final = 64
_CONTROL_ANSWERS: Final = 16
"""Answers queued for one connection: a peer that asks and never reads costs so many on each of its connections."""
_BUS_MESSAGES: Final = 1_024
_LANE_HANDSHAKE_MS: Final = 2_000
"""Three round trips of a satellite link (600 ms each). Its bearer's handshake is all that a bulk port waits for."""
_SUBSCRIPTION_MESSAGE_BYTES_MAX: Final = 1_024
"""A subscription has two bytes. The largest command of CURVE's handshake, INITIATE, has some 300 with our metadata."""
_SUBSCRIPTION_BUFFER_BYTES: Final = 16_384
"""What the system holds of a subscriber that sends what it likes, until it is cut."""


class CurveKeys(Protocol):
    """A CURVE key pair, raw 32 bytes each (wire.keys.CurvePair has this shape)."""

    @property
    def public(self) -> bytes: ...

    @property
    def secret(self) -> bytes: ...


# --- profiles ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SocketProfile:
    """How one kind of socket is set up.

    ``message_bytes_max`` bounds one frame that comes; ``queue_messages`` is the high-water mark of each direction and
    connection (it counts messages, so it never bounds bytes by itself), ``send_queue_messages`` another one for what is
    sent; ``receive_buffer_bytes`` bounds the system's own buffer; ``immediate`` queues only to finished connections.
    """

    name: str
    socket_types: tuple[int, ...]
    message_bytes_max: int
    queue_messages: int
    send_queue_messages: int | None = None
    receive_buffer_bytes: int | None = None
    linger_ms: int = 0
    immediate: bool = False
    router_mandatory: bool = False

    def options(self) -> tuple[tuple[int, int], ...]:
        """(libzmq option, value), in the order in which they are set."""
        options = [
            (zmq.LINGER, self.linger_ms),
            (zmq.IPV6, 1),
            (zmq.MAXMSGSIZE, self.message_bytes_max),
            (zmq.SNDHWM, self.queue_messages if self.send_queue_messages is None else self.send_queue_messages),
            (zmq.RCVHWM, self.queue_messages),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MS_MAX),
            (zmq.HANDSHAKE_IVL, limits.HANDSHAKE_INTERVAL_MS),
            (zmq.HEARTBEAT_IVL, 0),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S),
            (zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_INTERVAL_S),
            (zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_COUNT),
        ]
        if self.receive_buffer_bytes is not None:
            options.append((zmq.RCVBUF, self.receive_buffer_bytes))
        if self.immediate:
            options.append((zmq.IMMEDIATE, 1))
        if self.router_mandatory:
            options.append((zmq.ROUTER_MANDATORY, 1))
        return tuple((int(option), value) for option, value in options)


CONTROL_SERVER: Final = SocketProfile(
    name="control server",
    socket_types=(zmq.ROUTER,),
    message_bytes_max=limits.CONTROL_MESSAGE_BYTES_MAX,
    queue_messages=_CONTROL_MESSAGES,
    send_queue_messages=_CONTROL_ANSWERS,
    router_mandatory=True,
)
CONTROL_CLIENT: Final = SocketProfile(
    name="control client",
    socket_types=(zmq.DEALER,),
    message_bytes_max=limits.CONTROL_MESSAGE_BYTES_MAX,
    queue_messages=_CONTROL_MESSAGES,
    immediate=True,
)
BUS_PUB: Final = SocketProfile(
    name="bus publisher",
    socket_types=(zmq.PUB, zmq.XPUB),
    message_bytes_max=_SUBSCRIPTION_MESSAGE_BYTES_MAX,
    queue_messages=_BUS_MESSAGES,
    receive_buffer_bytes=_SUBSCRIPTION_BUFFER_BYTES,
)
BUS_SUB: Final = SocketProfile(
    name="bus subscriber",
    socket_types=(zmq.SUB, zmq.XSUB),
    message_bytes_max=limits.BUS_MESSAGE_BYTES_MAX,
    queue_messages=_BUS_MESSAGES,
)
LANE_PUSH: Final = SocketProfile(
    name="lane sender",
    socket_types=(zmq.PUSH,),
    message_bytes_max=limits.CHUNK_BYTES_MAX + limits.CHUNK_OVERHEAD_BYTES,
    queue_messages=_LANE_MESSAGES,
    linger_ms=_LANE_LINGER_MS,
    immediate=True,
)
LANE_PULL: Final = SocketProfile(
    name="lane receiver",
    socket_types=(zmq.PULL,),
    message_bytes_max=limits.CHUNK_BYTES_MAX + limits.CHUNK_OVERHEAD_BYTES,
    queue_messages=_LANE_MESSAGES,
)


def check_libzmq() -> None:
    """Refuse a libzmq with known remote holes.

    Raises:
        ConfigError: the loaded libzmq is older than 4.3.3.
    """
    found = zmq.zmq_version_info()
    if found < LIBZMQ_VERSION_MIN:
        raise ConfigError(
            f"libzmq {'.'.join(map(str, found))} has known security holes",
            remedy=f"upgrade pyzmq to one with libzmq {'.'.join(map(str, LIBZMQ_VERSION_MIN))} or newer",
        )


def create_socket(context: zmq.Context[zmq.Socket[bytes]], socket_type: int, profile: SocketProfile) -> zmq.Socket[bytes]:
    """Make a socket with every option of ``profile`` set, neither bound nor connected. Call it on the owning thread.

    Raises:
        LocalProtocolError: the profile is not for this socket type.
        zmq.ZMQError: the context is terminated or out of sockets.
    """
    if socket_type not in profile.socket_types:
        raise LocalProtocolError(f"the {profile.name} profile is not for socket type {socket_type}")
    socket = context.socket(socket_type)
    try:
        for option, value in profile.options():
            socket.setsockopt(option, value)
    except BaseException:
        socket.close(linger=0)
        raise
    return socket


# --- addresses ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Address:
    """A host (name, IPv4 or IPv6 without brackets) and a TCP port; port 0 asks for an ephemeral one when binding."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.host):
            raise ConfigError(_quoted("not a host", self.host), remedy="write a host name or an IP address")
        if not 0 <= self.port <= _PORT_MAX:
            raise ConfigError(f"port {self.port} is out of range", remedy=f"write a port from 0 to {_PORT_MAX}")

    def zmq_endpoint(self) -> str:
        """The libzmq form: ``tcp://host:port``, IPv6 in brackets."""
        return f"tcp://{self}"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class PortRange:
    """TCP ports ``first`` to ``last``, both included, for sites whose firewall opens only some."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last <= _PORT_MAX:
            raise ConfigError(
                f"port range {self.first}-{self.last} is wrong",
                remedy=f"write first-last with 1 <= first <= last <= {_PORT_MAX}",
            )


_HOST: Final = re.compile(r"[0-9A-Za-z_](?:[0-9A-Za-z_.-]{0,252})|[0-9A-Fa-f:.]{2,45}(?:%[0-9A-Za-z_.-]{1,32})?")
_ADDRESS: Final = re.compile(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<host>[^:\[\]]+)):(?P<port>[0-9]{1,5})")
_RANGE: Final = re.compile(r"(?P<first>[0-9]{1,5})(?:-(?P<last>[0-9]{1,5}))?")


def parse_address(text: str) -> Address:
    """Parse ``host:port``, ``192.0.2.1:port`` or ``[2001:db8::1]:port``.

    Raises:
        ConfigError: anything else, among it a bare IPv6 address and ``*``.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        raise ConfigError(_quoted("not an address", text), remedy="write host:port, or [IPv6]:port")
    six = match["six"]
    if six is not None and ":" not in six:
        raise ConfigError(_quoted("not an IPv6 address", six), remedy="brackets are for IPv6 addresses only")
    return Address(host=six if six is not None else match["host"], port=int(match["port"]))


def parse_port_range(text: str) -> PortRange:
    """Parse ``first-last`` or one port.

    Raises:
        ConfigError: not a range of ports.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(_quoted("not a port range", text), remedy="write first-last, for example 7000-7099")
    return PortRange(first=int(match["first"]), last=int(match["last"] or match["first"]))


def bind(socket: zmq.Socket[bytes], address: Address) -> Address:
    """Bind and return the real address (the port differs when ``address.port`` is 0).

    Raises:
        PortInUseError: somebody else listens there.
        ConfigError: the address can't be bound on this machine.
    """
    # libzmq takes only interface names and literal addresses here.
    literal = Address(host="127.0.0.1", port=address.port) if address.host == "localhost" else address
    try:
        socket.bind(literal.zmq_endpoint())
    except (zmq.ZMQError, OSError) as error:
        if isinstance(error, zmq.ContextTerminated):
            raise
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"{address} is already in use", remedy="stop what listens there, or choose another port (0 takes a free one)"
            ) from error
        raise ConfigError(
            f"cannot listen on {address}: {error.strerror}", remedy="write an address of this machine, for example 127.0.0.1"
        ) from error
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return Address(host=address.host, port=int(endpoint.rpartition(":")[2]))


def bind_in_range(socket: zmq.Socket[bytes], host: str, ports: PortRange | None) -> Address:
    """Bind on the first free port of ``ports``, or on an ephemeral one when it is None.

    Raises:
        PortInUseError: every port of the range is taken.
        ConfigError: the host can't be bound on this machine.
    """
    if ports is None:
        return bind(socket, Address(host=host, port=0))
    for port in range(ports.first, ports.last + 1):
        with contextlib.suppress(PortInUseError):
            return bind(socket, Address(host=host, port=port))
    raise PortInUseError(
        f"every port from {ports.first} to {ports.last} is in use",
        remedy="give a wider port range, or fewer transfers at once",
    )


def _quoted(what: str, text: str) -> str:
    return f"{what}: {text[:64]!r}"


# --- handshakes --------------------------------------------------------------------------------------------------


def apply_curve_server(socket: zmq.Socket[bytes], pair: CurveKeys, domain: str) -> None:
    """Accept only peers that know ``pair.public`` and that the :class:`~kakeya_zmq.io.gate.Gate` lets into ``domain``.

    Must be called before ``bind``.

    Raises:
        LocalProtocolError: a key is not 32 bytes, or the domain is empty or too long.
    """
    _require_key(pair.public)
    _require_key(pair.secret)
    _set_domain(socket, domain)
    socket.curve_server = 1
    socket.curve_secretkey = pair.secret
    socket.curve_publickey = pair.public


def apply_curve_client(socket: zmq.Socket[bytes], server_public: bytes, client_pair: CurveKeys) -> None:
    """Speak CURVE to a server with this public key. Must be called before ``connect``.

    Raises:
        LocalProtocolError: a key is not 32 bytes.
    """
    for key in (server_public, client_pair.public, client_pair.secret):
        _require_key(key)
    socket.curve_serverkey = server_public
    socket.curve_publickey = client_pair.public
    socket.curve_secretkey = client_pair.secret


def apply_plain_server(socket: zmq.Socket[bytes], domain: str) -> None:
    """Accept only the bearer of the token that the gate admits into ``domain``, whose handshake may take two seconds.

    Must be called before ``bind``.

    Raises:
        LocalProtocolError: the domain is empty or too long.
    """
    _set_domain(socket, domain)
    socket.plain_server = 1
    socket.handshake_ivl = _LANE_HANDSHAKE_MS


def apply_plain_client(socket: zmq.Socket[bytes], token: str) -> None:
    """Present a one-time token. Must be called before ``connect``."""
    socket.plain_username = PLAIN_USERNAME
    socket.plain_password = token.encode("ascii")


def _set_domain(socket: zmq.Socket[bytes], domain: str) -> None:
    if not 1 <= len(domain.encode("utf-8")) <= ZAP_DOMAIN_BYTES_MAX:
        raise LocalProtocolError("a security domain needs 1 to 255 bytes: without one libzmq lets everybody in")
    socket.zap_domain = domain.encode("utf-8")


def _require_key(key: bytes) -> None:
    if len(key) != 32:
        raise LocalProtocolError(f"a CURVE key has 32 bytes, not {len(key)}")


# --- waking a thread that polls ------------------------------------------------------------------------------------


class WakeUp:
    """Wakes a thread that waits in a ``zmq.Poller``: register ``fileno()`` for POLLIN, ``drain()`` when it is readable.

    ``notify`` may be called from any thread, at any time, also after ``close`` (then it does nothing).
    """

    def __init__(self) -> None:
        self._reader, self._writer = os_socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        # Reentrant: a signal handler or a finalizer may notify while this thread is notifying.
        self._lock = threading.RLock()
        self._closed = False

    def fileno(self) -> int:
        return self._reader.fileno()

    def notify(self) -> None:
        with self._lock:
            if not self._closed:
                # A full pipe already holds a wake-up that nobody has read yet.
                with contextlib.suppress(BlockingIOError):
                    self._writer.send(b"\0")

    def drain(self) -> None:
        """Forget all wake-ups so far. Call it before looking at what one was woken for."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._reader.close()
            self._writer.close()
