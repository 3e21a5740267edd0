"""Events, effects and bounds of the session machines; see kakeya_zmq.protocol.session for how they fit together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from kakeya_zmq.protocol.effects import Tick
from wire import limits
from wire.errors import FailureCode, LocalProtocolError
from wire.keys import NodeIdentity
from wire.messages import ProgressBody, ReplyBody, RequestBody, UpdateBody
from wire.text import is_ascii_line, is_node_id, is_word

HELLO_RESEND_S: Final = 1.0
PING_AFTER_SILENCE_S: Final = 1.0
PING_AFTER_NOT_SENDING_S: Final = 5.0
"""So that a client that only listens is not taken for gone; well under SESSION_IDLE_S."""
PEER_LOST_S: Final = 5.0
SESSION_IDLE_S: Final = 15.0
"""Three times the client's own patience: the client always notices first."""
BACKOFF_FIRST_S: Final = 0.1
BACKOFF_LAST_S: Final = 5.0
REQUESTS_WAITING_MAX: Final = 4 * limits.REQUESTS_IN_FLIGHT_MAX
"""Requests a client machine keeps for later; more fail RESOURCE_EXHAUSTED."""
DEADLINE_S_MAX: Final = 86_400.0
HELLOS_REMEMBERED: Final = 4096
"""Hashes of HELLOs that won't be accepted again; older ones could at worst take an unproven session slot."""
PINGS_PENDING_MAX: Final = 8
ROLES_MAX: Final = 8

assert PING_AFTER_NOT_SENDING_S < SESSION_IDLE_S
assert PING_AFTER_SILENCE_S < PEER_LOST_S < SESSION_IDLE_S


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """The other side of a session, as authenticated by the handshake. ``bus_port`` is 0 when it has no bus."""

    session_id: bytes
    node_id: str
    identity_public_key: bytes
    roles: tuple[str, ...]
    incarnation: int
    software: str
    bus_port: int


@dataclass(frozen=True, slots=True)
class LocalNode:
    """This side.

    Raises:
        LocalProtocolError: a name breaks its grammar (:mod:`wire.text`), or there are too many roles.
    """

    node_id: str
    identity: NodeIdentity
    roles: tuple[str, ...]
    incarnation: int
    software: str

    def __post_init__(self) -> None:
        # What does not fit the grammar would be refused by everybody else.
        if not is_node_id(self.node_id) or not all(map(is_word, self.roles)) or len(self.roles) > ROLES_MAX:
            raise LocalProtocolError(f"a node has a plain name and up to {ROLES_MAX} roles, which are words")
        if not is_ascii_line(self.software) or len(self.software) > limits.NAME_CHARACTERS_MAX:
            raise LocalProtocolError(f"a version is at most {limits.NAME_CHARACTERS_MAX} characters of ASCII")


# --- client events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SocketOpened:
    """A DEALER socket is connecting: messages may be sent."""


@dataclass(frozen=True, slots=True)
class FramesReceived:
    """One multipart message from the server."""

    frames: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Abandon:
    """The server broke the rules of the transport: the socket is given up, and another one opened ``wait_s`` later."""

    reason: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class StartRequest:
    """Ask. ``request_id`` comes from :meth:`ClientSession.next_request_id`; ids are started in increasing order."""

    request_id: int
    body: RequestBody = field(repr=False)
    timeout_s: float


@dataclass(frozen=True, slots=True)
class StartUpdate:
    """Add to an open request; ignored when it has ended or has not reached the server yet."""

    request_id: int
    body: UpdateBody


@dataclass(frozen=True, slots=True)
class StartCancel:
    """The answer is not wanted any more; nothing further is told about this request."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Leave:
    """End for good."""

    reason: str


ClientEvent: TypeAlias = SocketOpened | FramesReceived | Abandon | StartRequest | StartUpdate | StartCancel | Tick | Leave


# --- client effects ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send one multipart message on the DEALER socket."""

    frames: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Reopen:
    """Close the DEALER socket, open a new one after ``delay_s``, then tell SocketOpened."""

    delay_s: float
    port: int = 0
    """Where the server goes on, on the same host, for this one time; 0: where it always is."""


