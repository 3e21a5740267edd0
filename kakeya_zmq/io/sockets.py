"""Socket profiles, listening and the two handshakes (CURVE, PLAIN): every socket of the project is made here.

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
from dataclasses import dataclass
from typing import Final, Protocol

import zmq

from kakeya_zmq.io.addresses import Address, PortRange
from wire import limits
from wire.errors import ConfigError, LocalProtocolError, PortInUseError

LIBZMQ_VERSION_MIN: Final = (4, 3, 3)
"""Older ones have remotely exploitable bugs (CVE-2019-6250, CVE-2019-13132, CVE-2020-15166)."""
PLAIN_USERNAME: Final = b"kakeya"
"""Says nothing: the one-time token in the password field is what counts."""
ZAP_DOMAIN_BYTES_MAX: Final = 255

_KEEPALIVE_IDLE_S: Final = 30
_KEEPALIVE_INTERVAL_S: Final = 10
_KEEPALIVE_COUNT: Final = 3
_RECONNECT_MS: Final = 100
_RECONNECT_MS_MAX: Final = 5_000
_LANE_LINGER_MS: Final = 2_000
_LANE_MESSAGES: Final = 4
_CONTROL_MESSAGES: Final = 64
_CONTROL_REQUESTS: Final = 16
"""Requests queued for one connection, of 1 MiB at most each. With 8, small ones in flight cost a node up to 15 % more."""
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
    queue_messages=_CONTROL_REQUESTS,
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


# --- listening ---------------------------------------------------------------------------------------------------


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
