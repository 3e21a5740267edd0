"""The client's side of a control session; rules and theory of operation in kakeya_zmq.protocol.session."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, assert_never

from kakeya_zmq.protocol.effects import Tick
from kakeya_zmq.protocol.identities import OTHER_KEY, IdentityBook
from kakeya_zmq.protocol.session_values import (
    BACKOFF_FIRST_S,
    BACKOFF_LAST_S,
    DEADLINE_S_MAX,
    HELLO_RESEND_S,
    PEER_LOST_S,
    PING_AFTER_NOT_SENDING_S,
    PING_AFTER_SILENCE_S,
    PINGS_PENDING_MAX,
    REQUESTS_WAITING_MAX,
    Abandon,
    ClientEffect,
    ClientEvent,
    Failed,
    FramesReceived,
    Leave,
    LocalNode,
    Measured,
    PeerInfo,
    Progressed,
    Reopen,
    Replied,
    SessionDown,
    SessionUp,
    SocketOpened,
    StartCancel,
    StartRequest,
    StartUpdate,
    Transmit,
    one_line,
)
from wire import handshake, limits
from wire.codec import decode_server, encode_client
from wire.errors import FailureCode, LocalProtocolError, RemoteProtocolError
from wire.frames import FrameKind, Header, split_frames
from wire.keys import CurvePair, FleetKey
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
    RequestBody,
    ServerEnvelope,
    Update,
    Welcome,
)

NO_WELCOME: Final = (
    "it does not answer our hello: it is paused or overloaded, of another protocol version, or knows our node id {node_id} "
    "under another identity key (every node needs a --node-id of its own)"
)


class ClientState(Enum):
    CLOSED = "closed"
    GREETING = "greeting"
    UP = "up"
    LEFT = "left"


@dataclass(slots=True)
class _Greeting:
    """A HELLO that waits for its WELCOME."""

    frames: tuple[bytes, bytes]
    hello_hash: bytes
    ephemeral: CurvePair
    started_at: float
    sent_at: float


@dataclass(slots=True)
class _Line:
    """An established session of the client."""

    peer: PeerInfo
    channel: handshake.Channel
    heard_at: float
    sent_at: float
    silent_since: float | None = None
    """When the first Ping went out that nothing has been heard after."""
    pinged_at: float = 0.0
    pings: deque[float] = field(default_factory=lambda: deque(maxlen=PINGS_PENDING_MAX))
    """Send times of Pings whose Pong is due; Pongs come in the order of Pings."""


class ClientSession:
    """The client's side of one server; see the module's theory of operation.

    Args:
        local: this node.
        fleet_key: the PSK.
        random_bytes: source of randomness.
        expected_node_id: the only node to talk to, or None for whoever answers.
        identities: which key belongs to which node id; a book of its own when None.
    """

    def __init__(
        self,
        *,
        local: LocalNode,
        fleet_key: FleetKey,
        random_bytes: Callable[[int], bytes],
        expected_node_id: str | None = None,
        identities: IdentityBook | None = None,
    ) -> None:
        self.refusals: Counter[str] = Counter()
        self.state = ClientState.CLOSED
        self.answered_by: str | None = None
        """The name that another node than the expected one gave when it answered last."""
        self.replaced_because = "the socket was replaced"
        """Why the host replaced a socket with a session, for the requests that fail by it."""
        self._local = local
        self._keys = handshake.HandshakeKeys(fleet_key)
        self._random_bytes = random_bytes
        self._expected_node_id = expected_node_id
        self._identities = identities or IdentityBook((local.node_id, local.identity.public_key))
        self._greeting: _Greeting | None = None
        self._line: _Line | None = None
        self._failed_attempts = 0
        self._last_issued_id = 0
        self._last_started_id = 0
        self._waiting: OrderedDict[int, tuple[RequestBody, float]] = OrderedDict()
        """Not sent yet: request id → (body, absolute deadline)."""
        self._sent: dict[int, tuple[RequestBody, float]] = {}
        """Sent and open: request id → (body, absolute deadline)."""

    @property
    def peer(self) -> PeerInfo | None:
        """The server, while the session is up."""
        return self._line.peer if self._line is not None else None

    def use_key(self, fleet_key: FleetKey) -> None:
        """Speak under this PSK from the next SocketOpened on."""
        self._keys = handshake.HandshakeKeys(fleet_key)

    def next_request_id(self) -> int:
        """A new request id."""
        self._last_issued_id += 1
        return self._last_issued_id

    def deadline(self) -> float | None:
        """When to call with Tick at the latest; None: only when something happens."""
        times = [deadline for _, deadline in self._sent.values()]
        times.extend(deadline for _, deadline in self._waiting.values())
        if self._greeting is not None:
            times.append(min(self._greeting.sent_at + HELLO_RESEND_S, self._greeting.started_at + PEER_LOST_S))
        if self._line is not None:
            times.append(self._ping_due(self._line))
            if self._line.silent_since is not None:
                times.append(self._line.silent_since + PEER_LOST_S - PING_AFTER_SILENCE_S)
        return min(times, default=None)

    def on(self, event: ClientEvent, now: float) -> list[ClientEffect]:
        """Take note of an event.

        Raises:
            LocalProtocolError: StartRequest with an id that is not greater than the last one started.
        """
        effects: list[ClientEffect] = []
        match event:
            case SocketOpened():
                if self.state is not ClientState.LEFT:
                    self._lose(self.replaced_because, effects)
                    self._greet(now, effects)
            case FramesReceived(frames=frames):
                self._receive(frames, now, effects)
            case Abandon(reason=reason, wait_s=wait_s):
                if self.state is not ClientState.LEFT:
                    self._retire(reason, now, effects, wait_s=wait_s)
            case StartRequest():
                self._start(event, now, effects)
            case StartUpdate(request_id=request_id, body=body):
                if request_id in self._sent:
                    self._transmit(Update(request_id=request_id, body=body), now, effects)
            case StartCancel(request_id=request_id):
                self._waiting.pop(request_id, None)
                if self._sent.pop(request_id, None) is not None:
                    self._transmit(Cancel(request_id=request_id), now, effects)
            case Tick():
                pass
            case Leave(reason=reason):
                self._leave(reason, now, effects)
            case _:
                assert_never(event)
        self._run_clock(now, effects)
        self._flush(now, effects)
        return effects

    # requests

    def _start(self, event: StartRequest, now: float, effects: list[ClientEffect]) -> None:
        if event.request_id <= self._last_started_id:
            raise LocalProtocolError(f"request id {event.request_id} after {self._last_started_id}")
        self._last_started_id = event.request_id
        self._last_issued_id = max(self._last_issued_id, event.request_id)
        if self.state is ClientState.LEFT:
            effects.append(Failed(event.request_id, FailureCode.UNAVAILABLE, "this client has left"))
        elif len(self._waiting) >= REQUESTS_WAITING_MAX:
            effects.append(Failed(event.request_id, FailureCode.RESOURCE_EXHAUSTED, "too many requests wait for this peer"))
        else:
            self._waiting[event.request_id] = (event.body, now + min(event.timeout_s, DEADLINE_S_MAX))

    def _flush(self, now: float, effects: list[ClientEffect]) -> None:
        while self._line is not None and self._waiting and len(self._sent) < limits.REQUESTS_IN_FLIGHT_MAX:
            request_id, (body, deadline) = self._waiting.popitem(last=False)
            deadline_ms = max(1, int((deadline - now) * 1000))
            try:
                self._transmit(Request(request_id=request_id, deadline_ms=deadline_ms, body=body), now, effects)
            except LocalProtocolError as error:
                effects.append(Failed(request_id, FailureCode.INVALID_ARGUMENT, error.message))
            else:
                self._sent[request_id] = (body, deadline)

    def _fail_sent(self, reason: str, effects: list[ClientEffect]) -> None:
        effects.extend(Failed(request_id, FailureCode.UNAVAILABLE, reason) for request_id in self._sent)
        self._sent.clear()

    # the clock

    @staticmethod
    def _ping_due(line: _Line) -> float:
        heard_or_pinged = max(line.heard_at, line.pinged_at)
        return min(heard_or_pinged + PING_AFTER_SILENCE_S, line.sent_at + PING_AFTER_NOT_SENDING_S)

    def _run_clock(self, now: float, effects: list[ClientEffect]) -> None:
        for request_id in [each for each, (_, deadline) in self._sent.items() if deadline <= now]:
            del self._sent[request_id]
            self._transmit(Cancel(request_id=request_id), now, effects)
            effects.append(Failed(request_id, FailureCode.DEADLINE_EXCEEDED, "no answer within the deadline"))
        for request_id in [each for each, (_, deadline) in self._waiting.items() if deadline <= now]:
            del self._waiting[request_id]
            effects.append(Failed(request_id, FailureCode.DEADLINE_EXCEEDED, "the peer was not reached within the deadline"))
        greeting, line = self._greeting, self._line
        if greeting is not None:
            if now >= greeting.started_at + PEER_LOST_S:
                # The transport's handshake may be through: then the PSK is right, and the server drops or can't answer us.
                self._retire(NO_WELCOME.format(node_id=self._local.node_id), now, effects)
            elif now >= greeting.sent_at + HELLO_RESEND_S:
                greeting.sent_at = now
                effects.append(Transmit(greeting.frames))
        elif line is not None:
            # Lost only after a Ping has gone unanswered: a stall of our own process is not the peer's silence.
            if line.silent_since is not None and now >= line.silent_since + PEER_LOST_S - PING_AFTER_SILENCE_S:
                self._retire(f"nothing heard for {PEER_LOST_S:.0f} seconds", now, effects)
            elif now >= self._ping_due(line):
                self._ping(line, now, effects)

    def _ping(self, line: _Line, now: float, effects: list[ClientEffect]) -> None:
        line.pinged_at = now
        line.pings.append(now)
        if line.silent_since is None:
            line.silent_since = now
        self._transmit(Ping(), now, effects)

    # session

    def _greet(self, now: float, effects: list[ClientEffect]) -> None:
        ephemeral = handshake.new_ephemeral(self._random_bytes)
        local = self._local
        hello = Hello(
            node_id=local.node_id,
            identity_public_key=local.identity.public_key,
            ephemeral_public_key=ephemeral.public,
            incarnation=local.incarnation,
            roles=local.roles,
            software=local.software,
            signature=b"",
        )
        frames = handshake.seal_hello(hello, local.identity, self._keys, self._random_bytes)
        self.state = ClientState.GREETING
        self._greeting = _Greeting(frames, handshake.hash_hello(frames), ephemeral, started_at=now, sent_at=now)
        effects.append(Transmit(frames))

    def _lose(self, reason: str, effects: list[ClientEffect]) -> None:
        """Forget session and handshake, if there are any."""
        self._greeting = None
        if self._line is not None:
            self._line = None
            # First that the peer is gone: whoever is told of a failure may ask again, and must not ask it.
            effects.append(SessionDown(reason))
            self._fail_sent(f"the session was lost: {reason}", effects)

    def _retire(self, reason: str, now: float, effects: list[ClientEffect], *, wait_s: float = 0.0) -> None:
        """Give this socket up and try another one later, not before ``wait_s``."""
        if self._line is None:
            effects.append(SessionDown(reason))
        self._lose(reason, effects)
        self.state = ClientState.CLOSED
        longest = min(BACKOFF_LAST_S, BACKOFF_FIRST_S * 2 ** min(self._failed_attempts, 16))
        self._failed_attempts += 1
        fraction = int.from_bytes(self._random_bytes(4), "little") / 2**32
        effects.append(Reopen(delay_s=wait_s + longest * fraction))

    def _follow(self, goodbye: Goodbye, now: float, effects: list[ClientEffect]) -> None:
        """The server goes on elsewhere; what it has not looked at waits for it there."""
        again = {each: entry for each, entry in self._sent.items() if each >= goodbye.unopened_from}
        for request_id in again:
            del self._sent[request_id]
        self._waiting = OrderedDict(sorted([*again.items(), *self._waiting.items()]))
        self._lose(f"the server moved: {one_line(goodbye.reason)}", effects)
        self.state = ClientState.CLOSED
        effects.append(Reopen(delay_s=0.0, port=goodbye.moved_to))

    def _leave(self, reason: str, now: float, effects: list[ClientEffect]) -> None:
        if self.state is ClientState.LEFT:
            return
        if self._line is not None:
            self._transmit(Goodbye(reason=one_line(reason)), now, effects)
            effects.append(SessionDown(reason))
        for request_id in (*self._sent, *self._waiting):
            effects.append(Failed(request_id, FailureCode.CANCELLED, "this client is leaving"))
        self._sent.clear()
        self._waiting.clear()
        self._line = self._greeting = None
        self.state = ClientState.LEFT

    def _transmit(self, envelope: ClientEnvelope, now: float, effects: list[ClientEffect]) -> None:
        if self._line is not None:
            plaintext = encode_client(envelope)
            self._line.sent_at = now
            effects.append(Transmit(self._line.channel.seal(plaintext)))

    # frames

    def _receive(self, frames: tuple[bytes, ...], now: float, effects: list[ClientEffect]) -> None:
        if self.state in (ClientState.CLOSED, ClientState.LEFT):
            self.refusals["no socket is open"] += 1
            return
        try:
            header, body = split_frames(frames)
            if header.key_id != self._keys.key_id:
                raise RemoteProtocolError("another fleet key")
            self._dispatch(header, body, now, effects)
        except RemoteProtocolError as error:
            self.refusals[error.message] += 1

    def _dispatch(self, header: Header, body: bytes, now: float, effects: list[ClientEffect]) -> None:
        greeting, line = self._greeting, self._line
        if header.kind is FrameKind.WELCOME and greeting is not None:
            self._welcome(header, body, greeting, now, effects)
        elif header.kind is FrameKind.SEALED and line is not None:
            plaintext = line.channel.open(header, body)
            line.heard_at = now
            line.silent_since = None
            self._envelope(decode_server(plaintext), line, now, effects)
        elif header.kind is FrameKind.UNKNOWN_SESSION and line is not None and header.session_id == line.channel.session_id:
            handshake.open_unknown_session(header, body, self._keys, line.peer.identity_public_key)
            self._lose("the server does not know the session any more", effects)
            self._greet(now, effects)
        else:
            raise RemoteProtocolError("an unexpected message")

    def _welcome(self, header: Header, body: bytes, greeting: _Greeting, now: float, effects: list[ClientEffect]) -> None:
        welcome = handshake.open_welcome(header, body, self._keys, greeting.hello_hash)
        refusal = self._refuse_node(welcome)
        if refusal is not None:
            self.refusals[refusal] += 1
            for request_id in self._waiting:
                effects.append(Failed(request_id, FailureCode.UNAVAILABLE, refusal))
            self._waiting.clear()
            self._retire(refusal, now, effects)
            return
        keys = handshake.agree_on_keys(self._keys, greeting.ephemeral, welcome.ephemeral_public_key, welcome)
        channel = handshake.Channel(
            session_id=welcome.session_id,
            key_id=self._keys.key_id,
            send_key=keys.client_to_server,
            receive_key=keys.server_to_client,
        )
        peer = PeerInfo(
            session_id=welcome.session_id,
            node_id=welcome.node_id,
            identity_public_key=welcome.identity_public_key,
            roles=welcome.roles,
            incarnation=welcome.incarnation,
            software=welcome.software,
            bus_port=welcome.bus_port,
        )
        self._greeting = None
        self._failed_attempts = 0
        self.state = ClientState.UP
        self._line = _Line(peer, channel, heard_at=now, sent_at=now)
        effects.append(SessionUp(peer))
        self._ping(self._line, now, effects)

    def _refuse_node(self, welcome: Welcome) -> str | None:
        if self._expected_node_id is not None and welcome.node_id != self._expected_node_id:
            self.answered_by = welcome.node_id
            return "another node answers at this address"
        refusal = self._identities.admit(welcome.node_id, welcome.identity_public_key, welcome.roles, dialled=True)
        if refusal == OTHER_KEY:
            return "the node answers with another identity key than before"
        return f"the node that answers is not accepted: {refusal}" if refusal else None

    def _envelope(self, envelope: ServerEnvelope, line: _Line, now: float, effects: list[ClientEffect]) -> None:
        match envelope:
            case Reply(request_id=request_id, body=reply):
                if self._sent.pop(request_id, None) is not None:
                    effects.append(Replied(request_id, reply))
            case Progress(request_id=request_id, body=progress):
                if request_id in self._sent:
                    effects.append(Progressed(request_id, progress))
            case Failure(request_id=request_id, code=code, message=message):
                if self._sent.pop(request_id, None) is not None:
                    effects.append(Failed(request_id, code, one_line(message)))
            case Pong():
                if line.pings:
                    effects.append(Measured(round_trip_ms=max(0.0, (now - line.pings.popleft()) * 1000)))
            case Goodbye(moved_to=port) if port:
                self._follow(envelope, now, effects)
            case Goodbye(reason=reason):
                self._retire(f"the server left: {one_line(reason)}", now, effects)
            case _:
                assert_never(envelope)