@dataclass(frozen=True, slots=True)
class SessionUp:
    peer: PeerInfo


@dataclass(frozen=True, slots=True)
class SessionDown:
    reason: str


@dataclass(frozen=True, slots=True)
class Replied:
    request_id: int
    body: ReplyBody = field(repr=False)


@dataclass(frozen=True, slots=True)
class Progressed:
    request_id: int
    body: ProgressBody = field(repr=False)


@dataclass(frozen=True, slots=True)
class Failed:
    request_id: int
    code: FailureCode
    message: str


@dataclass(frozen=True, slots=True)
class Measured:
    round_trip_ms: float


ClientEffect: TypeAlias = Transmit | Reopen | SessionUp | SessionDown | Replied | Progressed | Failed | Measured


# --- server events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RouterFrames:
    """One multipart message from a client; ``route`` is the ROUTER's name for the connection."""

    route: bytes
    frames: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class SendReply:
    """Answer and end a request; dropped when it has ended already."""

    session_id: bytes
    request_id: int
    body: ReplyBody = field(repr=False)


@dataclass(frozen=True, slots=True)
class SendProgress:
    """Tell progress of an open request; dropped when it has ended already."""

    session_id: bytes
    request_id: int
    body: ProgressBody = field(repr=False)


@dataclass(frozen=True, slots=True)
class SendFailure:
    """Fail and end a request; dropped when it has ended already."""

    session_id: bytes
    request_id: int
    code: FailureCode
    message: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End for good; every session is told."""

    reason: str


@dataclass(frozen=True, slots=True)
class Move:
    """Send every client to another port of this node, each as soon as nothing of it is open here; take nothing new."""

    port: int
    reason: str


@dataclass(frozen=True, slots=True)
class Expel:
    """End the sessions of whoever has this identity key, with what is open in them."""

    identity_public_key: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class RouteGone:
    """A message could not be sent: its connection has ended. A ROUTER's names for connections never come back."""

    route: bytes


ServerEvent: TypeAlias = RouterFrames | SendReply | SendProgress | SendFailure | Tick | Shutdown | Move | Expel | RouteGone


# --- server effects ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RouteTransmit:
    """Send one multipart message to a connection of the ROUTER."""

    route: bytes
    frames: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class RequestOpened:
    """A peer asks; ``deadline`` is absolute, seconds on the clock of ``now``."""

    peer: PeerInfo
    request_id: int
    body: RequestBody = field(repr=False)
    deadline: float


@dataclass(frozen=True, slots=True)
class RequestUpdated:
    session_id: bytes
    request_id: int
    body: UpdateBody


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """No answer is wanted any more: cancelled, deadline passed, session lost or left. None may be sent."""

    session_id: bytes
    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class PeerUp:
    peer: PeerInfo


@dataclass(frozen=True, slots=True)
class PeerDown:
    peer: PeerInfo
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Something was dropped; ``reason`` is fixed text, fit for a counter's label; ``node_id`` whose, if proven."""

    reason: str
    node_id: str = ""


@dataclass(frozen=True, slots=True)
class NameTaken:
    """A member says hello under a node id that is bound to another identity key; follows its Refused."""

    node_id: str


ServerEffect: TypeAlias = (
    RouteTransmit | RequestOpened | RequestUpdated | RequestEnded | PeerUp | PeerDown | Refused | NameTaken
)


# --- identities ----------------------------------------------------------------------------------------------------


def one_line(text: str) -> str:
    """Text that fits a message and a log line, also when a peer wrote it."""
    return " ".join(text.split())[: limits.TEXT_CHARACTERS_MAX]
